"""Updates by the kernels in Triton: the order of a program's loads and stores."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from jaxrec import optim
from jaxrec.embed.kernels import Lookups
from tests.embed.kernels.gpu_cases import backend

pytestmark = pytest.mark.jax_version


@pytest.mark.filterwarnings("ignore:.*Triton.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("has_counts", "dim", "waits"),
    [(True, 512, True), (True, 256, False), (False, 512, False)],
    ids=["counts", "one_warp", "no_counts"],
)
def test_warps_wait_before_one_stores_what_all_load(has_counts: bool, dim: int, waits: bool):
    """A warp could load a row's count of updates after another one stored the new count."""
    rule = optim.adam(0.1, rowwise_bias_correction=has_counts)
    table, rows = jnp.zeros((3, dim)), jnp.zeros(2, jnp.int32)
    arguments = table, rule.init(3, dim), Lookups(rows, rows, None), table, jnp.int32(0)

    def update(table, state, lookups, gradients, step, interpret=False):
        fused_update = functools.partial(backend("triton").fused_update, interpret=interpret)
        return fused_update(table, state, lookups, gradients, rule, step)

    assert ("debug_barrier" in str(jax.make_jaxpr(update)(*arguments))) == waits
    interpreted = functools.partial(update, interpret=True)
    assert "debug_barrier" not in str(jax.make_jaxpr(interpreted)(*arguments))
