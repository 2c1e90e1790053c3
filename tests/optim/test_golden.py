"""Every row optimizer against five recorded steps of FBGEMM's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrec.optim
from jaxrec.embed.kernels import reference
from jaxrec.embed.kernels.base import BagLayout
from tests import golden

pytestmark = [pytest.mark.every_case, pytest.mark.jax_version]

CASES = [pytest.param(name, case, id=name) for name, case in golden.cases("optim")]

# Shapes common to all cases, so that few programs are compiled.
NUM_ROWS, BATCH, NUM_IDS = 20, 8, 96

flatten_bags = jax.jit(reference.flatten_bags, static_argnums=(3, 4))

COUNTER_STATES = {"accumulator": "momentum1", "count": "row_counter", "last_step": "prev_iter"}


def ema_in_place(
    *, step_ema: int, step_start: int, step_ema_coef: float, **arguments: Any
) -> jaxrec.optim.RowOptimizer:
    return jaxrec.optim.ema_in_place(
        optimizer=jaxrec.optim.rowwise_adagrad(**arguments),
        every=step_ema,
        start=step_start,
        coefficient=step_ema_coef,
    )


# FBGEMM's optimizer (or, where it has it on GPUs only, the beginning of the case's name), then
# which of its states each of ours is.
OPTIMIZERS = {
    "EXACT_SGD": (jaxrec.optim.sgd, {}),
    "EXACT_ADAGRAD": (jaxrec.optim.adagrad, {"accumulator": "momentum1"}),
    "EXACT_ROWWISE_ADAGRAD": (jaxrec.optim.rowwise_adagrad, {"accumulator": "momentum1"}),
    "rowwise_adagrad": (jaxrec.optim.rowwise_adagrad, {"accumulator": "momentum1"}),
    "rowwise_adagrad_counter": (jaxrec.optim.rowwise_adagrad_with_counter, COUNTER_STATES),
    "rowwise_adagrad_cowclip": (jaxrec.optim.rowwise_adagrad_cowclip, COUNTER_STATES),
    "emainplace": (ema_in_place, {"accumulator": "momentum1"}),
    "adam": (jaxrec.optim.adam, {"first_moment": "momentum1", "second_moment": "momentum2"}),
    "partial_rowwise_adam": (
        jaxrec.optim.partial_rowwise_adam,
        {"first_moment": "momentum1", "second_moment": "momentum2"},
    ),
    "lamb": (jaxrec.optim.lamb, {"first_moment": "momentum1", "second_moment": "momentum2"}),
    "partial_rowwise_lamb": (
        jaxrec.optim.partial_rowwise_lamb,
        {"first_moment": "momentum1", "second_moment": "momentum2"},
    ),
    "lars_sgd": (jaxrec.optim.lars_sgd, {"momentum": "momentum1"}),
    "rowwise_rmsprop": (
        jaxrec.optim.rowwise_rmsprop,
        {"second_moment": "momentum1", "last_step": "prev_iter"},
    ),
}

ARGUMENTS = {
    "lr": "learning_rate",
    "beta1": "b1",
    "beta2": "b2",
    "ema_beta": "decay",
    "max_gradient": "clip_value",
    "counter_halflife": "halflife",
    "counter_weight_decay_mode": "weight_decay_mode",
    "adjustment_ub": "adjustment",
    "weight_norm_coefficient": "clip_ratio",
    "lower_bound": "clip_minimum",
}

WEIGHT_DECAY_MODES = {
    "NONE": "none",
    "L2": "l2",
    "DECOUPLE": "decoupled",
    "ADAGRADW": "adagradw",
}
LEARNING_RATE_MODES = {"0": "tail_increase", "1": "tail_decrease", "2": "counter_sgd"}


def optimizer_of(name: str, case: dict[str, Any]):
    """Our optimizer for a case, and the recorded name of each of its states."""
    meta = case["meta"]
    kind = meta.get("optimizer")
    if kind not in OPTIMIZERS or "counter_halflife" in meta["hyper"]:
        kind = max((prefix for prefix in OPTIMIZERS if name.startswith(prefix)), key=len)
    optimizer, states = OPTIMIZERS[kind]
    arguments = {ARGUMENTS.get(key, key): value for key, value in meta["hyper"].items()}
    arguments.pop("gradient_clipping", None)
    if "weight_decay_mode" in arguments:
        arguments["weight_decay_mode"] = WEIGHT_DECAY_MODES[arguments["weight_decay_mode"]]
    if "counter_halflife" in meta["hyper"]:
        arguments |= counter_arguments(name, arguments)
    if "lr_schedule" in meta:
        rates = np.asarray(meta["lr_schedule"], np.float32)
        arguments["learning_rate"] = lambda step: jnp.asarray(rates)[step]
    if "rowwise_bias_correction" in name:
        arguments["rowwise_bias_correction"] = True
        states = {**states, "count": "row_counter"}
    return optimizer(**arguments, stochastic_rounding=False), states


def counter_arguments(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """What FBGEMM's arguments for counters are here, its numbers recorded as texts."""
    changed: dict[str, Any] = {}
    if "cowclip" in name:
        changed["weight_decay_mode"] = "l2" if name.endswith("l2") else "decoupled"
    if arguments["halflife"] == -1:
        changed["halflife"] = None
        if arguments.get("weight_decay_mode") == "adagradw":
            changed["learning_rate_mode"] = "sqrt_counter"
    if "learning_rate_mode" in arguments:
        threshold = arguments.pop("tail_id_threshold")
        assert threshold == "TailIdThreshold(val=1.0, is_ratio=False)"
        mode = LEARNING_RATE_MODES[arguments["learning_rate_mode"]]
        changed |= {"tail_threshold": 1.0, "learning_rate_mode": mode}
        changed["adjustment"] = float(arguments["adjustment"])
    return changed


