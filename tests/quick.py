"""What makes the tests quick: most of their time JAX lowers and XLA compiles small programs."""

from __future__ import annotations

import gc
import os
import pathlib
import re
import threading
from collections.abc import Mapping, Sequence

import jax
import pytest
from jax._src.interpreters import mlir

from tests import fuzz

# The files whose tests take longest, longest first. The last of them must not begin when the other
# processes are about to end.
SLOW = (
    "tests/train/test_cli.py",
    "tests/examples/test_examples.py",
    "tests/nn/test_every_module.py",
    "tests/test_docstrings.py",
    "tests/tier/test_processes.py",
    "tests/train/test_ahead.py",
    "tests/mesh/test_training.py",
    "tests/train/test_placed_checkpoints.py",
    "tests/train/test_checkpoint.py",
    "tests/test_docs.py",
    "tests/mesh/test_any_table.py",
    "tests/tier/test_checkpoints.py",
    "tests/tier/test_shard.py",
    "tests/mesh/test_processes.py",
    "tests/mesh/test_creation.py",
    "tests/plan/test_planner.py",
    "tests/train/test_columns.py",
    "tests/train/test_trainer.py",
    "tests/mesh/test_selftest.py",
    "tests/nn/test_multi_tower.py",
    "tests/examples/test_notebooks.py",
    "tests/train/test_killed.py",
    "tests/tier/managed_collision/test_batch_maps.py",
    "tests/embed/kernels/test_primitives.py",
    "tests/mesh/test_compiled.py",
    "tests/embed/test_collection.py",
    "tests/metrics/test_processes.py",
)


# How many cases of each test with parameters run at most, "all", or nothing: MOST_CASES of each
# test but those whose cases are all run.
CASES = os.environ.get("JAXREC_TEST_CASES", "")
MOST_CASES = 3

# Tests whose cases each say something of their own, as the pages of the docs, recorded data and
# messages do, or take no time.
ALL_CASES = re.compile(
    r"tests/(test_|data/|examples/|ragged/|train/test_(cli|options|damage)|serve/http/|tune/"
    r"|plan/test_(cli|constraints|load|model_file|rates))|test_golden\.py"
)

# An address of memory, as the repr of a function ends with one.
ADDRESS = re.compile(r"(?<![0-9A-Za-z])at[ _]0x[0-9a-f]")


def runs_all() -> bool:
    """Whether nothing is left out: all cases, and all checks of annotations."""
    return CASES == "all"


def draw_small_blocks() -> None:
    """Draw first values of tables in blocks of 16,384 elements, 64 kB, instead of 1 MB.

    A table smaller than a block draws a whole one, and drawing is slow where LLVM optimizes
    nothing: 25 ms a table. Such a table gets the same values from blocks of both sizes.
    """
    from jaxrec.embed import initialize  # with the checks of its annotations

    initialize.BLOCK_ELEMENTS = 1 << 14


def compile_quickly() -> None:
    """Compile with the oldest supported JAX in a third of the time.

    XLA makes code for CPUs in its older way, without LLVM's optimizations, and programs of one
    thread share an MLIR context, as they do in newer versions of JAX; creating one takes half of
    the time in which a small program is lowered. The newest JAX, whose XLA has only the newer way,
    tests the very programs that users run.
    """
    if jax.__version_info__ >= (0, 11) or os.environ.get("JAX_PLATFORMS", "cpu") != "cpu":
        return
    flags = (
        "--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0"
        " --xla_cpu_parallel_codegen_split_count=1"
    )
    os.environ["XLA_FLAGS"] = f"{flags} {os.environ.get('XLA_FLAGS', '')}"

    shared = threading.local()
    create_context = mlir.make_ir_context

    def make_ir_context():
        if not hasattr(shared, "context"):
            shared.context = create_context()
        return shared.context

    mlir.make_ir_context = make_ir_context


def sort_slow_first(items: list[pytest.Item]) -> None:
    """Put the tests of the slow files before the others, each file's in the order that it has."""
    places = {name: place for place, name in enumerate(SLOW)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))


def refuse_addresses(items: list[pytest.Item]) -> None:
    """Refuse tests whose names hold an address of memory, which each process has another of.

    The processes of pytest-xdist must find the same tests; they do so by chance where an address is
    cut, until the first run in which they do not.

    Raises:
        pytest.UsageError: With the names of such tests.
    """
    names = [item.nodeid for item in items if ADDRESS.search(item.nodeid)]
    if names:
        raise pytest.UsageError(
            f"the names of tests must not hold addresses; give ids= to {', '.join(names)}"
        )


def name_of_test(item: pytest.Item) -> str:
    """Return the name of a case's test: the file and the function."""
    return item.nodeid.partition("[")[0]


def thin_out(items: list[pytest.Item]) -> list[pytest.Item]:
    """Leave out the cases of tests that `JAXREC_TEST_CASES` says are too many.

    Returns:
        What is left out.
    """
    if runs_all() or (fuzz.CASES and not CASES):  # a seed of a fuzz test is a case
        return []
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(name_of_test(item), []).append(item)
    kept: set[pytest.Item] = set()
    for name, of_test in cases.items():
        if not CASES and ALL_CASES.search(name):
            kept.update(of_test)
        elif len(of_test) > 1:
            values = [item.callspec.indices for item in of_test]
            kept.update(of_test[place] for place in choose(values, int(CASES or MOST_CASES)))
        else:
            kept.update(of_test)
    left_out = [item for item in items if item not in kept]
    items[:] = [item for item in items if item in kept]
    return left_out


def choose(cases: Sequence[Mapping[str, int]], most: int) -> list[int]:
    """Choose cases of a test that have many values of its parameters and are far from each other.

    Args:
        cases: The places of each case's values among those of each parameter.
        most: Number of cases that are chosen at most.

    Returns:
        The places of the chosen cases, the first case among them.
    """
    chosen: list[int] = []
    seen: set[tuple[str, int]] = set()

    def gain(place: int) -> tuple[int, int]:
        far = min((abs(place - other) for other in chosen), default=0)
        return len(cases[place].items() - seen), far

    rest = list(range(len(cases)))
    while rest and len(chosen) < most:
        best = max(rest, key=gain)  # the first of several
        chosen.append(best)
        rest.remove(best)
        seen.update(cases[best].items())
    return chosen


def collect_garbage_rarely() -> None:
    """Exempt all objects of now from garbage collection, which goes through millions of them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def free_programs() -> None:
    """Free compiled programs before their number crashes the process.

    Each takes about three memory maps. LLVM crashes where it gets no further one, and Linux allows
    a process 65,530.
    """
    maps = pathlib.Path("/proc/self/maps")  # not on macOS
    if maps.exists() and maps.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()
        gc.collect()


def cores() -> int:
    """Number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
