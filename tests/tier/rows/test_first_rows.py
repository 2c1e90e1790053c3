"""First values of rows depend on the key, the table and the id alone, as in whole tables."""

from __future__ import annotations

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.random import threefry_2x32

import jaxrec
from jaxrec.tier.rows import first_rows
from jaxrec.tier.rows.first_rows import NewRows, reset
from tests.copies import find_copies
from tests.users_xla import AS_USERS_DO

ROWS, DIM = 64, 8
IDS = np.array([5, -(2**63), 2**63 - 1, 2**32 + 5, 0, 6])
KEY = np.asarray(jax.random.key_data(nnx.Rngs(0).params()))  # with which `make_store` draws


def stddev_two(key, shape, dtype):
    return 2 * jax.random.normal(key, shape, dtype)


def make_configs(**options):
    return [
        jaxrec.EmbeddingBagConfig("a", ROWS, DIM, **options),
        jaxrec.EmbeddingBagConfig("b", ROWS, DIM, **options),
        jaxrec.EmbeddingBagConfig("wide", ROWS, 16, initializer="uniform"),
    ]


def make_store(configs, mesh=None, placement=None):
    def made():
        return jaxrec.EmbeddingBagCollection(
            configs, optimizer=jaxrec.optim.adam(0.1), rngs=nnx.Rngs(0)
        )

    if mesh is None:
        return made().tables.get_value()
    plan = jaxrec.plan.ShardingPlan.from_dict({each.name: placement for each in configs})
    return jaxrec.shard(made, plan, mesh).tables.get_value()


PLACEMENTS = {
    "one_device": None,
    "row_wise": jaxrec.mesh.row_wise(),
    "column_wise": jaxrec.mesh.column_wise(devices=(1, 6)),
    "table_wise": jaxrec.mesh.table_wise(device=3),
    "data_parallel": jaxrec.mesh.data_parallel(),
    "grid": jaxrec.mesh.grid(),
}


def values_by_id(placement, rows, key=KEY, **options):
    """First values of `IDS` in each table, in the rows given, and the whole tables as made."""
    configs = make_configs(**options)
    mesh = None if placement is None else jax.make_mesh((2, 4), ("host", "device"))
    store = make_store(configs, mesh, placement)
    made = {config.name: np.asarray(store.read(config.name)) for config in configs}
    store = reset(store, [NewRows(config, rows, IDS) for config in configs], key)
    return {config.name: np.asarray(store.read(config.name))[rows] for config in configs}, made


@pytest.fixture(scope="module")
def expected():
    return values_by_id(None, np.arange(6), initializer="normal")[0]


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_an_id_begins_alike_wherever_its_row_is(placement, expected):
    rows = np.random.default_rng(0).permutation(ROWS)[: IDS.size]
    values, made = values_by_id(placement, rows, initializer="normal")
    is_row = (IDS >= 0) & (IDS < ROWS)
    for name, array in expected.items():
        np.testing.assert_array_equal(values[name], array)
        np.testing.assert_array_equal(made[name][IDS[is_row]], array[is_row])


def test_ids_tables_and_keys_begin_differently(expected):
    other, _ = values_by_id(None, np.arange(6), KEY + np.uint32(1), initializer="normal")
    rows = [*expected["a"], *expected["b"], *other["a"]]
    assert len(np.unique(np.array(rows)[:, 0])) == len(rows)


def test_values_are_threefry_of_the_id(expected):
    """Written out, so that ids begin alike in later versions."""
    key = jax.random.fold_in(jax.random.wrap_key_data(jnp.array(KEY)), zlib.crc32(b"a"))
    for row, i in enumerate(IDS.tolist()):
        words = jnp.array([(i >> 32) % 2**32, i % 2**32], jnp.uint32)
        of_id = jax.random.wrap_key_data(threefry_2x32(jax.random.key_data(key), words))
        drawn = jax.random.normal(of_id, (1, DIM))
        np.testing.assert_allclose(expected["a"][row], drawn[0] * DIM**-0.5, rtol=1e-6)


@pytest.mark.parametrize(
    ("initializer", "mean", "deviation"),
    [
        ("normal", 0, DIM**-0.5),
        ("uniform", 0, 2048**-0.5 / 3**0.5),
        ("xavier_normal", 0, (2 / (2048 + DIM)) ** 0.5),
        ("xavier_uniform", 0, (2 / (2048 + DIM)) ** 0.5),
        ("zeros", 0, 0),
        ("ones", 1, 0),
        (stddev_two, 0, 2),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)[:6]),
)
def test_initializers(initializer, mean, deviation):
    config = jaxrec.EmbeddingBagConfig("a", 2048, DIM, initializer=initializer)
    rows = np.arange(1, 2001, dtype=np.int32)
    store = reset(make_store([config]), [NewRows(config, rows, rows.astype(np.int64))], KEY)
    values = np.asarray(store.read("a"))[rows]
    assert abs(values.mean() - mean) <= 0.02 * deviation
    assert values.std() == pytest.approx(deviation, rel=0.02)


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_rows_and_state_are_reset_and_no_others(placement):
    configs = make_configs()
    mesh = None if placement is None else jax.make_mesh((2, 4), ("host", "device"))
    store = make_store(configs, mesh, placement)
    before = {}
    for config in configs:
        before[config.name] = np.asarray(store.read(config.name))
        state = {k: np.full_like(x, 7) for k, x in store.read_state(config.name).items()}
        store = store.write_state(config.name, state)
    rows = np.array([0, 63, 17], np.int32)
    new = [
        NewRows(configs[0], rows, IDS[:3]),
        NewRows(configs[1], rows[:0], IDS[:0]),
        NewRows(configs[2], rows[:1], IDS[:1]),
    ]
    store = reset(store, new, KEY)
    for config, changed in zip(configs, (rows, rows[:0], rows[:1]), strict=True):
        is_changed = np.isin(np.arange(ROWS), changed)
        values = np.asarray(store.read(config.name))
        assert (values != before[config.name]).any(axis=1).tolist() == is_changed.tolist()
        for array in store.read_state(config.name).values():
            assert (np.asarray(array)[~is_changed] == 7).all()
            assert (np.asarray(array)[is_changed] == 0).all()


def test_no_rows_change_nothing():
    configs = make_configs()
    store = make_store(configs)
    assert reset(store, [NewRows(configs[0], np.zeros(0, np.int32), IDS[:0])], KEY) is store


@pytest.mark.parametrize(
    "dtype",
    [
        "float32",
        "float16",
        pytest.param(
            "bfloat16",
            marks=pytest.mark.skipif(
                jax.__version_info__ < (0, 11),
                reason="a copy of the bits, or XLA converts bfloat16 to float32",
            ),
        ),
    ],
)
def test_no_copy_of_a_table(dtype):
    rows = 20_011
    config = jaxrec.EmbeddingBagConfig("big", rows, DIM, dtype=dtype, initializer="normal")
    store = make_store([config])
    (group,) = store.groups
    per_slot = jnp.zeros((64, 6), jnp.int32).at[:, -1].set(DIM)
    scales_and_keys = np.zeros((1, 3), np.uint32)
    compiled = first_rows._reset.lower(
        store, per_slot, scales_and_keys, group, jax.random.normal, DIM
    ).compile(AS_USERS_DO)
    assert find_copies(compiled, (rows, DIM)) == []
    assert compiled.memory_analysis().temp_size_in_bytes < rows * DIM * 2 / 10
