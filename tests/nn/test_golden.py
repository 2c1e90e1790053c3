"""Modules and models compute what TorchRec's do, forward and backward."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxrec
from jaxrec import nn
from tests import golden

pytestmark = [
    pytest.mark.usefixtures("compiled_fast"),
    pytest.mark.every_case,
    pytest.mark.jax_version,
]

CASES = dict(golden.cases("modules"))

# For each parameter of a module: its name in the recorded arrays, and how it lies there.
Places = dict[str, nnx.Variable]


def linear(layer, name, index=None):
    """A dense layer's kernel, which torch keeps transposed, and its bias."""
    places = {f"{name}__weight": (layer.kernel, np.transpose)}
    if layer.bias is not None:
        places[f"{name}__bias"] = (layer.bias, np.array)
    return places


def mlp(module, name):
    places = {}
    for i, layer in enumerate(module.layers):
        places |= linear(layer, f"{name}__{i}___linear")
    for i, activation in enumerate(module.activations):
        if isinstance(activation, nn.SwishLayerNorm):
            places |= swish(activation, f"{name}__{i}___activation_fn__norm__0")
    return places


def swish(module, name):
    return {
        f"{name}__weight": (module.scale, np.array),
        f"{name}__bias": (module.bias, np.array),
    }


def top(module, name="over_arch"):
    last = len(module.layers) - 1
    places = {}
    for i, layer in enumerate(module.layers[:last]):
        places |= linear(layer, f"{name}__model__0___mlp__{i}___linear")
    return places | linear(module.layers[last], f"{name}__model__1")


def low_rank(module, prefix=""):
    places = {}
    for i, (down, up) in enumerate(zip(module.down, module.up, strict=True)):
        places |= {
            f"{prefix}V_kernels__{i}": (down.kernel, np.transpose),
            f"{prefix}W_kernels__{i}": (up.kernel, np.transpose),
            f"{prefix}bias__{i}": (up.bias, np.ravel),
        }
    return places


def full_rank(module):
    places = {}
    for i, layer in enumerate(module.layers):
        places |= {
            f"kernels__{i}": (layer.kernel, np.transpose),
            f"bias__{i}": (layer.bias, np.ravel),
        }
    return places


def rank_one(module):
    places = {}
    for i, (kernel, bias) in enumerate(zip(module.kernels, module.biases, strict=True)):
        places |= {f"kernels__{i}": (kernel, np.ravel), f"bias__{i}": (bias, np.ravel)}
    return places


def mixture(module):
    places = {}
    for i in range(len(module.up)):
        places |= {
            f"U_kernels__{i}": (module.up[i], np.array),
            f"C_kernels__{i}": (module.inner[i], np.array),
            f"V_kernels__{i}": (module.down[i], np.array),
            f"bias__{i}": (module.biases[i], np.ravel),
        }
    return places


def projection(module, name):
    return mlp(module.branch1, f"{name}interaction_branch1__model___mlp") | mlp(
        module.branch2, f"{name}interaction_branch2__model___mlp"
    )


def activation(name):
    return "swish_layernorm" if "swish" in name else "sigmoid" if "sigmoid" in name else "relu"


def make_mlp(name, case, arrays, rngs):
    module = nn.MLP(
        arrays["x"].shape[1],
        case["meta"]["layer_sizes"],
        activation=activation(name),
        activation_on_last="no_last_act" not in name,
        bias="no_bias" not in name,
        rngs=rngs,
    )
    return module, mlp(module, "_mlp"), ("x",)


