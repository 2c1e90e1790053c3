"""The Mosaic kernel: interpreted on the CPU against the reference, and lowered for CUDA."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from jaxrec.embed.kernels import mosaic, reference
from tests.embed.kernels.gpu_cases import Batch, lowered_for_cuda

BATCHES = {
    "one_bag": Batch(128, ((3,),)),
    "rounds": Batch(128, ((8, 17, 0), (1, 16, 9)), weighted=True),
    "outside": Batch(256, ((2, 10), (0, 1)), outside=True),
    "uneven": Batch(128, ((1, 2, 0), (5,), (0, 3)), slack=0),
    "bfloat16": Batch(384, ((2, 9), (1, 4)), dtype="bfloat16", weighted=True),
    "all_empty": Batch(128, ((0, 0), (0, 0))),
    "no_ids": Batch(128, ((0, 0),), slack=0),
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_pooled_lookup(batch: Batch):
    arguments = (*batch.arrays(), batch.layout, jnp.float32)
    # The interpreter raises if a copy may overtake the reads of what it overwrites.
    interpret = InterpretGPUParams(detect_races=True)
    result = mosaic.pooled_lookup(*arguments, interpret=interpret)
    expected = jax.jit(reference.pooled_lookup, static_argnums=(4, 5))(*arguments)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_lowers_for_cuda(batch: Batch):
    kernel = functools.partial(mosaic.pooled_lookup, layout=batch.layout, dtype=jnp.bfloat16)
    program = lowered_for_cuda(kernel, *batch.arrays())
    assert ("mosaic_gpu" in program) == (batch.layout.num_positions > 0)


def test_other_widths_are_refused():
    refused = mosaic.refuse("pooled_lookup", {"table": jnp.zeros((2, 64))})
    assert refused == "it takes rows of a multiple of 128 elements, not 64"
    assert mosaic.refuse("pooled_lookup", {"table": jnp.zeros((2, 256))}) is None
