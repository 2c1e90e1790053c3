"""Checkpoints of models that changed: what fits is loaded, all else is listed and stays."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxrec
from jaxrec.embed.variables import dense_variables, variables
from jaxrec.train import CheckpointManager, SaveCheckpoints, Trainer, checkpoint
from jaxrec.train.checkpoint import CheckpointError
from tests.train.ranker import GROUP

NAMES = ("a", "b", "c")


class Model(nnx.Module):
    """Three tables with Adam, unless they have changed, and a dense layer."""

    def __init__(self, changed=None, names=NAMES, layers=("over",), seed=0):
        rngs, changed = nnx.Rngs(seed), changed or {}
        rows = {"num_embeddings": 9, "embedding_dim": 4}
        tables = [jaxrec.EmbeddingBagConfig(name, **rows | changed.get(name, {})) for name in names]
        adam = jaxrec.optim.adam(0.1)
        self.bags = jaxrec.EmbeddingBagCollection(tables, optimizer=adam, rngs=rngs)
        for name in layers:
            setattr(self, name, nnx.Linear(4, 1, rngs=rngs))

    def __call__(self, features):
        pooled = self.bags(features)
        return self.over(pooled["a"] + pooled["c"])[:, 0]


def make(devices=1, seed=0, placement=None, **changes):
    """A model and its optimizer whose state is none that a model begins with."""
    model = Model(seed=seed, **changes)
    rng = np.random.default_rng(seed)
    for table in model.bags.configs:
        state = model.bags.table_state(table.name)
        values = {key: rng.random(np.shape(array)) for key, array in state.items()}
        if values:
            model.bags.load_table_state(table.name, values)
    if devices > 1:
        names = [table.name for table in model.bags.configs]
        plan = jaxrec.plan.ShardingPlan.from_dict(dict.fromkeys(names, placement))
        mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
        model = jaxrec.shard(model, plan, mesh)
    optimizer = jaxrec.Optimizer(model, optax.adam(0.1))
    for name, each in variables(optimizer).items():
        if "/mu/" in name:
            each.set_value(each.get_value() + seed + 1)
    return model, optimizer


def contents(model, optimizer):
    """All arrays by what they belong to: ("rows", table), ("state", table), ("variable", path)."""
    arrays = {}
    for table in model.bags.configs:
        arrays["rows", table.name] = [np.asarray(model.bags.table(table.name))]
        state = model.bags.table_state(table.name)
        arrays["state", table.name] = [np.asarray(state[key]) for key in sorted(state)]
    for kind, named in (
        ("variable", dense_variables(model)),
        ("optimizer variable", variables(optimizer)),
    ):
        arrays |= {(kind, name): [np.asarray(x.get_value())] for name, x in named.items()}
    return arrays


FROZEN, ADAGRAD = {"trainable": False}, {"optimizer": jaxrec.optim.rowwise_adagrad(0.1)}
# What was saved, what it is restored to, the differences, and what of these has arrays that stay.
CHANGES = {
    "frozen": ({}, {"changed": {"b": FROZEN}}, {("optimizer of table", "b")}, {}),
    "trained again": (
        {"changed": {"b": FROZEN}},
        {},
        {("optimizer of table", "b")},
        {("state", "b")},
    ),
    "another optimizer": (
        {},
        {"changed": {"b": ADAGRAD}},
        {("optimizer of table", "b")},
        {("state", "b")},
    ),
    "added": ({"names": ("a", "c")}, {}, {("table", "b")}, {("rows", "b"), ("state", "b")}),
    "removed": ({}, {"names": ("c", "a")}, {("table", "b")}, {}),
    "wider": (
        {},
        {"changed": {"b": {"embedding_dim": 6}}},
        {("table", "b")},
        {("rows", "b"), ("state", "b")},
    ),
    "longer": (
        {},
        {"changed": {"b": {"num_embeddings": 11}}},
        {("table", "b")},
        {("rows", "b"), ("state", "b")},
    ),
}
PLACEMENTS = {1: None, 2: jaxrec.mesh.column_wise((0, 1)), 4: jaxrec.mesh.row_wise()}


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("saved", "restored", "differences", "stays"), CHANGES.values(), ids=CHANGES
)
def test_all_but_one_table_comes_back(tmp_path, saved, restored, differences, stays):
    """From four devices to one, and to two with another placement."""
    whole = make(4, 0, PLACEMENTS[4], **saved)
    checkpoint.save(tmp_path, *whole)
    expected = contents(*whole)
    for devices in (1, 2):
        pair = make(devices, 1, PLACEMENTS[devices], **restored)
        before = contents(*pair)
        with pytest.raises(CheckpointError, match="partial=True") as raised:
            checkpoint.restore(pair[0], tmp_path, pair[1])
        assert "'b'" in str(raised.value)
        metadata = checkpoint.restore(pair[0], tmp_path, pair[1], partial=True)
        assert {(each.kind, each.name) for each in metadata.differences} == differences
        assert all("'b'" in str(each) for each in metadata.differences)
        for key, arrays in contents(*pair).items():
            wanted = before if key in stays or not arrays else expected
            for array, other in zip(arrays, wanted[key], strict=True):
                np.testing.assert_array_equal(array, other, err_msg=str(key))


def test_layers_that_were_added_and_removed(tmp_path):
    checkpoint.save(tmp_path, *(saved := make(layers=("over", "old"))))
    pair = make(seed=1, layers=("over", "new"))
    before, expected = contents(*pair), contents(*saved)
    found = checkpoint.restore(pair[0], tmp_path, pair[1], partial=True).differences
    paths = [f"{layer}/{name}" for layer in ("new", "old") for name in ("bias", "kernel")]
    assert [each.name for each in found if each.kind == "variable"] == paths
    moments = {f"opt_state/0/{moment}/{path}" for moment in ("mu", "nu") for path in paths}
    assert {each.name for each in found if each.kind == "optimizer variable"} == moments
    for key, arrays in contents(*pair).items():
        wanted = before if "new" in key[1] else expected
        np.testing.assert_array_equal(arrays, wanted[key], err_msg=str(key))


def test_nothing_of_the_model_is_there(tmp_path):
    checkpoint.save(tmp_path, *make(names=("x",), layers=()))
    pair = make(names=("a",))
    before = contents(*pair)
    with pytest.raises(CheckpointError, match="no table and no parameter of the checkpoint fits"):
        checkpoint.restore(pair[0], tmp_path, pair[1], partial=True)
    for key, arrays in contents(*pair).items():
        np.testing.assert_array_equal(arrays, before[key])


def test_a_table_is_frozen_in_mid_run(tmp_path):
    """All others go on to the bit as if nothing had happened, metrics too."""

    def loss(model, batch):
        features, labels = batch
        logits = model(features)
        losses = optax.sigmoid_binary_cross_entropy(logits, labels)
        return losses.mean(), {"p": nnx.sigmoid(logits), "y": labels}

    def trainer(pair, **options):
        return Trainer(model=pair[0], optimizer=pair[1], loss=loss, **options)

    rng = np.random.default_rng(0)
    data = []
    for _ in range(8):
        ids = {name: rng.integers(0, 9, (8, 2)).tolist() for name in NAMES}
        features = jaxrec.KeyedJaggedArray.from_lists(ids)
        data.append((features, rng.integers(0, 2, 8).astype(np.float32)))
    never = trainer(make(), metrics=GROUP)
    never.train(data)
    with CheckpointManager(tmp_path) as manager:
        trainer(make(), metrics=GROUP, callbacks=[SaveCheckpoints(manager)]).train(data[:4])
    frozen = trainer(make(seed=1, changed={"b": FROZEN}), metrics=GROUP)
    metadata = frozen.restore(tmp_path, partial=True)
    assert [(each.kind, each.name) for each in metadata.differences] == [
        ("optimizer of table", "b")
    ]
    frozen.train(data[metadata.batches :])
    found, expected = (contents(each.model, each.optimizer) for each in (frozen, never))
    for key in {*found} - {("rows", "b"), ("state", "b")}:
        np.testing.assert_array_equal(found[key], expected[key], err_msg=str(key))
    assert frozen.compute_metrics() == never.compute_metrics()
    without = trainer(make(seed=1))
    with pytest.raises(CheckpointError, match=r"Trainer.restore\(..., partial=True\)"):
        without.restore(tmp_path)
    (difference,) = without.restore(tmp_path, partial=True).differences
    assert str(difference).startswith("the state 'metrics' was saved with arrays of")
