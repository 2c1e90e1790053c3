"""Models of TorchRec, read from its files and written back."""

from __future__ import annotations

import itertools
import os
import pathlib
import pickle
import shutil
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxrec
from jaxrec.nn import DLRM, DLRM_DCN, SimpleDeepFMNN
from jaxrec.train import CheckpointError, load_torchrec, save_torchrec, torchrec_layers
from tests import golden

RECORDED = pathlib.Path(__file__).parents[1] / "golden/torchrec"
TRAIN = dict(golden.cases("train"))


def whole() -> dict[str, np.ndarray]:
    """The arrays of the recorded checkpoint, as PyTorch reads them."""
    with np.load(RECORDED / "whole.npz") as arrays:
        return dict(arrays)


class Ranker(nnx.Module):
    def __init__(self, optimizer=None, seed=0):
        rngs = nnx.Rngs(seed)
        self.embeddings = jaxrec.EmbeddingBagCollection(
            [
                jaxrec.EmbeddingBagConfig("user", 7, 8),
                jaxrec.EmbeddingBagConfig("item", 5, 8),
            ],
            optimizer=optimizer or jaxrec.optim.rowwise_adagrad(0.05),
            rngs=rngs,
        )
        self.over = nnx.Linear(16, 1, rngs=rngs)


ADAM = optax.adam(1e-2)


def assert_recorded(model, optimizer, item_tolerance=0.0):
    arrays = whole()
    for table in ("user", "item"):
        name = f"embeddings.embedding_bags.{table}.weight"
        rows = model.embeddings.table(table)
        tolerance = item_tolerance if table == "item" else 0.0
        np.testing.assert_allclose(rows, arrays[f"model.{name}"], rtol=tolerance)
        state = model.embeddings.table_state(table)["accumulator"]
        np.testing.assert_array_equal(state, arrays[f"optim.state.{name}.{table}.momentum1"])
    np.testing.assert_array_equal(model.over.kernel[...].T, arrays["model.over.weight"])
    np.testing.assert_array_equal(model.over.bias[...], arrays["model.over.bias"])
    adam = optimizer.opt_state[0]
    for ours, theirs in (("mu", "exp_avg"), ("nu", "exp_avg_sq")):
        moments = getattr(adam, ours)["over"]
        found = moments["kernel"].get_value().T, moments["bias"].get_value()
        for array, key in zip(found, ("weight", "bias"), strict=True):
            np.testing.assert_array_equal(array, arrays[f"optim.state.over.{key}.{theirs}"])
    assert int(adam.count.get_value()) == int(optimizer.step.get_value()) == 3


@pytest.mark.parametrize(
    ("file", "devices"), [("dcp", 1), ("dcp", 4), ("model.pt", 1), ("whole.npz", 1)]
)
def test_recorded_checkpoints(file, devices):
    model = Ranker()
    if devices > 1:
        mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
        placements = {"user": jaxrec.mesh.row_wise(), "item": jaxrec.mesh.table_wise(3)}
        model = jaxrec.shard(model, jaxrec.plan.ShardingPlan.from_dict(placements), mesh)
    optimizer = jaxrec.Optimizer(model, ADAM)
    layers = torchrec_layers(model)
    assert layers == {"embeddings": "embeddings", "over": "over"}
    unused = load_torchrec(model, RECORDED / file, layers=layers, optimizer=optimizer)
    assert unused == (["epoch"] if file == "model.pt" else [])
    # bfloat16 has 8 bits.
    assert_recorded(model, optimizer, item_tolerance=2**-8 if file == "model.pt" else 0.0)


