"""Quantized models over a mesh are saved, compared and given new tables as on one device."""

from __future__ import annotations

import functools
import pathlib

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxrec
from jaxrec.mesh import (
    column_wise,
    data_parallel,
    row_wise,
    shard_batch,
    table_wise,
)
from jaxrec.plan import ShardingPlan
from jaxrec.serve import (
    by_norm,
    quality,
    quantize,
    restore_quantized,
    save_quantized,
    snapshot,
    swap_tables,
)
from jaxrec.train import checkpoint

DIM, BATCH = 8, 16
WHOLE = {
    "rows": row_wise(),
    "table": table_wise(3),
    "replicated": data_parallel(),
}
CUT = WHOLE | {"columns": column_wise((0, 1))}
RNG = np.random.default_rng(0)
BATCH_IDS = {name: [list(RNG.integers(0, 40, 1 + i % 4)) for i in range(BATCH)] for name in CUT}
LABELS = (RNG.random(BATCH) < 0.5).astype(np.float32)


class Ranker(nnx.Module):
    """A table for each placement, and a dense layer."""

    def __init__(self, seed: int, names=tuple(WHOLE)):
        rngs = nnx.Rngs(seed)
        configs = [
            jaxrec.EmbeddingBagConfig(name, 40, DIM, initializer=nnx.initializers.normal(1.0))
            for name in names
        ]
        self.embeddings = jaxrec.EmbeddingBagCollection(configs, rngs=rngs)
        self.over = nnx.Linear(DIM * len(names), 1, rngs=rngs)

    def __call__(self, features):
        return self.over(self.embeddings(features).values)[:, 0]


def features(names=tuple(WHOLE)) -> jaxrec.KeyedJaggedArray:
    return jaxrec.KeyedJaggedArray.from_lists({name: BATCH_IDS[name] for name in names})


@functools.cache
def mesh():
    return jax.make_mesh((2, 4), ("host", "data"))


def sharded(model: nnx.Module, placements=WHOLE):
    return jaxrec.shard(model, ShardingPlan.from_dict(placements), mesh())


@functools.partial(nnx.jit, graph=False)
def predict(model, features):
    return model(features)


def scores(model: nnx.Module, names=tuple(WHOLE)) -> np.ndarray:
    return np.asarray(predict(snapshot(model), shard_batch(features(names), mesh())))


def stored_rows(model: nnx.Module, name: str) -> np.ndarray:
    """The bytes of a table on one device."""
    rows, _, first = model.embeddings.tables.get_value().arrays(name)
    return np.asarray(rows.stored[first : first + 40])


@pytest.mark.slow
def test_a_saved_model_has_the_same_bytes(tmp_path):
    small = quantize(Ranker(0), "int8")
    spread = sharded(quantize(Ranker(0), "int8"))
    before = scores(spread)
    save_quantized(spread, tmp_path, step=7)
    again = restore_quantized(nnx.eval_shape(lambda: Ranker(1)), tmp_path)
    for name in WHOLE:
        np.testing.assert_array_equal(*[stored_rows(model, name) for model in (again, small)])
    np.testing.assert_array_equal(again.over.kernel.get_value(), small.over.kernel.get_value())
    assert len(again.over.kernel.get_value().sharding.device_set) == 1
    # The model stays where it was, and what was saved goes there again.
    np.testing.assert_array_equal(scores(spread), before)
    np.testing.assert_array_equal(scores(sharded(again)), before)


def saved_checkpoint(path: pathlib.Path) -> pathlib.Path:
    model = Ranker(1)
    checkpoint.save(path, model, jaxrec.Optimizer(model, optax.sgd(0.1)))
    return path


SOURCES = {
    "float model": lambda path: Ranker(1),
    "float model over the mesh": lambda path: sharded(lambda: Ranker(1)),
    "quantized model over the mesh": lambda path: sharded(quantize(Ranker(1), "int4")),
    "checkpoint": saved_checkpoint,
    "saved model": lambda path: (save_quantized(quantize(Ranker(1), "int4"), path), path)[1],
}


def test_a_model_on_a_mesh_moves_to_other_places():
    """Packed rows of int8 take more bytes than they have columns."""
    small = quantize(Ranker(0), "int8")
    spread = sharded(quantize(Ranker(0), "int8"))
    moved = sharded(spread, dict(zip(WHOLE, reversed(WHOLE.values()), strict=True)))
    for name in WHOLE:
        np.testing.assert_array_equal(moved.embeddings.table(name), small.embeddings.table(name))


