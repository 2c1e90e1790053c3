"""Every test sees eight CPU devices, strict broadcasting and checked annotations."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator

import hypothesis
import jax
import jaxtyping
import pytest

from tests import fuzz, typecheck
from tests.cases import long_files_first, refuse_addresses, runs_all, thin_out
from tests.data.streams.broker import broker  # noqa: F401
from tests.pairs import forks, pair  # noqa: F401
from tests.quick import (
    SHARED_PROGRAMS,
    collect_garbage_rarely,
    compile_quickly,
    cores,
    draw_small_blocks,
    end_without_collections,
    free_programs,
    keep_freed_memory,
    lower_without_sources,
    share_programs,
)

# An environment that names a platform (JAX_PLATFORMS=cuda) runs the tests there instead.
if "JAX_PLATFORMS" not in os.environ:
    jax.config.update("jax_platforms", "cpu")
compile_quickly()
lower_without_sources()
keep_freed_memory()
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

# Choices of `jaxrec tune` that are kept on this machine must not change what the tests run.
os.environ["JAXREC_CACHE_DIR"] = os.path.join(tempfile.gettempdir(), "jaxrec-tests")

typecheck.install(check_all_calls=runs_all())
draw_small_blocks()

# The first example compiles, and two runs of the suite test the same examples.
hypothesis.settings.register_profile("jaxrec", deadline=None, derandomize=not fuzz.CASES)
hypothesis.settings.load_profile("jaxrec")


def settings_of_jax() -> dict[str, str]:
    """Variables of the environment that JAX reads, in this process and in those of tests."""
    return {key: value for key, value in os.environ.items() if key.startswith(("JAX_", "XLA_"))}


SETTINGS = settings_of_jax()
finished_tests = itertools.count(1)
PROGRAMS = pytest.StashKey[str]()  # directory of the run's compiled programs


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests that are marked slow, too")


def pytest_configure(config: pytest.Config) -> None:
    directory = os.environ.get(SHARED_PROGRAMS)  # of the process that started this worker
    if directory is None:
        directory = config.stash[PROGRAMS] = tempfile.mkdtemp(prefix="jaxrec-programs-")
    share_programs(directory)


def pytest_unconfigure(config: pytest.Config) -> None:
    if PROGRAMS in config.stash:
        shutil.rmtree(config.stash[PROGRAMS], ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    refuse_addresses(items)
    long_files_first(items)
    if any("::" in argument for argument in config.args):  # Who names a test wants it to run.
        return
    left_out = thin_out(items)
    if not config.getoption("--slow"):
        left_out += [item for item in items if item.get_closest_marker("slow")]
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish() -> None:
    # A script that is imported may set them for itself. Processes of other tests would follow.
    assert settings_of_jax() == SETTINGS, "importing the tests changed what JAX reads"
    collect_garbage_rarely()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    end_without_collections()


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