def test_parts_of_a_checkpoint():
    """Without layers, and without an optimizer, the rest is left alone and listed."""
    model, other = Ranker(seed=1), Ranker(seed=1)
    unused = load_torchrec(model, RECORDED / "dcp")
    assert len(unused) == 10
    np.testing.assert_array_equal(model.over.kernel[...], other.over.kernel[...])
    unused = load_torchrec(model, RECORDED / "dcp", layers={"over": "over"})
    assert len(unused) == 8
    assert all(name.startswith("optim.state.") for name in unused)
    optimizer = jaxrec.Optimizer(other, ADAM)
    unused = load_torchrec(other, RECORDED / "dcp", optimizer=optimizer)
    assert {name.split(".")[-1] for name in unused} == {
        "weight", "bias", "step", "exp_avg", "exp_avg_sq",
    }  # fmt: skip
    assert int(optimizer.step.get_value()) == 0


@pytest.mark.parametrize(("suffix", "devices"), [("npz", 4), ("safetensors", 1)])
def test_there_and_back(tmp_path, suffix, devices):
    if suffix == "safetensors":
        pytest.importorskip("safetensors")
    model = Ranker()
    if devices > 1:
        mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
        plan = dict.fromkeys(("user", "item"), jaxrec.mesh.row_wise())
        model = jaxrec.shard(model, jaxrec.plan.ShardingPlan.from_dict(plan), mesh)
    optimizer, layers = jaxrec.Optimizer(model, ADAM), torchrec_layers(model)
    load_torchrec(model, RECORDED / "dcp", layers=layers, optimizer=optimizer)
    path = tmp_path / f"model.{suffix}"
    names = save_torchrec(model, path, layers=layers, optimizer=optimizer)
    expected = {name.removeprefix("model.").removeprefix("optim.") for name in whole()}
    assert set(names) == expected
    if suffix == "npz":
        with np.load(path) as arrays:
            for name, array in whole().items():
                name = name.removeprefix("model.").removeprefix("optim.")
                np.testing.assert_array_equal(arrays[name], array, err_msg=name)
    other = Ranker(seed=5)
    again = jaxrec.Optimizer(other, ADAM)
    assert load_torchrec(other, path, layers=layers, optimizer=again) == []
    assert_recorded(other, again)


TABLE_OPTIMIZERS = {
    "sgd": (jaxrec.optim.sgd(0.1), set()),
    "adagrad": (jaxrec.optim.adagrad(0.1), {"momentum1"}),
    "adam": (
        jaxrec.optim.adam(0.1, rowwise_bias_correction=True),
        {"momentum1", "exp_avg_sq", "row_counter"},
    ),
    "lars": (jaxrec.optim.lars_sgd(0.1), {"momentum1"}),
    "rmsprop": (jaxrec.optim.rowwise_rmsprop(0.1, ar_alpha=0.1), {"momentum1", "prev_iter"}),
    "counter": (
        jaxrec.optim.rowwise_adagrad_with_counter(0.1),
        {"momentum1", "row_counter", "prev_iter"},
    ),
}
DENSE_OPTIMIZERS = {
    "momentum": (optax.chain(optax.clip(1.0), optax.sgd(0.1, momentum=0.9)), {"momentum_buffer"}),
    "adagrad": (optax.adagrad(0.1), {"sum"}),
    "adam": (ADAM, {"exp_avg", "exp_avg_sq"}),
}


def drawn(model, optimizer):
    """Random numbers in all state, so that none is taken for another."""
    rng = np.random.default_rng(0)
    for table in ("user", "item"):
        state = model.embeddings.table_state(table)
        state = {key: rng.random(array.shape, np.float32) for key, array in state.items()}
        model.embeddings.load_table_state(table, state)
    for path, variable in nnx.to_flat_state(nnx.state(optimizer)):
        old = variable.get_value()
        if path[0] == "opt_state" and jnp.issubdtype(old.dtype, jnp.floating):
            variable.set_value(jnp.asarray(rng.random(old.shape), old.dtype))
    optimizer.step.set_value(jnp.asarray(4, optimizer.step.get_value().dtype))