@functools.cache
def expected_model():
    return sharded(quantize(Ranker(1), "int4"))


@pytest.mark.parametrize("name", SOURCES)
def test_new_tables_while_a_model_serves(name, tmp_path):
    small = sharded(quantize(Ranker(0), "int4"))
    old, before = snapshot(small), scores(small)
    assert swap_tables(small, SOURCES[name](tmp_path)) == 1
    expected = expected_model()
    for table in WHOLE:
        slices = [
            model.embeddings.tables.get_value().stored_slices(table) for model in (small, expected)
        ]
        assert slices[0].keys() == slices[1].keys() == {(0, DIM)}
        np.testing.assert_array_equal(*[each[0, DIM] for each in slices])
    np.testing.assert_array_equal(scores(small), scores(expected))
    batch = shard_batch(features(), mesh())
    np.testing.assert_array_equal(predict(old, batch), before)
    states = [nnx.state(model) for model in (small, old)]
    forms = [jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), each) for each in states]
    assert forms[0] == forms[1]  # so that no request is compiled anew


def test_a_model_on_one_device_takes_the_tables_of_a_mesh():
    small = quantize(Ranker(0), "int4")
    swap_tables(small, sharded(quantize(Ranker(1), "int4")))
    expected = quantize(Ranker(1), "int4")
    np.testing.assert_array_equal(small(features()), expected(features()))


@pytest.mark.slow
def test_tables_that_are_cut_by_columns(tmp_path):
    small = sharded(quantize(Ranker(0, CUT), "int8"), CUT)
    with pytest.raises(TypeError, match="table 'columns' is cut by columns over the mesh"):
        save_quantized(small, tmp_path)
    assert not any(tmp_path.iterdir())
    swap_tables(small, Ranker(1, CUT))
    expected = sharded(quantize(Ranker(1, CUT), "int8"), CUT)
    np.testing.assert_array_equal(scores(small, CUT), scores(expected, CUT))


def test_quality_is_that_of_one_device():
    batches = [(features(), LABELS)]
    expected = quality(Ranker(1), quantize(Ranker(1), "int4"), batches)
    report = quality(sharded(lambda: Ranker(1)), expected_model(), batches)
    assert report.tables == expected.tables
    for of_mesh, alone in ((report.before, expected.before), (report.after, expected.after)):
        assert of_mesh.samples == alone.samples
        assert of_mesh.normalized_entropy == pytest.approx(alone.normalized_entropy, rel=1e-5)
        assert of_mesh.auc == pytest.approx(alone.auc)


def test_parts_of_a_row_have_scales_of_their_own():
    small = sharded(quantize(Ranker(0, CUT), "int8"), CUT)
    tables = {table.name: table for table in quality(Ranker(0, CUT), small).tables}
    assert tables["rows"].bytes_after == 40 * (4 + DIM)
    assert tables["columns"].bytes_after == 2 * 40 * (4 + DIM // 2)
    assert 0 < tables["columns"].relative_rms_error < 0.01


@pytest.mark.parametrize(
    ("use", "kind", "message"),
    [
        (
            lambda small, path: swap_tables(small, quantize(Ranker(1), "int8")),
            ValueError,
            "table 'rows' is int8 in the source, but int4 in the model",
        ),
        (
            lambda small, path: swap_tables(
                small, quantize(Ranker(1), "int4", prune={"rows": by_norm(share=0.5)})
            ),
            TypeError,
            "tables 'rows' are pruned, and pruned tables lie on one device",
        ),
        (
            lambda small, path: save_quantized(sharded(lambda: Ranker(1)), path),
            TypeError,
            "are not quantized; give the model that jaxrec.serve.quantize returned",
        ),
        (
            lambda small, path: quality(Ranker(0), sharded(lambda: Ranker(1))),
            TypeError,
            "are not quantized; give the model that jaxrec.serve.quantize returned",
        ),
    ],
    ids=["other format", "pruned", "save floats", "compare floats"],
)
def test_wrong_models_are_named(use, kind, message, tmp_path):
    small = expected_model()
    before = snapshot(small)
    with pytest.raises(kind, match=message):
        use(small, tmp_path)
    assert snapshot(small) is before  # nothing was replaced
