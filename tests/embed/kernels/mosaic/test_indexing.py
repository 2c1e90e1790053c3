"""What threads have, and the order of their loads and stores."""

from __future__ import annotations

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec import optim
from jaxrec.embed.formats import as_table
from jaxrec.embed.kernels import Lookups
from jaxrec.embed.state import state_format
from tests.embed.kernels.gpu_cases import backend

pytestmark = [pytest.mark.jax_version, pytest.mark.usefixtures("mosaic")]

THREADS, WARP = 128, 32


@pytest.fixture
def mosaic():
    return backend("mosaic")


def module(name: str):
    return importlib.import_module(f"jaxrec.embed.kernels.mosaic.{name}")


def elements_of_threads(layout, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers of an array's elements, ``[threads, *registers, vector]``, by a layout's tiling."""
    numbers = np.arange(np.prod(shape)).reshape(shape)
    for tile in layout.tiling.tiles:
        first = numbers.ndim - len(tile)
        sizes = [
            size
            for all_, inner in zip(numbers.shape[first:], tile, strict=True)
            for size in (all_ // inner, inner)
        ]
        numbers = numbers.reshape(*numbers.shape[:first], *sizes)
        outer = range(first, numbers.ndim, 2)
        numbers = numbers.transpose(*range(first), *outer, *(each + 1 for each in outer))
    of_threads = [each % numbers.ndim for each in (*layout.warp_dims, *layout.lane_dims)]
    numbers = np.moveaxis(numbers, of_threads, range(len(of_threads)))
    return numbers.reshape(THREADS, *numbers.shape[len(of_threads) :])


@pytest.mark.parametrize("dim", [1, 3, 16, 20, 100, 128, 130, 255, 256, 260, 768, 1028, 4095, 4096])
def test_threads_have_the_columns_that_they_load(dim: int):
    """`indexing` computes addresses from the thread's number; the layout must agree."""
    lanes_of = module("lanes").Lanes.of
    for lanes in {module("runs").row_lanes(dim), *(lanes_of(dim, 2**i) for i in range(5))}:
        shape = 2 * lanes.height, lanes.columns
        layout = lanes.rows.to_mgpu()
        assert layout.registers_shape(shape)[:2] == (2, lanes.steps)
        found = elements_of_threads(layout, shape).reshape(THREADS, 2, lanes.steps, lanes.vector)
        thread, row, step, element = np.ogrid[:THREADS, :2, : lanes.steps, : lanes.vector]
        row = row * lanes.height + thread // lanes.threads
        column = thread % lanes.threads * lanes.vector + step * lanes.threads * lanes.vector
        np.testing.assert_array_equal(found, row * lanes.columns + column + element)


@pytest.mark.parametrize(
    ("rule", "waits"),
    [
        (optim.sgd(0.1), 0),
        (optim.adam(0.1, rowwise_bias_correction=True), 1),
        (optim.adam(0.1, state_dtype="float8"), 1),
    ],
    ids=["sgd", "adam_with_counts", "adam_with_packed_state"],
)
def test_threads_wait_before_one_stores_what_all_load(monkeypatch, rule, waits: int):
    """Threads of other warps could load a row's count after the first thread stored the new one."""
    calls: list[str] = []

    def watch(name: str, of_module: str):
        function = getattr(module(of_module), name)

        def watched(*arguments):
            calls.append(name)
            return function(*arguments)

        monkeypatch.setattr(module(of_module), name, watched)

    for name in ("load", "load_words", "store", "store_words"):
        watch(name, "stored_rows")
    watch("wait_for_loads", "update")
    table, rows = jnp.ones((3, 8)), jnp.array([1], jnp.int32)
    state = {}
    for name, array in rule.init(*table.shape).items():
        row_format = state_format(rule, name, array.ndim)
        is_number = array.ndim == 1
        state[name] = array if is_number else as_table(row_format.pack(array), row_format, 8)
    lookups = Lookups(rows, jnp.zeros(1, jnp.int32), None)
    update = functools.partial(module("update").fused_update, optimizer=rule, interpret=True)
    jax.eval_shape(update, table, state, lookups, jnp.ones((1, 8)), step=jnp.int32(0))
    assert calls.count("wait_for_loads") == waits
    stores = [name.startswith("store") for name in calls if name != "wait_for_loads"]
    assert stores == sorted(stores)
    if waits:
        assert calls.index("wait_for_loads") == stores.count(False)
