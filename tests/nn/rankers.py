"""Rankers for tests: those of the golden cases, and small ones with batches drawn for them."""

from __future__ import annotations

import jax
import numpy as np
from flax import nnx

import jaxrec
from jaxrec.nn import HSTURanker, RankerFeatures, TargetTask
from tests.nn import ranker_cases

# -- golden cases ----------------------------------------------------------------------------------


def rows(values, lengths):
    return [part.tolist() for part in np.split(np.asarray(values), np.cumsum(lengths))[:-1]]


def tables_of(**arrays):
    """A collection whose tables hold the given rows; a step of SGD subtracts the gradient."""
    embeddings = jaxrec.EmbeddingCollection(
        [
            jaxrec.EmbeddingConfig(name, len(array), array.shape[1], (name, f"c_{name}"))
            for name, array in arrays.items()
        ],
        optimizer=jaxrec.optim.sgd(1.0),
        rngs=nnx.Rngs(0),
    )
    for name, array in arrays.items():
        embeddings.load_table(name, array)
    return embeddings


def of_embeddings(name, **options):
    """The ranker and the batch of a case that gives embeddings: they become rows of tables."""
    arrays, meta = ranker_cases.load(name), ranker_cases.CASES[name]["meta"]
    given = {"item": arrays["x"], "c0": arrays["c0"], "c1": arrays["c1"]}
    if "additional" in arrays:
        given["additional"] = arrays["additional"]
    mlp = next(k for k in arrays if "content_embedding_mlp" in k and k.endswith("mlp__0__weight"))
    context = next(key for key in arrays if key.endswith("batched_contextual_linear_weights"))
    action = next(key for key in arrays if key.endswith("_encoder___action_embedding_table"))
    features = RankerFeatures(
        {"item": "c_item"},
        additional={"additional": "c_additional"} if "additional" in arrays else {},
        context={"c0": 1, "c1": 2},
        min_lengths={"c1": meta["min_length_of_c1"]},
        times=("time", "c_time"),
        actions=("action", "c_action"),
    )
    model = HSTURanker(
        tables_of(**given),
        features,
        [TargetTask("click", bit=1)],
        dim=arrays[context].shape[-1],
        action_bits=meta["action_weights"],
        action_dim=arrays[action].shape[1],
        token_hidden_dim=arrays[mlp].shape[0],
        rngs=nnx.Rngs(0),
        **options,
    )
    model.input_dropout.deterministic = not meta.get("training", True)
    is_target = np.repeat(
        [False, True] * len(arrays["T"]), np.stack([arrays["uih"], arrays["T"]], axis=1).ravel()
    )
    places = np.arange(len(arrays["x"]), dtype=np.int32)
    batch = {}
    for prefix, of_side, lengths in (("", ~is_target, "uih"), ("c_", is_target, "T")):
        for key in ("item", "additional"):
            batch[f"{prefix}{key}"] = rows(places[of_side], arrays[lengths])
        batch[f"{prefix}time"] = rows(arrays["times"][of_side], arrays[lengths])
    batch["action"] = rows(arrays["actions"], arrays["uih"])
    for key in ("c0", "c1"):
        count = arrays[f"{key}_lengths"]
        batch[key] = rows(np.arange(count.sum()), count)
        batch[f"c_{key}"] = [[]] * len(count)
    return model, jax.device_put(jaxrec.KeyedJaggedArray.from_lists(batch)), arrays


def whole(name):
    """The ranker and the batch of a case of the whole model."""
    arrays, meta = ranker_cases.load(name), ranker_cases.CASES[name]["meta"]
    prefix = "p___embedding_collection__embeddings__t_"
    tables = {key: arrays[f"{prefix}{key}__weight"] for key in ("item", "category", "user", "tags")}
    model = HSTURanker(
        tables_of(**tables),
        RankerFeatures(
            {"item": "c_item"},
            additional={"category": "c_category"},
            context={"user": 1, "tags": 2},
            min_lengths={"user": 4},
            times=("time", "c_time"),
            actions=("action", "c_action"),
            watch_times=("watch", "c_watch"),
        ),
        [
            TargetTask(
                task["name"],
                bit=task["weight"] if task["type"] == "BINARY_CLASSIFICATION" else 0,
                weight=meta["causal_multitask_weights"],
            )
            for task in meta["tasks"]
        ],
        dim=meta["dim"],
        num_layers=meta["layers"],
        num_heads=meta["heads"],
        qk_dim=meta["attention_dim"],
        value_dim=meta["hidden_dim"],
        norm="group" if meta["group_norm"] else "layer",
        max_length=None,
        action_bits=meta["action_weights"],
        action_dim=meta["action_dim"],
        token_hidden_dim=8,
        num_positions=48,
        num_times=16,
        output=meta["output"],
        block_size=8,
        rngs=nnx.Rngs(0),
    )
    batch = {}
    for lengths, keys in {
        "history_lengths": ("item", "category", "time", "action", "watch"),
        "num_targets": ("c_item", "c_category", "c_time", "c_action", "c_watch"),
        "tags_lengths": ("tags",),
    }.items():
        batch |= {key: rows(arrays[key], arrays[lengths]) for key in keys}
    batch["user"] = [[user] for user in arrays["user"].tolist()]
    batch |= {f"c_{key}": [[]] * len(batch["user"]) for key in ("user", "tags")}
    return model, jax.device_put(jaxrec.KeyedJaggedArray.from_lists(batch)), arrays


