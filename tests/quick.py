"""What makes the tests quick: most of their time JAX lowers and XLA compiles small programs."""

from __future__ import annotations

import ctypes
import gc
import os
import pathlib
import sys
import threading

import jax
from jax._src.interpreters import mlir
from jaxlib.mlir import ir

from tests.whole_programs import write_whole_programs, write_without_compression

# Environment variable with the directory of compiled programs, for processes of the run.
SHARED_PROGRAMS = "JAXREC_TEST_PROGRAMS"

# glibc's malloc.h
_M_MXFAST = 1
_M_TRIM_THRESHOLD = -1


def draw_small_blocks() -> None:
    """Draw first values of tables in blocks of 16,384 elements, 64 kB, instead of 1 MB.

    A small table of a large group draws a whole block, and drawing is slow where LLVM optimizes
    nothing: 25 ms a table. Values do not depend on the size of blocks.
    """
    from jaxrec.embed import first_values  # with the checks of its annotations

    first_values.BLOCK_ELEMENTS = 1 << 14


def compile_quickly() -> None:
    """Compile with the oldest supported JAX in a third of the time.

    XLA makes code for CPUs in its older way, without LLVM's optimizations, and programs of one
    thread share an MLIR context, as they do in newer versions of JAX. Creating one takes half of
    the time in which a small program is lowered: without this, the tests of tests/optim and two
    files of tests/embed take 49 s of processor time instead of 38. The newest JAX, whose XLA has
    only the newer way, tests the very programs that users run.
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
        if ir.Context.current is not None:  # A program that another one needs to be lowered.
            return create_context()
        if not hasattr(shared, "context"):
            shared.context = create_context()
        return shared.context

    mlir.make_ir_context = make_ir_context


def lower_without_sources() -> None:
    """Lower programs without the source lines of their operations, which no test reads.

    JAX writes the whole stack behind each operation, and the stack of a test has a hundred frames.
    A tenth of the tests' processor time went there.
    """
    jax.config.update("jax_traceback_in_locations_limit", 0)


def keep_freed_memory() -> None:
    """Let the C library reuse freed memory as it is, without merging it or giving it back.

    LLVM and MLIR allocate and free millions of small objects for each program.
    """
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "mallopt"):  # not musl
        for parameter, value in ((_M_MXFAST, 0), (_M_TRIM_THRESHOLD, 1 << 30)):
            library.mallopt(parameter, value)


def share_programs(directory: str) -> None:
    """Keep compiled programs in a directory, for this process and its forks (`tests/forks.py`).

    The directory lasts for one run: a program that was compiled of another tree must not hide what
    this one compiles. Other processes do without: they write in place, and one that is killed
    leaves half of a program.
    """
    write_whole_programs()
    write_without_compression()
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    os.environ[SHARED_PROGRAMS] = directory


def collect_garbage_rarely() -> None:
    """Exempt all objects of now from garbage collection, which goes through millions of them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)


def end_without_collections() -> None:
    """Collect garbage a last time, and exempt what is left.

    pytest, JAX and Python each collect once more when a session ends, through gigabytes. Errors of
    the objects that are collected here end the session as they would there.
    """
    gc.collect()
    gc.freeze()


def free_programs() -> None:
    """Free compiled programs before their number crashes the process.

    Each takes about three memory maps. LLVM crashes where it gets no further one, and Linux allows
    a process 65,530.
    """
    maps = pathlib.Path("/proc/self/maps")  # not on macOS
    if maps.exists() and maps.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()
        gc.collect()


def cores() -> int:
    """Number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