def make(name, rngs):
    """The module of a case, where its parameters are, and the names of its inputs."""
    case, arrays = CASES[name], golden.load("modules", name)
    columns = arrays["x"].shape[-1] if "x" in arrays else 0
    if name.startswith("mlp_"):
        return make_mlp(name, case, arrays, rngs)
    match name:
        case "crossnet":
            module = nn.CrossNet(columns, 3, rngs=rngs)
            return module, full_rank(module), ("x",)
        case "low_rank_crossnet":
            module = nn.LowRankCrossNet(columns, 3, 2, rngs=rngs)
            return module, low_rank(module), ("x",)
        case "vector_crossnet":
            module = nn.VectorCrossNet(columns, 3, compat="torchrec", rngs=rngs)
            return module, rank_one(module), ("x",)
        case (
            "low_rank_mixture_crossnet_experts1"
            | "low_rank_mixture_crossnet_experts3"
            | "low_rank_mixture_crossnet_tanh"
        ):
            module = nn.LowRankMixtureCrossNet(
                columns,
                sum(key.startswith("p__U_kernels") for key in arrays),
                case["meta"]["num_experts"],
                case["meta"]["low_rank"],
                activation=jnp.tanh if "tanh" in name else nnx.relu,
                rngs=rngs,
            )
            places = mixture(module)
            if module.gates is not None:  # recorded one by one
                for e in range(case["meta"]["num_experts"]):
                    places[f"gates__{e}__weight"] = (module.gates, e)
            return module, places, ("x",)
        case "factorization_machine":
            module = nn.FactorizationMachine(compat="torchrec")
            return (lambda a, b: module([a, b])), {}, ("a", "b")
        case "deepfm":
            module = nn.MLP(26, (7,), rngs=rngs)
            places = linear(module.layers[0], "dense_module__0")
            return Over(module), places, ("a", "b")
        case "perceptron":
            out = arrays["p___linear__weight"].shape[0]
            module = nn.Perceptron(columns, out, rngs=rngs)
            return module, linear(module.linear, "_linear"), ("x",)
        case "swish_layernorm" | "swish_layernorm_2d":
            module = nn.SwishLayerNorm(arrays["p__norm__0__weight"].shape, rngs=rngs)
            return module, swish(module, "norm__0"), ("x",)
        case "interaction_arch":
            return nn.InteractionArch(), {}, ("dense", "sparse")
        case "interaction_dcn_arch":
            _, features, dim = arrays["sparse"].shape
            module = nn.InteractionDCNArch(features, dim, num_layers=2, low_rank=3, rngs=rngs)
            return module, low_rank(module.crossnet, "crossnet__"), ("dense", "sparse")
        case "interaction_projection_arch":
            _, features, dim = arrays["sparse"].shape
            module = nn.InteractionProjectionArch(
                features,
                dim,
                branch1_layer_sizes=(6, 3 * dim),
                branch2_layer_sizes=(5, 2 * dim),
                rngs=rngs,
            )
            return module, projection(module, ""), ("dense", "sparse")
        case "over_arch":
            sizes = [arrays[f"p__model__0___mlp__{i}___linear__weight"].shape[0] for i in range(2)]
            sizes.append(arrays["p__model__1__weight"].shape[0])
            module = nn.MLP(columns, sizes, activation_on_last=False, rngs=rngs)
            places = {key.removeprefix("__"): place for key, place in top(module, "").items()}
            return module, places, ("x",)
        case "fm_interaction_arch":
            dim = arrays["dense"].shape[1]
            module = nn.FMInteractionArch(3 * dim, 5, compat="torchrec", rngs=rngs)
            places = linear(module.deep.layers[0], "deep_fm__dense_module__0")
            return Stacking(module), places, ("dense", "f0", "f1")
    raise KeyError(name)


class Over(nnx.Module):
    """A module over flattened embeddings."""

    def __init__(self, module):
        self.module = module

    def __call__(self, *embeddings):
        return self.module(nn.flatten_embeddings(embeddings))


class Stacking(nnx.Module):
    """An interaction that is given its sparse vectors one by one."""

    def __init__(self, module):
        self.module = module

    def __call__(self, dense, *sparse):
        return self.module(dense, jnp.stack(sparse, axis=1))


def load(places, arrays):
    for name, (variable, how) in places.items():
        array = arrays[f"p__{name}"]
        if isinstance(how, int):
            variable.set_value(variable[...].at[how].set(array[0]))
        else:
            variable.set_value(jnp.asarray(how(array)))


MODULES = [name for name in CASES if not name.startswith(("model_", "position_weighted"))]


@pytest.mark.parametrize("name", MODULES)
def test_modules(name):
    arrays, tolerance = golden.load("modules", name), CASES[name]["tolerance"]
    module, places, inputs = make(name, nnx.Rngs(0))
    assert {f"p__{place}" for place in places} == {key for key in arrays if key.startswith("p__")}
    load(places, arrays)
    graph, state = nnx.split(module) if isinstance(module, nnx.Module) else (None, {})

    @jax.jit
    def evaluate(state, inputs, cotangent):
        def forward(state, inputs):
            return (nnx.merge(graph, state) if graph is not None else module)(*inputs)

        out, vjp = jax.vjp(forward, state, inputs)
        return out, *vjp(cotangent)

    out, gradients, of_inputs = evaluate(
        state, tuple(arrays[key] for key in inputs), arrays["grad_out"]
    )
    np.testing.assert_allclose(out, arrays["out"], **tolerance)
    for key, gradient in zip(inputs, of_inputs, strict=True):
        np.testing.assert_allclose(gradient, arrays[f"grad__{key}"], err_msg=key, **tolerance)
    if graph is None:
        return
    nnx.update(module, gradients)  # the places now hold gradients
    for place, (variable, how) in places.items():
        expected = arrays[f"grad__p__{place}"]
        got = variable[...]
        got, expected = (got[how], expected[0]) if isinstance(how, int) else (got, how(expected))
        np.testing.assert_allclose(got, expected, err_msg=place, **tolerance)


def collection(meta, arrays, rngs):
    embeddings = jaxrec.EmbeddingBagCollection(
        [
            jaxrec.EmbeddingBagConfig(
                table["name"], table["rows"], table["dim"], feature_names=table["features"]
            )
            for table in meta["tables"]
        ],
        optimizer=jaxrec.optim.sgd(1.0),
        rngs=rngs,
    )
    for table in embeddings.configs:
        embeddings.load_table(table.name, arrays[_table(table.name)])
    return embeddings


