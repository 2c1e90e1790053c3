"""Every test sees eight CPU devices, strict broadcasting and checked annotations."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterator

import hypothesis
import jax
import jaxtyping
import pytest

from tests import typecheck
from tests.fuzz import CASES
from tests.quick import (
    collect_garbage_rarely,
    compile_quickly,
    cores,
    draw_small_blocks,
    free_programs,
    name_of_test,
    refuse_addresses,
    runs_all,
    sort_slow_first,
    thin_out,
)

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

typecheck.install(check_all_calls=runs_all())
draw_small_blocks()

# The first example compiles, and two runs of the suite test the same examples.
hypothesis.settings.register_profile("jaxrec", deadline=None, derandomize=not CASES)
hypothesis.settings.load_profile("jaxrec")

finished_tests = itertools.count(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    refuse_addresses(items)
    config.hook.pytest_deselected(items=thin_out(items))
    sort_slow_first(items)


def pytest_collection_finish() -> None:
    collect_garbage_rarely()


def pytest_runtest_setup(item: pytest.Item) -> None:
    typecheck.begin_test(name_of_test(item))


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
