"""Every test sees eight CPU devices, strict broadcasting and checked annotations."""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from collections.abc import Iterator

import hypothesis
import jax
import jaxtyping
import pytest
from jaxtyping import install_import_hook

from tests.fuzz import CASES
from tests.quick import (
    collect_garbage_rarely,
    compile_quickly,
    cores,
    free_programs,
    sort_slow_first,
    thin_out,
)
from tests.typecheck import typechecked

# An environment that names a platform (JAX_PLATFORMS=cuda) runs the tests there instead.
if "JAX_PLATFORMS" not in os.environ:
    jax.config.update("jax_platforms", "cpu")
compile_quickly()
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
# A program compiled by an earlier run, or by other settings, must not hide what this one compiles.
jax.config.update("jax_enable_compilation_cache", False)

# Choices of `jaxrec tune` that are kept on this machine must not change what the tests run.
os.environ["JAXREC_CACHE_DIR"] = os.path.join(tempfile.gettempdir(), "jaxrec-tests")

# From here on each annotated function of the package is checked as it is called: the types by
# beartype, the shapes by jaxtyping.
install_import_hook("jaxrec", f"{typechecked.__module__}.{typechecked.__name__}")

# The first example compiles, and two runs of the suite test the same examples.
hypothesis.settings.register_profile("jaxrec", deadline=None, derandomize=not CASES)
hypothesis.settings.load_profile("jaxrec")

finished_tests = itertools.count(1)


# At most so many cases of a test with parameters run; by default all.
MOST_CASES = int(os.environ.get("JAXREC_TEST_CASES", sys.maxsize))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=thin_out(items, MOST_CASES))
    sort_slow_first(items)


def pytest_collection_finish() -> None:
    collect_garbage_rarely()


def pytest_runtest_teardown() -> None:
    if next(finished_tests) % 20 == 0:
        free_programs()


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One process a core, four at most for their memory; the tests of one file run in this one."""
    is_one_file = len(config.args) == 1 and ".py" in config.args[0]
    return 0 if is_one_file else min(cores(), 4)


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Turns the checks of annotations off, to see what a user sees who gives a wrong type."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
