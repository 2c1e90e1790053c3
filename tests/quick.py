"""What makes the tests quick: most of their time JAX lowers and XLA compiles small programs."""

from __future__ import annotations

import gc
import os
import pathlib
import threading

import jax
import pytest
from jax._src.interpreters import mlir

# The files whose tests take longest, longest first. The last of them must not begin when the other
# processes are about to end.
SLOW = (
    "tests/train/test_cli.py",
    "tests/nn/test_every_module.py",
    "tests/test_docstrings.py",
    "tests/examples/test_examples.py",
    "tests/mesh/test_training.py",
    "tests/train/test_checkpoint.py",
    "tests/train/test_placed_checkpoints.py",
    "tests/test_docs.py",
    "tests/train/test_trainer.py",
    "tests/examples/test_notebooks.py",
    "tests/embed/kernels/test_primitives.py",
    "tests/mesh/test_selftest.py",
    "tests/mesh/test_compiled.py",
    "tests/mesh/test_processes.py",
    "tests/metrics/test_processes.py",
    "tests/embed/test_collection.py",
    "tests/train/test_columns.py",
)


def compile_quickly() -> None:
    """Compile with the oldest supported JAX in a third of the time.

    XLA makes code for CPUs in its older way, without LLVM's optimizations, and programs of one
    thread share an MLIR context, as they do in newer versions of JAX; creating one takes half of
    the time in which a small program is lowered. The newest JAX, whose XLA has only the newer way,
    tests the very programs that users run.
    """
    if jax.__version_info__ >= (0, 11) or os.environ.get("JAX_PLATFORMS", "cpu") != "cpu":
        return
    flags = "--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0"
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


def thin_out(items: list[pytest.Item], most: int) -> list[pytest.Item]:
    """Keep at most so many cases of each test, spread evenly over its parameters.

    Returns:
        The cases that are left out.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept: set[pytest.Item] = set()
    for of_test in cases.values():
        count = min(most, len(of_test))
        kept.update(of_test[index * len(of_test) // count] for index in range(count))
    left_out = [item for item in items if item not in kept]
    items[:] = [item for item in items if item in kept]
    return left_out


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