@pytest.mark.parametrize(
    ("table", "dense"), list(zip(TABLE_OPTIMIZERS, itertools.cycle(DENSE_OPTIMIZERS)))
)
def test_state_of_every_optimizer(tmp_path, table, dense):
    (rule, of_tables), (tx, of_dense) = TABLE_OPTIMIZERS[table], DENSE_OPTIMIZERS[dense]
    model, other = Ranker(rule), Ranker(rule, seed=1)
    optimizer, again = jaxrec.Optimizer(model, tx), jaxrec.Optimizer(other, tx)
    drawn(model, optimizer)
    layers = {"over": "over"}
    names = save_torchrec(model, tmp_path / "x.npz", layers=layers, optimizer=optimizer)
    user = "state.embeddings.embedding_bags.user.weight.user."
    assert {n.removeprefix(user) for n in names if n.startswith(user)} == of_tables
    over = "state.over.weight."
    assert {n.removeprefix(over) for n in names if n.startswith(over)} == {*of_dense, "step"}
    assert load_torchrec(other, tmp_path / "x.npz", layers=layers, optimizer=again) == []
    for one, two in ((model, other), (optimizer.opt_state, again.opt_state)):
        leaves = zip(jax.tree.leaves(nnx.state(one)), jax.tree.leaves(nnx.state(two)), strict=True)
        for found, expected in leaves:
            if jnp.asarray(found).dtype != jnp.int32:  # some count, some not
                np.testing.assert_array_equal(found, expected)
    assert int(again.step.get_value()) == 4


def test_names_of_unsharded_and_older_modules(tmp_path):
    """`FusedEmbeddingBagCollection` has ``momentum_1``, torchrec.optim's RowWiseAdagrad ``sum``."""
    rows = {f"embedding_bags.{t}.weight": np.ones((n, 8)) for t, n in (("user", 7), ("item", 5))}
    state = {
        "opt.state.embedding_bags.user.weight.user.weight.momentum_1": np.full(7, 2.0),
        "opt.state.embedding_bags.item.weight.sum": np.full((5, 1), 3.0),
    }
    np.savez(tmp_path / "x.npz", **rows, **state)
    model = Ranker()
    optimizer = jaxrec.Optimizer(model, ADAM)
    assert load_torchrec(model, tmp_path / "x.npz", optimizer=optimizer) == []
    for table, value in (("user", 2), ("item", 3)):
        assert set(np.asarray(model.embeddings.table_state(table)["accumulator"])) == {value}


class Layers(nnx.Module):
    """A layer of each kind."""

    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.conv = nnx.Conv(3, 4, kernel_size=(2, 5), rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.layer_norm = nnx.LayerNorm(4, rngs=rngs)
        self.positions = nnx.Embed(6, 4, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])
        self.scale = nnx.Param(jnp.ones((2, 3)))


SHAPES = {
    "conv.weight": (4, 3, 2, 5),
    "conv.bias": (4,),
    "norm.weight": (4,),
    "norm.bias": (4,),
    "norm.running_mean": (4,),
    "norm.running_var": (4,),
    "layer_norm.weight": (4,),
    "layer_norm.bias": (4,),
    "positions.weight": (6, 4),
    "blocks.0.weight": (4, 4),
    "blocks.0.bias": (4,),
    "blocks.1.weight": (4, 4),
    "blocks.1.bias": (4,),
    "scale": (2, 3),
}


