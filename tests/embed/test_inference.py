"""Tables in formats for inference: golden lookups of FBGEMM and TorchRec, reads and refusals."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxrec
from jaxrec.embed import Tables
from jaxrec.embed.checkpoint_view import LogicalTable
from jaxrec.embed.formats import FORMATS
from jaxrec.embed.layout import inference_layout
from tests import golden
from tests.embed import row_oracle

NAMES = {"fp32": "float32", "fp16": "float16", "fp8": "float8"}


def split_name(name: str) -> tuple[str, str, str]:
    """Format of the rows, type of the result and pooling of a case such as tbe_int8_fp16out_sum."""
    _, rows, result, pooling = name.split("_", 3)
    result = result.removesuffix("out")
    return NAMES.get(rows, rows), NAMES[result], pooling


def stored_rows(arrays, table: int) -> np.ndarray:
    if f"table_{table}" in arrays:
        return arrays[f"table_{table}"]
    packed = arrays[f"packed_{table}"]
    if f"scale_bias_{table}" not in arrays:
        return packed
    return np.concatenate([arrays[f"scale_bias_{table}"].view(np.uint8), packed], axis=1)


CASES = {name: case for name, case in golden.cases("quant") if name.startswith("tbe")}


@pytest.mark.parametrize("name", CASES)
def test_lookups_of_fbgemm(name):
    """FBGEMM's own bytes give FBGEMM's results; those of single rows to the last bit."""
    arrays, case = golden.load("quant", name), CASES[name]
    dtype, result, pooling = split_name(name)
    meta = case["meta"]
    per_id, weighted = pooling == "none", "id_weights" in arrays
    keys = [f"f{t}" for t in range(2)]
    more = {} if per_id else {"pooling": "mean" if pooling == "mean" else "sum"}
    kind = jaxrec.EmbeddingConfig if per_id else jaxrec.EmbeddingBagConfig
    configs = [kind(key, meta["rows"][t], meta["dims"][t], **more) for t, key in enumerate(keys)]
    store = Tables({}, {}, inference_layout(configs, dict.fromkeys(keys, FORMATS[dtype]))).zeros()
    rows = {group: np.array(jax.tree.leaves(array)[0]) for group, array in store.rows.items()}
    for table, key in enumerate(keys):
        group, index = store.layout.find(key)
        start, stored = group.row_offsets[index], stored_rows(arrays, table)
        rows[group.name][start : start + len(stored)] = stored
    stored = jax.tree.map(jnp.asarray, jax.tree.leaves(rows))
    rows = jax.tree.unflatten(jax.tree.structure(store.rows), stored)
    store = dataclasses.replace(store, rows=rows)
    batch = jaxrec.KeyedJaggedArray.from_lengths(
        keys=keys,
        values=arrays["ids"],
        lengths=np.diff(arrays["offsets"]),
        weights=arrays.get("id_weights"),
    )
    look_up = jax.jit(lambda *args: store.lookup(*args, is_weighted=weighted, dtype=result)[0])
    found = look_up(batch)
    if per_id:
        counts = [int(batch[key].lengths.sum()) for key in keys]
        values = np.concatenate([found[k][:n] for k, n in zip(keys, counts, strict=True)])
        np.testing.assert_array_equal(values, arrays["out"])
    else:
        np.testing.assert_allclose(found.values, arrays["out"], **case["tolerance"])


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_quantized_collection_of_torchrec(dtype):
    arrays = golden.load("quant", f"quant_ebc_{dtype}")
    tables = [
        jaxrec.EmbeddingBagConfig(f"t{t}", *arrays[f"table_{t}"].shape, (key,), pooling=pooling)
        for t, (key, pooling) in enumerate(
            zip(map(str, arrays["out_keys"]), ("sum", "mean"), strict=True)
        )
    ]
    model = jaxrec.EmbeddingBagCollection(tables, rngs=nnx.Rngs(0))
    for table in tables:
        model.load_table(table.name, arrays[f"table_{table.name[1:]}"])
    small = jaxrec.serve.quantize(model, dtype)
    batch = jaxrec.KeyedJaggedArray.from_lengths(
        keys=list(map(str, arrays["out_keys"])), values=arrays["values"], lengths=arrays["lengths"]
    )
    np.testing.assert_allclose(small(batch).values, arrays["out_values"], rtol=1e-5, atol=1e-5)


def small_store() -> Tables:
    configs = [
        jaxrec.EmbeddingBagConfig("a", 9, 8),
        jaxrec.EmbeddingBagConfig("b", 5, 8),
        jaxrec.EmbeddingBagConfig("c", 7, 4),
    ]
    formats = {"a": FORMATS["int8"], "b": FORMATS["int8"], "c": FORMATS["int4"]}
    return Tables({}, {}, inference_layout(configs, formats)).zeros()


def random_rows(count: int, dim: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((count, dim)).astype(np.float32)


def test_tables_are_written_packed_and_read_unpacked():
    store, values = small_store(), random_rows(5, 8)
    store = store.write("b", values)
    packed = row_oracle.pack(values, "int8")
    rows, state, first = store.arrays("b")
    np.testing.assert_array_equal(rows.stored[first : first + 5], packed)
    assert state == {}
    np.testing.assert_array_equal(store.read("b"), row_oracle.unpack(packed, "int8", 8))
    assert not store.read("a").any()  # of the same group
    assert store.num_bytes("b") == 5 * 12
    assert store.num_bytes("c") == 7 * 6
    assert store.formats()["c"].name == "int4"


def test_some_rows_are_written_and_read():
    config = jaxrec.EmbeddingBagConfig("a", 9, 8)
    model = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
    small = jaxrec.serve.quantize(model)
    before, values = np.array(small.table("a")), random_rows(2, 8)
    small.load_rows("a", [7, 2], values)
    expected = before
    expected[[7, 2]] = row_oracle.unpack(row_oracle.pack(values, "int8"), "int8", 8)
    np.testing.assert_array_equal(small.table("a"), expected)
    np.testing.assert_array_equal(small.rows("a", [2, 2, 8]), expected[[2, 2, 8]])
    assert small.row_state("a", [1]) == {}
    assert small.table_state("a") == {}


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e6])
def test_rows_that_a_format_cannot_hold_are_refused(value):
    config = jaxrec.EmbeddingBagConfig("a", 9, 8)
    model = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
    small = jaxrec.serve.quantize(model, dtype="float8")
    before, values = np.array(small.table("a")), random_rows(2, 8)
    values[1, 3] = value
    with pytest.raises(ValueError, match=r"table 'a', given row 1, column 3 is .*float8"):
        small.load_rows("a", [7, 2], values)
    np.testing.assert_array_equal(small.table("a"), before)


def test_a_checkpoint_has_the_rows_in_float32():
    store = small_store().write("c", random_rows(7, 4))
    view, shapes = store.checkpoint_view("c"), store.checkpoint_shapes("c")
    assert (view.rows.shape, view.rows.dtype) == (shapes.rows.shape, shapes.rows.dtype)
    np.testing.assert_array_equal(view.rows[:7], store.read("c"))
    values = random_rows(8, 4)[::-1]
    store = store.from_checkpoint("c", type(view)(jnp.asarray(values), {}), 3)
    found = row_oracle.unpack(row_oracle.pack(values, "int4"), "int4", 4)
    np.testing.assert_array_equal(store.read("c")[:3], found[:3])
    np.testing.assert_array_equal(store.read("c")[3:], view.rows[3:7])


def test_a_checkpoint_with_rows_that_a_format_cannot_hold_is_refused():
    store, values = small_store(), random_rows(8, 4)
    values[2, 1] = np.nan
    with pytest.raises(ValueError, match="table 'c', saved row 2, column 1 is nan; int4 rows"):
        store.from_checkpoint("c", LogicalTable(jnp.asarray(values), {}), 7)


def test_wrong_writes():
    store = small_store()
    with pytest.raises(ValueError, match=r"table 'a' has shape \(9, 8\), got \(3, 8\)"):
        store.write("a", random_rows(3, 8))
    bad = random_rows(5, 8)
    bad[3, 1] = np.nan
    with pytest.raises(ValueError, match="table 'b', row 3, column 1 is nan; int8 rows"):
        store.write("b", bad)
    with pytest.raises(KeyError, match="no table is named 'x'"):
        store.read("x")


def test_training_is_refused():
    config = jaxrec.EmbeddingBagConfig("user", 9, 8)
    model = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
    small = jaxrec.serve.quantize(model, "int4")
    batch = jaxrec.KeyedJaggedArray.from_lists({"user": [[3, 5], []]})

    def loss(model):
        return model(batch).values.sum()

    message = r"tables 'user' \(int4\) are quantized for inference and cannot be trained"
    with pytest.raises(TypeError, match=message):
        jaxrec.value_and_grad(loss)(small)
    _, gradients = jaxrec.value_and_grad(loss)(model)
    with pytest.raises(TypeError, match=message):
        jaxrec.Optimizer(small, optax.sgd(0.1)).update(small, gradients)
    with pytest.raises(TypeError, match=message):
        jaxrec.value_and_grad(lambda model: model.table("user").sum())(small)


def test_a_batch_over_a_mesh_is_refused():
    batch = jaxrec.KeyedJaggedArray.from_lists({"a": [[1]], "b": [[1]], "c": [[1]]})
    stacked = jax.tree.map(lambda x: x[None], batch)
    with pytest.raises(ValueError, match="the tables are on one device"):
        small_store().lookup(stacked)
