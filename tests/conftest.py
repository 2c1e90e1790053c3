"""Every test sees eight CPU devices, strict broadcasting and checked annotations."""

from __future__ import annotations

import os
from collections.abc import Iterator

import hypothesis
import jax
import jaxtyping
import pytest
from jaxtyping import install_import_hook

from tests.fuzz import CASES
from tests.typecheck import typechecked

# An environment that names a platform (JAX_PLATFORMS=cuda) runs the tests there instead.
if "JAX_PLATFORMS" not in os.environ:
    jax.config.update("jax_platforms", "cpu")
# Most of a test's time is XLA's. The older of its two ways to make code for CPUs, without LLVM's
# optimizations, takes a third of it. The newest JAX, which has only the other way, tests the very
# programs that users run.
if jax.__version_info__ < (0, 11) and os.environ.get("JAX_PLATFORMS", "cpu") == "cpu":
    flags = "--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0"
    os.environ["XLA_FLAGS"] = f"{flags} {os.environ.get('XLA_FLAGS', '')}"
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
# A program compiled by an earlier run, or by other settings, must not hide what this one compiles.
jax.config.update("jax_enable_compilation_cache", False)

# From here on each annotated function of the package is checked as it is called: the types by
# beartype, the shapes by jaxtyping.
install_import_hook("jaxrec", f"{typechecked.__module__}.{typechecked.__name__}")

# The first example compiles, and two runs of the suite test the same examples.
hypothesis.settings.register_profile("jaxrec", deadline=None, derandomize=not CASES)
hypothesis.settings.load_profile("jaxrec")


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Turns the checks of annotations off, to see what a user sees who gives a wrong type."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