def test_layers_of_every_kind(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {name: rng.random(shape, np.float32) for name, shape in SHAPES.items()}
    np.savez(tmp_path / "x.npz", **arrays)
    model = Layers()
    layers = torchrec_layers(model)
    assert load_torchrec(model, tmp_path / "x.npz", layers=layers) == []
    kernel = model.conv.kernel[...]
    np.testing.assert_array_equal(kernel, arrays["conv.weight"].transpose(2, 3, 1, 0))
    np.testing.assert_array_equal(model.norm.var[...], arrays["norm.running_var"])
    np.testing.assert_array_equal(model.blocks[1].kernel[...].T, arrays["blocks.1.weight"])
    np.testing.assert_array_equal(model.scale[...], arrays["scale"])
    save_torchrec(model, tmp_path / "y.npz", layers=layers)
    with np.load(tmp_path / "y.npz") as found:
        assert set(found) == set(arrays)
        for name, array in arrays.items():
            np.testing.assert_array_equal(found[name], array, err_msg=name)


def dlrm(kind, embeddings, arrays, dim, **options):
    dense = arrays["dense_1"].shape[1]
    if kind is SimpleDeepFMNN:
        return kind(
            embeddings, num_dense=dense, hidden_layer_size=12, deep_fm_dimension=6,
            compat="torchrec", rngs=nnx.Rngs(1),
        )  # fmt: skip
    return kind(
        embeddings, num_dense=dense, bottom_layer_sizes=(16, dim), top_layer_sizes=(16, 8, 1),
        rngs=nnx.Rngs(1), **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("dlrm_rowwise_adagrad_dense_sgd", DLRM, {}),
        ("dlrm_dcn_rowwise_adagrad", DLRM_DCN, {"dcn_num_layers": 2, "dcn_low_rank_dim": 4}),
        ("simple_deepfm_sgd", SimpleDeepFMNN, {}),
    ],
    ids=["dlrm", "dlrm_dcn", "simple_deepfm"],
)
def test_whole_models(tmp_path, name, kind, options):
    """The recorded first weights give TorchRec's first output, and are written as they came."""
    arrays, meta = golden.load("train", name), TRAIN[name]["meta"]
    state = {
        key.removeprefix("p0__").replace("__", "."): array
        for key, array in arrays.items()
        if key.startswith("p0__")
    }
    for table in meta["tables"]:
        entry = f"sparse_arch.embedding_bag_collection.embedding_bags.{table['name']}.weight"
        state[entry] = arrays[f"table0_{table['name']}"]
    np.savez(tmp_path / "x.npz", **{f"model.{key}": array for key, array in state.items()})
    configs = [
        jaxrec.EmbeddingBagConfig(
            table["name"], table["rows"], meta["dim"], feature_names=table["features"],
            pooling=table["pooling"].lower(),
        )
        for table in meta["tables"]
    ]  # fmt: skip
    embeddings = jaxrec.EmbeddingBagCollection(configs, rngs=nnx.Rngs(1))
    model = dlrm(kind, embeddings, arrays, meta["dim"], **options)
    layers = torchrec_layers(model)
    assert load_torchrec(model, tmp_path / "x.npz", layers=layers) == []
    features = jaxrec.KeyedJaggedArray.from_lengths(
        meta["keys"], arrays["values_1"], arrays["lengths_1"]
    )
    expected = arrays["model_output"].reshape(meta["steps"], -1)[0]
    found = nnx.jit(lambda model, *batch: model(*batch))(model, arrays["dense_1"], features)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)

    save_torchrec(model, tmp_path / "y.npz", layers=layers)
    with np.load(tmp_path / "y.npz") as found:
        assert set(found) == set(state)
        for key, array in state.items():
            np.testing.assert_array_equal(found[key], array, err_msg=key)


# Errors, each of which leaves the dense part as it was.


def without(*names):
    return {name: array for name, array in whole().items() if name not in names}


USER = "model.embeddings.embedding_bags.user.weight"
MOMENTUM = "optim.state.embeddings.embedding_bags.user.weight.user.momentum1"
WRONG = {
    "layer_missing": (without("model.over.bias"), r"over\.bias is not there"),
    "layer_twice": (
        whole() | {"ema.over.bias": np.zeros(1)},
        r"over\.bias is there 2 times: model\.over\.bias, ema\.over\.bias",
    ),
    "layer_shape": (
        whole() | {"model.over.weight": np.zeros((2, 16))},
        r"weight: PyTorch's array of over\.kernel has shape \(1, 16\), the file's \(2, 16\)",
    ),
    "state_missing": (without(MOMENTUM), r"user\.weight\.momentum1 or momentum_1 or sum is not"),
    "state_shape": (whole() | {MOMENTUM: np.zeros(6)}, r"accumulator of table 'user' has shape"),
    "moments_missing": (without("optim.state.over.weight.exp_avg"), r"exp_avg is not there"),
    "steps": (
        whole() | {"optim.state.over.bias.step": np.float32(5)},
        "layers had different numbers of steps",
    ),
    "table_missing": (without(USER), "table 'user' of the model's embeddings is not there"),
}


