"""Twenty training steps of whole models follow TorchRec's, on one device and sharded over eight."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import jaxrec
from jaxrec.mesh import column_wise, data_parallel, row_wise, shard_batch, table_wise
from jaxrec.nn import DLRM, DLRM_DCN, SimpleDeepFMNN
from jaxrec.train import compile_step
from tests import golden

pytestmark = [pytest.mark.every_case, pytest.mark.jax_version]

CASES = dict(golden.cases("train"))


def torch_adagrad(learning_rate, eps):
    """``p -= lr g / (sqrt(sum g^2) + eps)``; optax's own has ``eps`` inside of the root."""

    def update(gradients, sums, params=None):
        sums = jax.tree.map(lambda s, g: s + g * g, sums, gradients)
        updates = jax.tree.map(
            lambda s, g: -learning_rate * g / (jnp.sqrt(s) + eps), sums, gradients
        )
        return updates, sums

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


DLRM_OPTIMIZERS = {
    "dlrm_rowwise_adagrad_dense_sgd": (
        jaxrec.optim.rowwise_adagrad(0.05, eps=1e-8),
        optax.sgd(0.05),
    ),
    "dlrm_rowwise_adagrad_dense_adagrad": (
        jaxrec.optim.rowwise_adagrad(0.05, eps=1e-8),
        torch_adagrad(0.05, eps=1e-4),
    ),
    "dlrm_adagrad_dense_adam": (
        jaxrec.optim.adagrad(0.05, eps=1e-4),
        optax.adam(0.01, eps=1e-5),
    ),
}


class Attention(nnx.Module):
    """The model of ``ec_attention_rowwise_adagrad``."""

    def __init__(self, meta, *, rngs):
        self.max_len, dim = meta["max_len"], meta["dim"]
        self.embeddings = jaxrec.EmbeddingCollection(
            [
                jaxrec.EmbeddingConfig(f"t{i}", rows, dim, feature_names=(f"f{i}",))
                for i, rows in enumerate(meta["rows"])
            ],
            optimizer=jaxrec.optim.rowwise_adagrad(0.05, eps=1e-8),
            rngs=rngs,
        )
        self.att = nnx.Linear(dim, 1, rngs=rngs)
        self.head = nnx.Linear(2 * dim, 1, rngs=rngs)

    def __call__(self, features):
        pooled = [self._pool(sequence) for sequence in self.embeddings(features).values()]
        return self.head(jnp.concatenate(pooled, axis=1))[:, 0]

    def _pool(self, sequence):
        if sequence.values.ndim == 3:  # sharded, ragged for each device
            return jax.vmap(self._pool)(sequence).reshape(-1, sequence.values.shape[2])
        dense = sequence.to_padded_dense(self.max_len)
        valid = jnp.arange(self.max_len)[None, :] < sequence.lengths[:, None]
        scores = jnp.where(valid, self.att(dense)[:, :, 0], -1e9)
        weights = jax.nn.softmax(scores, axis=1) * valid
        return jnp.einsum("bl,bld->bd", weights, dense)


def load_linear(layer, arrays, name):
    layer.kernel.set_value(jnp.asarray(arrays[f"p0__{name}__weight"].T))
    layer.bias.set_value(jnp.asarray(arrays[f"p0__{name}__bias"]))


def assert_linear(layer, arrays, name, tolerance):
    np.testing.assert_allclose(layer.kernel[...].T, arrays[f"pN__{name}__weight"], **tolerance)
    np.testing.assert_allclose(layer.bias[...], arrays[f"pN__{name}__bias"], **tolerance)


def load_tables(embeddings, arrays):
    for table in embeddings.configs:
        embeddings.load_table(table.name, arrays[f"table0_{table.name}"])


def assert_tables(embeddings, arrays, tolerance):
    for table in embeddings.configs:
        rows, state = embeddings.table(table.name), embeddings.table_state(table.name)
        np.testing.assert_allclose(rows, arrays[f"tableN_{table.name}"], **tolerance)
        np.testing.assert_allclose(state["accumulator"], arrays[f"state_{table.name}"], **tolerance)