def swept(optimizer: jaxrec.optim.RowOptimizer, rows: jax.Array, step: int) -> jax.Array:
    """The rows as the lookups of a step, counted from 1, see them."""
    return optimizer.sweep(rows) if optimizer.is_sweep_due(jnp.int32(step - 2)) else rows


def features_of(case: dict[str, Any], table: int) -> list[int]:
    mapping = case["meta"]["feature_table_map"]
    return [feature for feature, its_table in enumerate(mapping) if its_table == table]


def bags_of(
    case: dict[str, Any], arrays: dict[str, np.ndarray], step: int, feature: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Of each bag of a feature: ids, weights, and the gradient of the pooled output."""
    meta = case["meta"]
    widths = [meta["dims"][table] for table in meta["feature_table_map"]]
    columns = slice(sum(widths[:feature]), sum(widths[: feature + 1]))
    offsets = arrays[f"offsets_{step}"]
    gradients = arrays[f"grad_{step}"]
    if "fp16_output" in case["name"]:
        gradients = gradients.astype(np.float16)
    for sample in range(meta["batch"]):
        bag = feature * meta["batch"] + sample
        places = slice(offsets[bag], offsets[bag + 1])
        ids = arrays[f"ids_{step}"][places]
        weights = arrays[f"id_weights_{step}"][places] if meta["weighted"] else np.ones(ids.size)
        yield ids, weights, gradients[sample, columns]


def summed_gradients(
    case: dict[str, Any], arrays: dict[str, np.ndarray], step: int, table: int
) -> tuple[np.ndarray, np.ndarray]:
    """The gradient of each row of a table in float64, and which rows occur."""
    meta = case["meta"]
    gradients = np.zeros((NUM_ROWS, meta["dims"][table]))
    occurs = np.zeros(NUM_ROWS, bool)
    bound = meta["hyper"].get("max_gradient", np.inf)
    for feature in features_of(case, table):
        for ids, weights, gradient in bags_of(case, arrays, step, feature):
            gradient = np.clip(gradient.astype(np.float64), -bound, bound)
            shares = weights / len(ids) if meta["pooling"] == "MEAN" else weights
            for row, share in zip(ids, shares, strict=True):
                gradients[row] += share * gradient
                occurs[row] = True
    return gradients, occurs


def first_rows(arrays: dict[str, np.ndarray], table: int) -> jax.Array:
    """A table's initial weights, with unused rows up to `NUM_ROWS`."""
    rows = arrays[f"w0_{table}"]
    return jnp.asarray(np.pad(rows, ((0, NUM_ROWS - len(rows)), (0, 0))))


def check(case, arrays, step, table, rows, state, states):
    num_rows = case["meta"]["rows"][table]
    found = {"w": rows} | {states[name]: array for name, array in state.items()}
    for name, array in found.items():
        np.testing.assert_allclose(
            np.asarray(array, np.float64)[:num_rows],
            arrays[f"{name}_{table}_{step}"].reshape(num_rows, *array.shape[1:]),
            **case["tolerance"],
            err_msg=f"{name} of table {table} after step {step}",
        )


@pytest.mark.parametrize(("name", "case"), CASES)
def test_update(name, case):
    arrays = golden.load("optim", name)
    optimizer, states = optimizer_of(name, case)
    for table in range(len(case["meta"]["rows"])):
        rows = first_rows(arrays, table)
        state = optimizer.init(*rows.shape)
        assert set(state) == set(states)
        for step in range(1, case["meta"]["steps"] + 1):
            rows = swept(optimizer, rows, step)
            gradients, occurs = summed_gradients(case, arrays, step, table)
            new_rows, new_state = optimizer.update(
                rows.astype(jnp.float32),
                jnp.asarray(gradients, jnp.float32),
                state,
                jnp.int32(step - 1),
            )
            rows = jnp.where(occurs[:, None], new_rows.astype(rows.dtype), rows)
            state = {
                key: jnp.where(occurs.reshape(-1, *[1] * (new.ndim - 1)), new, state[key])
                for key, new in new_state.items()
            }
            check(case, arrays, step, table, rows, state, states)


@pytest.mark.parametrize(("name", "case"), CASES)
def test_fused_update(name, case):
    arrays = golden.load("optim", name)
    meta = case["meta"]
    optimizer, states = optimizer_of(name, case)
    for table in range(len(meta["rows"])):
        features = features_of(case, table)
        capacity = NUM_IDS // len(features)
        layout = BagLayout(
            id_starts=tuple(i * capacity for i in range(len(features))),
            capacities=(capacity,) * len(features),
            length_starts=tuple(i * BATCH for i in range(len(features))),
            strides=(BATCH,) * len(features),
            row_offsets=(0,) * len(features),
            row_counts=(NUM_ROWS,) * len(features),
            means=(meta["pooling"] == "MEAN",) * len(features),
        )
        rows = first_rows(arrays, table)
        state = optimizer.init(*rows.shape)
        for step in range(1, meta["steps"] + 1):
            rows = swept(optimizer, rows, step)
            # Padding holds ids that exist, to show that it is not looked at.
            ids = np.ones((len(features), capacity), np.int32)
            weights = np.ones((len(features), capacity), np.float32)
            lengths = np.zeros((len(features), BATCH), np.int32)
            gradients = np.ones((BATCH, len(features), meta["dims"][table]), np.float32)
            for i, feature in enumerate(features):
                end = 0
                for sample, bag in enumerate(bags_of(case, arrays, step, feature)):
                    start, end = end, end + len(bag[0])
                    ids[i, start:end], weights[i, start:end] = bag[:2]
                    lengths[i, sample] = len(bag[0])
                    gradients[sample, i] = bag[2]
            lookups = flatten_bags(
                jnp.asarray(ids.ravel()),
                jnp.asarray(lengths.ravel()),
                jnp.asarray(weights.ravel()) if meta["weighted"] else None,
                layout,
                NUM_ROWS,
            )
            rows, state = reference.fused_update(
                rows,
                state,
                lookups,
                jnp.asarray(gradients.reshape(layout.num_bags, -1)),
                optimizer,
                jnp.int32(step - 1),
            )
            check(case, arrays, step, table, rows, state, states)