@pytest.mark.parametrize(("arrays", "message"), WRONG.values(), ids=WRONG)
def test_files_that_lack_something(tmp_path, arrays, message):
    np.savez(tmp_path / "x.npz", **arrays)
    model, before = Ranker(), Ranker()
    optimizer = jaxrec.Optimizer(model, ADAM)
    with pytest.raises(CheckpointError, match=message):
        load_torchrec(model, tmp_path / "x.npz", layers={"over": "over"}, optimizer=optimizer)
    for found, expected in zip(
        jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(before)), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("path", ["overs", "over.weight"])
def test_layers_that_the_model_lacks(path):
    with pytest.raises(KeyError, match=f"layers names '{path}', which the model does not have"):
        load_torchrec(Ranker(), RECORDED / "dcp", layers={path: "over"})


def test_state_that_torchrec_lacks(tmp_path):
    model = Ranker(jaxrec.optim.ftrl(0.1))
    optimizer = jaxrec.Optimizer(model, ADAM)
    with pytest.raises(CheckpointError, match="its optimizer keeps 'linear', which TorchRec does"):
        load_torchrec(model, RECORDED / "dcp", optimizer=optimizer)
    with pytest.raises(ValueError, match="its optimizer keeps 'linear', which TorchRec does"):
        save_torchrec(model, tmp_path / "x.npz", optimizer=optimizer)
    with pytest.raises(ValueError, match=r"written to \.safetensors or \.npz, got x\.pt"):
        save_torchrec(model, tmp_path / "x.pt")
    assert not list(tmp_path.iterdir())


# Files of PyTorch.


def test_modules_are_refused():
    with pytest.raises(CheckpointError, match=r"an object of torch\.nn\.modules\.linear\.Linear"):
        load_torchrec(Ranker(), RECORDED / "module.pt")


class Hostile:
    def __reduce__(self):
        return os.system, ("touch hostile",)


def test_pickles_run_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with zipfile.ZipFile("x.pt", "w") as archive:
        archive.writestr("x/data.pkl", pickle.dumps({"a": Hostile()}))
    with pytest.raises(CheckpointError, match=r"it holds an object of posix\.system"):
        load_torchrec(Ranker(), "x.pt")
    shutil.copytree(RECORDED / "dcp", "dcp")
    pathlib.Path("dcp/.metadata").write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(CheckpointError, match=r"it holds an object of posix\.system"):
        load_torchrec(Ranker(), "dcp")
    assert not pathlib.Path("hostile").exists()


@pytest.mark.parametrize("size", [0, 100, 3000, 4800], ids=str)
def test_cut_files(tmp_path, size):
    (tmp_path / "x.pt").write_bytes((RECORDED / "model.pt").read_bytes()[:size])
    with pytest.raises(CheckpointError, match=r"cut short"):
        load_torchrec(Ranker(), tmp_path / "x.pt")


@pytest.mark.parametrize("file", ["__1_0.distcp", ".metadata"])
@pytest.mark.parametrize("size", [0, 500, 3000])
def test_cut_checkpoints(tmp_path, file, size):
    shutil.copytree(RECORDED / "dcp", tmp_path / "dcp")
    (tmp_path / "dcp" / file).write_bytes((RECORDED / "dcp" / file).read_bytes()[:size])
    model = Ranker()
    with pytest.raises(CheckpointError):
        load_torchrec(model, tmp_path / "dcp", layers={"over": "over"})