def dlrm_layers(model):
    names = [f"dense_arch__model___mlp__{i}___linear" for i in range(2)]
    names += [f"over_arch__model__0___mlp__{i}___linear" for i in range(2)]
    return zip(
        [*model.bottom.layers, *model.top.layers], [*names, "over_arch__model__1"], strict=True
    )


def on_one_device(model):
    """Leaves the model and its batches where they are."""
    return lambda batch, capacities: batch


def on_eight(model):
    """Shards the model, each table by another type, and says how its batches are."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    types = [row_wise(), column_wise(), table_wise(3), data_parallel()]
    if isinstance(model.embeddings, jaxrec.EmbeddingBagCollection):
        types.append(row_wise(exchange="pooled"))
    names = [table.name for table in model.embeddings.configs]
    plan = jaxrec.plan.ShardingPlan.from_dict(dict(zip(names, itertools.cycle(types))))
    jaxrec.shard(model, plan, mesh)
    return lambda batch, capacities: shard_batch(batch, mesh, capacities=capacities)


devices = pytest.mark.parametrize(
    "spread", [on_one_device, pytest.param(on_eight, marks=pytest.mark.slow)]
)


def follow(model, spread, tx, arrays, case, keys, loss_of=optax.sigmoid_binary_cross_entropy):
    """Trains and checks the loss and the model's output of each step."""
    place = spread(model)
    optimizer = jaxrec.Optimizer(model, tx)

    def step(model, optimizer, inputs, labels):
        def loss_fn(model):
            logits = model(*inputs)
            return loss_of(logits, labels).mean(), logits

        (loss, logits), gradients = jaxrec.value_and_grad(loss_fn, has_aux=True)(model)
        optimizer.update(model, gradients)
        return loss, logits

    step = compile_step(step, model, optimizer)
    most = max(
        arrays[f"lengths_{s}"].reshape(len(keys), -1).sum(1).max()
        for s in range(1, case["meta"]["steps"] + 1)
    )
    losses, logits = [], []
    for s in range(1, case["meta"]["steps"] + 1):
        features = jaxrec.KeyedJaggedArray.from_lengths(
            keys, arrays[f"values_{s}"], arrays[f"lengths_{s}"], capacities=[int(most)] * len(keys)
        )
        dense = (arrays[f"dense_{s}"],) if f"dense_{s}" in arrays else ()
        batch = (*dense, features), arrays[f"labels_{s}"].reshape(-1)
        loss, out = step(*place(batch, dict.fromkeys(keys, int(most))))
        losses.append(loss)
        logits.append(out)
    np.testing.assert_allclose(losses, arrays["loss"], **case["tolerance"])
    expected = arrays["model_output"].reshape(len(logits), -1)
    np.testing.assert_allclose(logits, expected, **case["tolerance"])


def make_tables(meta, optimizer, rngs):
    return jaxrec.EmbeddingBagCollection(
        [
            jaxrec.EmbeddingBagConfig(
                table["name"],
                table["rows"],
                meta["dim"],
                feature_names=table["features"],
                pooling=table["pooling"].lower(),
            )
            for table in meta["tables"]
        ],
        optimizer=optimizer,
        rngs=rngs,
    )


@devices
@pytest.mark.parametrize("name", DLRM_OPTIMIZERS)
def test_dlrm(name, spread):
    case, arrays = CASES[name], golden.load("train", name)
    meta = case["meta"]
    tables, tx = DLRM_OPTIMIZERS[name]
    rngs = nnx.Rngs(0)
    embeddings = make_tables(meta, tables, rngs)
    load_tables(embeddings, arrays)
    model = DLRM(
        embeddings,
        num_dense=arrays["dense_1"].shape[1],
        bottom_layer_sizes=(16, meta["dim"]),
        top_layer_sizes=(16, 8, 1),
        rngs=rngs,
    )
    for layer, layer_name in dlrm_layers(model):
        load_linear(layer, arrays, layer_name)
    follow(model, spread, tx, arrays, case, meta["keys"])
    assert_tables(embeddings, arrays, case["tolerance"])
    for layer, layer_name in dlrm_layers(model):
        assert_linear(layer, arrays, layer_name, case["tolerance"])


