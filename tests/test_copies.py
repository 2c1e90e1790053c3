"""The expression that must find no copy in compiled steps finds one where there is one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.copies import find_copies
from tests.users_xla import AS_USERS_DO

pytestmark = [pytest.mark.every_case, pytest.mark.jax_version]

ROWS, DIM, DEVICES = 800, 4, 8

both_compilers = pytest.mark.parametrize("options", [AS_USERS_DO, {}], ids=["users", "tests"])


def write_row(table, place):
    return table.at[place].set(1)


@both_compilers
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(ROWS, DIM), (ROWS,)], ids=["rows", "state"])
def test_a_table_that_is_not_donated_is_copied(shape, dtype, options):
    step = jax.jit(write_row).lower(jnp.zeros(shape, dtype), 3).compile(options)
    assert find_copies(step, shape)
    assert find_copies(step, (ROWS + 1, *shape[1:])) == []


@both_compilers
def test_a_donated_table_is_not_copied(options):
    step = jax.jit(write_row, donate_argnums=0)
    compiled = step.lower(jnp.zeros((ROWS, DIM)), 3).compile(options)
    assert find_copies(compiled, (ROWS, DIM)) == []


@both_compilers
def test_each_device_copies_its_part(options):
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    over = PartitionSpec("data")
    table = jax.device_put(jnp.zeros((ROWS, DIM)), NamedSharding(mesh, over))
    step = jax.shard_map(write_row, mesh=mesh, in_specs=(over, PartitionSpec()), out_specs=over)
    for donated in (False, True):
        program = jax.jit(step, donate_argnums=(0,) if donated else ())
        compiled = program.lower(table, 3).compile(options)
        assert (not find_copies(compiled, (ROWS // DEVICES, DIM))) == donated


def test_a_table_put_together_or_written_into_is_found():
    half, whole = jnp.zeros((ROWS // 2, DIM)), jnp.zeros((ROWS, DIM))
    operations = ("dynamic-update-slice", "concatenate")
    joined = jax.jit(lambda x, y: jnp.concatenate([x, y])).lower(half, half).compile(AS_USERS_DO)
    written = jax.jit(lambda x, y, at: jax.lax.dynamic_update_slice(x, y, (at, 0)))
    written = written.lower(whole, half, 3).compile(AS_USERS_DO)
    assert "concatenate" in " ".join(find_copies(joined, (ROWS, DIM), operations))
    assert "dynamic-update-slice" in " ".join(find_copies(written, (ROWS, DIM), operations))