def places_of_units(model, prefix):
    places = {}
    for number, unit in enumerate(model.stack.units):
        places |= ranker_cases.unit(unit, f"{prefix}_stu_module___stu_layers__{number}__")
    return places


def places_of_whole(model):
    head, norm = model.tasks.mlp.layers, model.tasks.mlp.activations[0]
    prefix, task = "_hstu_transducer__", "_multitask_module___prediction_module__"
    return {
        **places_of_units(model, prefix),
        **ranker_cases.tokens(model, f"{prefix}_input_preprocessor__"),
        **ranker_cases.positions(model.positions, f"{prefix}_positional_encoder__"),
        **ranker_cases.output(model.output, f"{prefix}_output_postprocessor__"),
        **ranker_cases.token_mlp(model.item_mlp, "_item_embedding_mlp"),
        f"{task}0__weight": (head[0].kernel, np.transpose),
        f"{task}0__bias": (head[0].bias, np.array),
        f"{task}1__weight": (norm.scale, np.array),
        f"{task}1__bias": (norm.bias, np.array),
        f"{task}2__weight": (head[1].kernel, np.transpose),
        f"{task}2__bias": (head[1].bias, np.array),
    }


def step(model, loss):
    """The results and gradients of ``loss(model)``; tables move by their gradient."""

    @nnx.jit
    def run(model):
        (_, out), gradients = jaxrec.value_and_grad(loss, has_aux=True)(model)
        model.embeddings.apply_gradients(gradients.tables["embeddings"], 0)
        return out, gradients.dense

    before = {t.name: np.array(model.embeddings.table(t.name)) for t in model.embeddings.configs}
    out, gradients = run(model)
    moved = {name: table - model.embeddings.table(name) for name, table in before.items()}
    return out, gradients, moved


# -- small rankers ---------------------------------------------------------------------------------

ITEMS, USERS = 50, 10


def small(**options):
    """A ranker with context, times and two tasks, in evaluation mode."""
    rngs = nnx.Rngs(0)
    tables = [
        jaxrec.EmbeddingConfig("item", ITEMS, 8, ("item", "c_item"), initializer="normal"),
        jaxrec.EmbeddingConfig("user", USERS, 8, initializer="normal"),
    ]
    options = {
        "dim": 16,
        "num_layers": 2,
        "num_heads": 2,
        "max_length": 40,
        "action_bits": (1, 2),
        "num_positions": 40,
        "num_times": 60,
        "token_hidden_dim": 8,
        "item_hidden_dim": 8,
        "task_hidden_sizes": (8,),
        "block_size": 8,
    } | options
    model = HSTURanker(
        jaxrec.EmbeddingCollection(tables, optimizer=jaxrec.optim.sgd(0.1), rngs=rngs),
        RankerFeatures(
            {"item": "c_item"},
            context={"user": 1},
            times=("time", "c_time"),
            actions=("action", "c_action"),
            watch_times=("watch", "c_watch"),
        ),
        [TargetTask("click", bit=1), TargetTask("seconds", weight=0.1)],
        rngs=rngs,
        **options,
    )
    # First values are small: without more, nothing below would see the attention.
    for unit in model.stack.units:
        unit.inputs.kernel.set_value(unit.inputs.kernel[...] * 2)
    model.eval()
    return model


def lists(lengths, targets, seed=0):
    """A batch as lists; the candidates of a row have the time of its request."""
    rng = np.random.default_rng(seed)
    batch = {key: [] for key in ("item", "time", "action", "watch", "user")}
    batch |= {f"c_{key}": [] for key in ("item", "time", "action", "watch")}
    for length, count in zip(lengths, targets, strict=True):
        times = np.sort(rng.integers(0, 200_000, length + 1))
        batch["item"].append(rng.integers(0, ITEMS, length).tolist())
        batch["time"].append(times[:length].tolist())
        batch["action"].append(rng.integers(0, 4, length).tolist())
        batch["watch"].append(rng.integers(0, 90, length).tolist())
        batch["user"].append([int(rng.integers(USERS))])
        batch["c_item"].append(rng.integers(0, ITEMS, count).tolist())
        batch["c_time"].append([int(times[-1])] * count)
        batch["c_action"].append(rng.integers(0, 4, count).tolist())
        batch["c_watch"].append(rng.integers(0, 9, count).tolist())
    return batch


def pack(batch, keys=None, **capacities):
    keys = list(batch) if keys is None else keys
    chosen = {key: batch[key] for key in keys}
    return jax.device_put(
        jaxrec.KeyedJaggedArray.from_lists(
            chosen, capacities={key: capacities.get(key, 64) for key in keys}
        )
    )