def test_directories_that_are_none(tmp_path):
    with pytest.raises(CheckpointError, match=r"is not a checkpoint of torch\.distributed\.check"):
        load_torchrec(Ranker(), tmp_path)
    shutil.copytree(RECORDED / "dcp", tmp_path / "dcp")
    (tmp_path / "dcp/__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is missing"):
        load_torchrec(Ranker(), tmp_path / "dcp")
    with pytest.raises(FileNotFoundError):
        load_torchrec(Ranker(), tmp_path / "none.pt")
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("x/y", "")
    with pytest.raises(CheckpointError, match=r"it has no data\.pkl"):
        load_torchrec(Ranker(), tmp_path / "x.pt")


class Parts(nnx.Module):
    """Modules of jaxrec.nn that TorchRec has, too."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.mlp = jaxrec.nn.MLP(3, (4, 2), activation="swish_layernorm", rngs=rngs)
        self.perceptron = jaxrec.nn.Perceptron(3, 4, rngs=rngs)
        self.swish = jaxrec.nn.SwishLayerNorm(4, rngs=rngs)
        self.full = jaxrec.nn.CrossNet(4, 1, rngs=rngs)
        self.vector = jaxrec.nn.VectorCrossNet(4, 1, rngs=rngs)
        self.projection = jaxrec.nn.InteractionProjectionArch(
            2, 4, branch1_layer_sizes=(8,), branch2_layer_sizes=(4,), rngs=rngs
        )


# As TorchRec's modules have them.
PARTS = {
    "mlp._mlp.0._linear.weight": (4, 3),
    "mlp._mlp.0._linear.bias": (4,),
    "mlp._mlp.0._activation_fn.norm.0.weight": (4,),
    "mlp._mlp.0._activation_fn.norm.0.bias": (4,),
    "mlp._mlp.1._linear.weight": (2, 4),
    "mlp._mlp.1._linear.bias": (2,),
    "mlp._mlp.1._activation_fn.norm.0.weight": (2,),
    "mlp._mlp.1._activation_fn.norm.0.bias": (2,),
    "perceptron._linear.weight": (4, 3),
    "perceptron._linear.bias": (4,),
    "swish.norm.0.weight": (4,),
    "swish.norm.0.bias": (4,),
    "full.kernels.0": (4, 4),
    "full.bias.0": (4, 1),
    "vector.kernels.0": (4, 1),
    "vector.bias.0": (4, 1),
    "projection.interaction_branch1.model._mlp.0._linear.weight": (8, 12),
    "projection.interaction_branch1.model._mlp.0._linear.bias": (8,),
    "projection.interaction_branch2.model._mlp.0._linear.weight": (4, 12),
    "projection.interaction_branch2.model._mlp.0._linear.bias": (4,),
}


def test_modules_that_torchrec_has(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {name: rng.random(shape, np.float32) for name, shape in PARTS.items()}
    np.savez(tmp_path / "x.npz", **arrays)
    model = Parts()
    layers = torchrec_layers(model)
    assert load_torchrec(model, tmp_path / "x.npz", layers=layers) == []
    assert save_torchrec(model, tmp_path / "y.npz", layers=layers) == sorted(arrays)
    with np.load(tmp_path / "y.npz") as found:
        for name, array in arrays.items():
            np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_names_with_a_slash(tmp_path):
    config = jaxrec.EmbeddingBagConfig("item", 3, 2)
    names = ("user/clicks", "user")
    model = nnx.Dict(
        {name: jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0)) for name in names}
    )
    values = {name: np.full((3, 2), float(len(name))) for name in names}
    rows = {f"{name}.embedding_bags.item.weight": value for name, value in values.items()}
    np.savez(tmp_path / "x.npz", **rows)
    load_torchrec(model, tmp_path / "x.npz")
    for name in names:
        np.testing.assert_array_equal(model[name].table("item"), values[name])
    assert save_torchrec(model, tmp_path / "y.npz") == sorted(rows)