def _table(name):
    return f"p__sparse_arch__embedding_bag_collection__embedding_bags__{name}__weight"


def make_model(name, arrays, rngs):
    meta = CASES[name]["meta"]
    embeddings = collection(meta, arrays, rngs)
    sizes = {"num_dense": meta["dense_in_features"]}
    if name == "model_simple_deepfmnn":
        model = nn.SimpleDeepFMNN(
            embeddings,
            **sizes,
            hidden_layer_size=6,
            deep_fm_dimension=5,
            compat="torchrec",
            rngs=rngs,
        )
        places = {}
        for i, layer in enumerate(model.dense_arch.layers):
            places |= linear(layer, f"dense_arch__model__{2 * i}")
        places |= linear(model.interaction.deep.layers[0], "inter_arch__deep_fm__dense_module__0")
        return model, places | linear(model.head, "over_arch__model__0")
    sizes |= {"bottom_layer_sizes": (6, 4), "top_layer_sizes": (5, 1)}
    match name:
        case "model_dlrm":
            model, places = nn.DLRM(embeddings, **sizes, rngs=rngs), {}
        case "model_dlrm_dcn":
            model = nn.DLRM_DCN(
                embeddings, **sizes, dcn_num_layers=2, dcn_low_rank_dim=3, rngs=rngs
            )
            places = low_rank(model.interaction.crossnet, "inter_arch__crossnet__")
        case "model_dlrm_projection":
            model = nn.DLRM_Projection(
                embeddings,
                **sizes,
                interaction_branch1_layer_sizes=(7, 2 * 4),
                interaction_branch2_layer_sizes=(4, 3 * 4),
                rngs=rngs,
            )
            places = projection(model.interaction, "inter_arch__")
    places |= mlp(model.bottom, "dense_arch__model___mlp") | top(model.top)
    return model, places


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("model_")])
def test_models(name):
    arrays, tolerance = golden.load("modules", name), CASES[name]["tolerance"]
    model, places = make_model(name, arrays, nnx.Rngs(0))
    tables = {_table(table.name) for table in model.embeddings.configs}
    recorded = {key for key in arrays if key.startswith("p__")}
    assert {f"p__{place}" for place in places} == recorded - tables
    load(places, arrays)
    features = jaxrec.KeyedJaggedArray.from_lengths(
        [str(key) for key in arrays["keys"]], arrays["values"], arrays["lengths"]
    )

    @nnx.jit
    def step(model, dense):
        def loss_fn(model, dense):
            out = model(dense, features)
            return (out * arrays["grad_out"][:, 0]).sum(), out

        (_, out), gradients = jaxrec.value_and_grad(loss_fn, has_aux=True)(model, dense)
        model.eval()  # the gradient of the inputs is wanted, and none of tables
        of_dense = jax.grad(lambda dense: loss_fn(model, dense)[0])(dense)
        model.embeddings.apply_gradients(gradients.tables["embeddings"], 0)
        return out, gradients.dense, of_dense

    out, gradients, of_dense = step(model, arrays["dense_features"])
    np.testing.assert_allclose(out, arrays["out"][:, 0], **tolerance)
    np.testing.assert_allclose(of_dense, arrays["grad__dense_features"], **tolerance)
    for table in model.embeddings.configs:  # one step of SGD at rate 1 subtracts the gradient
        moved = arrays[_table(table.name)] - model.embeddings.table(table.name)
        np.testing.assert_allclose(moved, arrays[f"grad__{_table(table.name)}"], **tolerance)
    nnx.update(model, gradients)  # the places now hold gradients
    for place, (variable, how) in places.items():
        expected = how(arrays[f"grad__p__{place}"])
        np.testing.assert_allclose(variable[...], expected, err_msg=place, **tolerance)


def test_position_weighted_module():
    arrays = golden.load("modules", "position_weighted_module")
    module = nn.PositionWeightedModule(len(arrays["p__position_weight"]))
    module.position_weight.set_value(jnp.asarray(arrays["p__position_weight"]))
    column = jaxrec.JaggedArray(arrays["values"], arrays["lengths"].astype(np.int32))
    weighted = module(column)
    np.testing.assert_array_equal(weighted.weights, arrays["out_weights"])
    np.testing.assert_array_equal(weighted.values, arrays["out_values"])


def test_position_weighted_module_collection():
    arrays = golden.load("modules", "position_weighted_module_collection")
    keys = [str(key) for key in arrays["keys"]]
    weights = {key: arrays[f"p__position_weights__{key}"] for key in ("f0", "f1")}
    module = nn.PositionWeightedModuleCollection({k: len(w) for k, w in weights.items()})
    for key, array in weights.items():
        module.position_weights[key].position_weight.set_value(jnp.asarray(array))
    batch = jaxrec.KeyedJaggedArray.from_lengths(keys, arrays["values"], arrays["lengths"])
    weighted = module(batch)
    got = np.concatenate(
        [column.weights[: column.lengths.sum()] for column in weighted.to_dict().values()]
    )
    np.testing.assert_array_equal(got, arrays["out_weights"])
