"""jaxrec's models of `benchmarks.gpu.step_shapes`, with their losses and training steps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import optax
from flax import nnx

import jaxrec
from benchmarks.gpu.step_shapes import NUM_DENSE, ClickStep, SequenceStep, Step

# Features of a sequence model, which all read the item table.
SEQUENCE_FEATURES = ("history", "next", "negatives")


@dataclasses.dataclass(frozen=True)
class StepModel:
    """A model, its optimizer and its loss.

    Attributes:
        model: The model.
        optimizer: Its optimizer.
        tables: The collection of its tables.
        parameters: Its dense parameters, in the order of the peers' `dense_parameters`, each with
            whether PyTorch stores its transpose.
    """

    model: Any
    optimizer: jaxrec.Optimizer
    tables: Any
    parameters: list[tuple[nnx.Param, bool]]


def make(step: Step) -> StepModel:
    """Make the model of a step."""
    rngs = nnx.Rngs(0)
    return make_click(step, rngs) if isinstance(step, ClickStep) else make_sequence(step, rngs)


def train_step_of(step: Step) -> Callable[..., Any]:
    """Return the training step ``(model, optimizer, *batch) -> loss``."""
    loss_of_batch = loss_of(step)

    def train_step(model: Any, optimizer: Any, *batch: Any) -> Any:
        loss, gradients = jaxrec.value_and_grad(lambda model: loss_of_batch(model, *batch))(model)
        optimizer.update(model, gradients)
        return loss

    return train_step


def loss_of(step: Step) -> Callable[..., Any]:
    """Return the loss of a step: a function of the model and of a batch."""
    return _click_loss if isinstance(step, ClickStep) else functools.partial(_sequence_loss, step)


def batch_of(step: Step, seed: int) -> tuple[Any, ...]:
    """Draw a batch on the host: the arguments of the loss behind the model."""
    if isinstance(step, ClickStep):
        dense, ids, labels = step.draw(seed)
        keys = [f"f{i}" for i in range(len(step.bags))]
        lengths = np.repeat(np.array(step.bags, np.int32), step.batch)
        return dense, jaxrec.KeyedJaggedArray.from_lengths(keys, ids, lengths), labels
    # All negatives are in the bag of the first sample.
    lengths = np.full((len(SEQUENCE_FEATURES), step.batch), step.length, np.int32)
    lengths[2] = 0
    lengths[2, 0] = step.negatives
    ids = np.concatenate(step.draw(seed))
    return (jaxrec.KeyedJaggedArray.from_lengths(SEQUENCE_FEATURES, ids, lengths.reshape(-1)),)


def make_click(step: ClickStep, rngs: nnx.Rngs) -> StepModel:
    """Make a `jaxrec.nn.DLRM` or `jaxrec.nn.DLRM_DCN`."""
    tables = jaxrec.EmbeddingBagCollection(
        [
            jaxrec.EmbeddingBagConfig(f"t{i}", rows, step.dim, feature_names=(f"f{i}",))
            for i, rows in enumerate(step.rows)
        ],
        optimizer=jaxrec.optim.rowwise_adagrad(0.01),
        rngs=rngs,
    )
    options: dict[str, Any] = {
        "num_dense": NUM_DENSE,
        "bottom_layer_sizes": step.bottom,
        "top_layer_sizes": step.top,
        "rngs": rngs,
    }
    cross: list[tuple[nnx.Param, bool]] = []
    if step.cross_layers:
        model: jaxrec.nn.DLRM = jaxrec.nn.DLRM_DCN(
            tables, dcn_num_layers=step.cross_layers, dcn_low_rank_dim=step.cross_rank, **options
        )
        net: Any = model.interaction
        cross = [(layer.kernel, True) for layer in (*net.crossnet.up, *net.crossnet.down)]
        cross += [(layer.bias, False) for layer in net.crossnet.up]
    else:
        model = jaxrec.nn.DLRM(tables, **options)

    parameters = [*_linear(*model.bottom.layers), *cross, *_linear(*model.top.layers)]
    # PyTorch's sums of squares begin at zero, optax's at 0.1 unless told otherwise.
    optimizer = jaxrec.Optimizer(model, optax.adagrad(0.01))
    return StepModel(model, optimizer, tables, parameters)


def make_sequence(step: SequenceStep, rngs: nnx.Rngs) -> StepModel:
    """Make a `jaxrec.nn.SASRec`."""
    table = jaxrec.EmbeddingConfig("item", step.items, step.dim, feature_names=SEQUENCE_FEATURES)
    items = jaxrec.EmbeddingCollection(
        [table], optimizer=jaxrec.optim.rowwise_adagrad(0.01), rngs=rngs
    )
    model = jaxrec.nn.SASRec(
        items,
        num_heads=step.heads,
        max_length=step.length,
        num_blocks=step.blocks,
        dropout_rate=0.0,
        rngs=rngs,
    )

    parameters: list[tuple[nnx.Param, bool]] = [(model.positions.vectors, False)]
    for each in model.blocks:
        block: Any = each
        attention = block.attention
        layers = attention.query, attention.key, attention.value, attention.out
        parameters += [*_linear(*layers), *_norm(block.attention_norm, block.dense_norm)]
        parameters += _linear(block.hidden, block.out)
    parameters += _norm(model.norm)
    optimizer = jaxrec.Optimizer(model, optax.adam(1e-3))
    return StepModel(model, optimizer, items, parameters)


def _click_loss(model: Any, dense: Any, features: Any, labels: Any) -> Any:
    """Return the mean cross-entropy of clicks."""
    return optax.sigmoid_binary_cross_entropy(model(dense, features), labels).mean()


def _sequence_loss(step: SequenceStep, model: Any, features: Any) -> Any:
    """Return the mean cross-entropy of the next items among the sampled ones."""
    out = model(features)
    # Behind its items a feature may have padding.
    counts = (step.batch * step.length,) * 2 + (step.negatives,)
    states, positives, negatives = (
        out[name].values[:count] for name, count in zip(SEQUENCE_FEATURES, counts, strict=True)
    )
    _, positive_ids, negative_ids = (
        features[name].values[:count] for name, count in zip(SEQUENCE_FEATURES, counts, strict=True)
    )
    losses = jaxrec.nn.sampled_softmax_loss(
        states, positives, negatives, positive_ids=positive_ids, negative_ids=negative_ids
    )
    return losses.mean()


def _linear(*layers: Any) -> list[tuple[nnx.Param, bool]]:
    return [pair for each in layers for pair in ((each.kernel, True), (each.bias, False))]


def _norm(*layers: Any) -> list[tuple[nnx.Param, bool]]:
    return [pair for each in layers for pair in ((each.scale, False), (each.bias, False))]