@devices
def test_dlrm_dcn(spread):
    name = "dlrm_dcn_rowwise_adagrad"
    case, arrays = CASES[name], golden.load("train", name)
    meta, rngs = case["meta"], nnx.Rngs(0)
    embeddings = make_tables(meta, jaxrec.optim.rowwise_adagrad(0.05, eps=1e-8), rngs)
    load_tables(embeddings, arrays)
    model = DLRM_DCN(
        embeddings,
        num_dense=arrays["dense_1"].shape[1],
        bottom_layer_sizes=(16, meta["dim"]),
        top_layer_sizes=(16, 8, 1),
        dcn_num_layers=2,
        dcn_low_rank_dim=4,
        rngs=rngs,
    )
    crossnet = model.interaction.crossnet
    for layer, layer_name in dlrm_layers(model):
        load_linear(layer, arrays, layer_name)
    for i in range(2):
        prefix = "p0__inter_arch__crossnet__"
        crossnet.down[i].kernel.set_value(jnp.asarray(arrays[f"{prefix}V_kernels__{i}"].T))
        crossnet.up[i].kernel.set_value(jnp.asarray(arrays[f"{prefix}W_kernels__{i}"].T))
        crossnet.up[i].bias.set_value(jnp.asarray(arrays[f"{prefix}bias__{i}"].reshape(-1)))
    follow(model, spread, optax.sgd(0.05), arrays, case, meta["keys"])
    assert_tables(embeddings, arrays, case["tolerance"])
    for layer, layer_name in dlrm_layers(model):
        assert_linear(layer, arrays, layer_name, case["tolerance"])
    for i in range(2):
        prefix, tolerance = "pN__inter_arch__crossnet__", case["tolerance"]
        down, up = crossnet.down[i], crossnet.up[i]
        np.testing.assert_allclose(
            down.kernel[...].T, arrays[f"{prefix}V_kernels__{i}"], **tolerance
        )
        np.testing.assert_allclose(up.kernel[...].T, arrays[f"{prefix}W_kernels__{i}"], **tolerance)
        bias = arrays[f"{prefix}bias__{i}"].reshape(-1)
        np.testing.assert_allclose(up.bias[...], bias, **tolerance)


def binary_cross_entropy(probabilities, labels):
    return -(labels * jnp.log(probabilities) + (1 - labels) * jnp.log1p(-probabilities))


@devices
def test_simple_deepfm(spread):
    name = "simple_deepfm_sgd"
    case, arrays = CASES[name], golden.load("train", name)
    meta, rngs = case["meta"], nnx.Rngs(0)
    embeddings = make_tables(meta, jaxrec.optim.sgd(0.05), rngs)
    load_tables(embeddings, arrays)
    model = SimpleDeepFMNN(
        embeddings,
        num_dense=arrays["dense_1"].shape[1],
        hidden_layer_size=12,
        deep_fm_dimension=6,
        compat="torchrec",
        rngs=rngs,
    )
    layers = {
        "dense_arch__model__0": model.dense_arch.layers[0],
        "dense_arch__model__2": model.dense_arch.layers[1],
        "inter_arch__deep_fm__dense_module__0": model.interaction.deep.layers[0],
        "over_arch__model__0": model.head,
    }
    for layer_name, layer in layers.items():
        load_linear(layer, arrays, layer_name)
    follow(model, spread, optax.sgd(0.05), arrays, case, meta["keys"], binary_cross_entropy)
    for table in embeddings.configs:
        expected = arrays[f"tableN_{table.name}"]
        np.testing.assert_allclose(embeddings.table(table.name), expected, **case["tolerance"])
    for layer_name, layer in layers.items():
        assert_linear(layer, arrays, layer_name, case["tolerance"])


@devices
def test_attention_over_sequences(spread):
    name = "ec_attention_rowwise_adagrad"
    case, arrays = CASES[name], golden.load("train", name)
    model = Attention(case["meta"], rngs=nnx.Rngs(0))
    load_tables(model.embeddings, arrays)
    load_linear(model.att, arrays, "att")
    load_linear(model.head, arrays, "head")
    follow(model, spread, optax.sgd(0.05), arrays, case, ["f0", "f1"])
    assert_tables(model.embeddings, arrays, case["tolerance"])
    assert_linear(model.att, arrays, "att", case["tolerance"])
    assert_linear(model.head, arrays, "head", case["tolerance"])
