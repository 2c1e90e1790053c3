"""The names of `jaxrec` itself."""

from __future__ import annotations

import importlib.metadata
import pkgutil
import subprocess
import sys

import pytest

import jaxrec

PACKAGES = {module.name for module in pkgutil.iter_modules(jaxrec.__path__) if module.ispkg}


@pytest.mark.jax_version
def test_names_are_listed_and_exist():
    names = dir(jaxrec)
    assert PACKAGES | {"EmbeddingBagCollection", "shard", "__version__"} <= set(names)
    assert all(hasattr(jaxrec, name) for name in names)
    assert jaxrec.__version__ == importlib.metadata.version("jaxrec")
    with pytest.raises(AttributeError, match="module 'jaxrec' has no attribute 'nonsense'"):
        jaxrec.nonsense  # noqa: B018


@pytest.mark.jax_version
def test_modules_load_without_what_they_do_not_use():
    program = (
        "import sys, jaxrec; jaxrec.EmbeddingBagCollection, jaxrec.Optimizer; "
        "assert not {'jaxrec.mesh', 'jaxrec.tier', 'jaxrec.data', 'pyarrow'} & set(sys.modules); "
        "assert jaxrec.shard.__module__ == 'jaxrec.mesh.sharding'"
    )
    subprocess.run([sys.executable, "-P", "-c", program], check=True)


@pytest.mark.parametrize(
    ("package", "name", "now"),
    [
        ("mesh", "Precision", "ExchangePrecision"),
        ("nn", "Task", "TargetTask"),
        ("plan", "statistics", "sample_statistics"),
    ],
)
def test_earlier_names_are_there(package, name, now):
    module = getattr(jaxrec, package)
    with pytest.warns(
        DeprecationWarning, match=f"is now jaxrec.{package}.{now}; .* next minor version"
    ):
        assert getattr(module, name) is getattr(module, now)


def test_packages_load_on_first_use():
    program = (
        "import sys, jaxrec; assert 'jax' not in sys.modules; "
        f"print([getattr(jaxrec, name).__name__ for name in {sorted(PACKAGES)}])"
        "\nimport warnings\n"
        "with warnings.catch_warnings(record=True) as earlier: jaxrec.mesh.Precision\n"
        # Python shows the warning by default where the line is the program's own.
        "print([each.filename for each in earlier])"
    )
    run = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True
    )
    names = [f"jaxrec.{name}" for name in sorted(PACKAGES)]
    assert run.stdout.splitlines() == [str(names), "['<string>']"]
