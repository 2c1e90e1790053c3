"""Copies of rows by index, and the blocks of each subcore; interpreted."""

from __future__ import annotations

import dataclasses
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = [pytest.mark.jax_version, pytest.mark.usefixtures("on_chip")]


def test_ignored_rows_are_neither_read_nor_written():
    from jax.experimental.pallas import tpu as pltpu

    from jaxrec.embed.kernels.sparse_core.subcores import (
        Subcores,
        entries,
        list_buffer,
        rows_buffer,
    )

    subcores = Subcores.of(interpret=True)
    source = jnp.arange(10 * 128.0).reshape(10, 128)
    indices = jnp.array([3, -1, 0, 9, -1, 5, 1, 2], jnp.int32)
    targets = jnp.array([7, 2, -1, 0, -1, 1, 3, 4], jnp.int32)

    def kernel(inputs, target, outputs, own):
        *numbers, rows = own
        source, *lists = inputs
        for array, buffer in zip(lists, numbers, strict=True):
            pltpu.sync_copy(array, entries(buffer))
        rows[...] = jnp.full(rows.shape, -1.0)
        subcores.read_rows(source, numbers[0], rows)
        subcores.write_rows(rows, target, numbers[1])

    scratch = list_buffer(8), list_buffer(8), rows_buffer(8, 128)
    _, found = subcores.launch(
        kernel, (source, indices, targets), changed=jnp.zeros((8, 128)), scratch=scratch
    )
    expected = np.zeros((8, 128))
    for index, target in zip(indices.tolist(), targets.tolist(), strict=True):
        if target >= 0:
            expected[target] = source[index] if index >= 0 else -1
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("count", [1, 6, 13])
def test_each_block_runs_on_one_subcore(count: int, monkeypatch):
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    from jaxrec.embed.kernels.sparse_core.subcores import Subcores, rows_buffer

    subcores = Subcores.of(interpret=True)
    # The interpreter has one subcore, so it plays six of them, one after the other.
    six = dataclasses.replace(subcores, mesh=types.SimpleNamespace(size=6, num_cores=2))

    def kernel(inputs, changed, outputs, own):
        own[...] = jnp.zeros(own.shape)

        def mark(block):
            own[pl.ds(block, 1), :] += 1

        for core, subcore in itertools.product(range(2), range(3)):
            number = {"jaxrec_core": core, "jaxrec_subcore": subcore}
            monkeypatch.setattr(jax.lax, "axis_index", lambda name, number=number: number[name])
            six.each_block(count, mark)
        pltpu.sync_copy(own, outputs[0])

    output = jax.ShapeDtypeStruct((16, 128), jnp.float32)
    (found,), _ = subcores.launch(kernel, (), (output,), scratch=rows_buffer(16, 128))
    np.testing.assert_array_equal(found[:, 0], np.arange(16) < count)
