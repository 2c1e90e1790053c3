"""Gradients of a model with tables: dense ones as usual, those of tables as rows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxrec.embed.taps import Tap, attach, detach, probe_activations, tapped_modules
from jaxrec.embed.update import RowGradients, row_gradients


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gradients:
    """What `value_and_grad` returns and `jaxrec.Optimizer.update` takes.

    Attributes:
        dense: Gradients of the parameters, as `nnx.grad` gives them.
        tables: For each collection, by its path in the model, and for each of its calls the
            gradients of each group's rows. Nothing in here has the shape of a table.
    """

    dense: nnx.State
    tables: dict[str, list[dict[str, RowGradients]]]


def value_and_grad(
    loss: Callable[..., Any], *, has_aux: bool = False, wrt: Any = nnx.Param
) -> Callable[..., tuple[Any, Gradients]]:
    """Like `nnx.value_and_grad`, for models that look up embeddings.

    The loss function may call any number of collections any number of times, also under
    `nnx.remat`. It is traced twice (the first time for shapes alone) and evaluated once.

    Args:
        loss: Function of the model and any further arguments that returns a scalar, or with
            ``has_aux`` a pair of a scalar and anything.
        has_aux: Whether ``loss`` returns such a pair.
        wrt: Filter of the variables to differentiate with respect to; tables always are, without
            being among them.

    Returns:
        A function of the same arguments that returns the value of ``loss`` and the `Gradients`.

    Example:
        >>> import jax, jaxrec
        >>> from flax import nnx
        >>> config = jaxrec.EmbeddingBagConfig("user", num_embeddings=3, embedding_dim=2)
        >>> model = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
        >>> batch = jaxrec.KeyedJaggedArray.from_lists({"user": [[1], [2]]})
        >>> loss, gradients = value_and_grad(lambda model: model(batch).values.sum())(model)
        >>> gradients.tables[""][0]["float32_2"].values.tolist()
        [[1.0, 1.0], [1.0, 1.0]]
    """

    @functools.wraps(loss)
    def evaluate(model: nnx.Module, *args: Any, **kwargs: Any) -> tuple[Any, Gradients]:
        def bound(model: nnx.Module, *args: Any) -> Any:
            return loss(model, *args, **kwargs)

        attach(model, probe_activations(bound, model, args))
        try:
            value, gradients = nnx.value_and_grad(
                bound, argnums=nnx.DiffState(0, nnx.Any(wrt, Tap)), has_aux=has_aux
            )(model, *args)
            taps, dense = nnx.split_state(gradients, Tap, ...)
            tables = _table_gradients(model, taps)
        finally:
            detach(model)
        tables = after(value[0] if has_aux else value, tables)
        return value, Gradients(dense, tables)

    return evaluate


def _table_gradients(
    model: nnx.Module, taps: nnx.State
) -> dict[str, list[dict[str, RowGradients]]]:
    by_path: dict[str, dict[Any, Any]] = {}
    for (*parents, _, call), tap in nnx.to_flat_state(taps):
        by_path.setdefault("/".join(map(str, parents)), {})[call] = tap.get_value()
    tables = {}
    for path, collection in tapped_modules(model).items():
        arrays = collection.tables.get_value()
        if calls := [
            row_gradients(arrays, residuals.get_value(), by_path[path][call])
            for call, residuals in enumerate(collection.residuals)
        ]:
            tables[path] = calls
    return tables


# A NaN that no arithmetic produces.
_NO_LOSS = 0x7FEDCBA9


def after(
    loss: Float[Array, ""], tables: dict[str, list[dict[str, RowGradients]]]
) -> dict[str, list[dict[str, RowGradients]]]:
    """Makes the gradients of rows depend on the loss.

    A table must not be written before all lookups have read it, or XLA reads from a copy of it. In
    a model whose gradient does not depend on what was looked up nothing else says so, and XLA
    removes an `optimization_barrier` before it decides.
    """
    is_loss = jax.lax.bitcast_convert_type(loss.astype(jnp.float32), jnp.uint32) != _NO_LOSS

    def tie(gradient: RowGradients) -> RowGradients:
        def tied(rows: Array) -> Array:
            return jnp.where(is_loss, rows, -1)

        lookups = dataclasses.replace(gradient.lookups, rows=tied(gradient.lookups.rows))
        route = gradient.route and gradient.route.map_awaited(tied)
        return dataclasses.replace(gradient, lookups=lookups, route=route)

    return _map_rows(tie, tables)


def mean_gradients(parts: Gradients | Sequence[Gradients]) -> Gradients:
    """The gradient of the mean loss of several micro-batches: gradient accumulation.

    Rows keep their own gradients until the update, so that each is updated once a step whatever
    micro-batches it occurs in.

    Args:
        parts: The micro-batches' gradients, as a sequence or stacked along a leading axis (what
            `jax.lax.scan` over micro-batches returns).

    Raises:
        ValueError: If there are none.

    Example:
        >>> import jax, jaxrec
        >>> from flax import nnx
        >>> config = jaxrec.EmbeddingBagConfig("user", num_embeddings=3, embedding_dim=1)
        >>> model = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
        >>> def gradient(ids):
        ...     batch = jaxrec.KeyedJaggedArray.from_lists({"user": ids})
        ...     return value_and_grad(lambda model: model(batch).values.sum())(model)[1]
        >>> both = mean_gradients([gradient([[1]]), gradient([[2]])])
        >>> [rows["float32_1"].values.tolist() for rows in both.tables[""]]
        [[[0.5]], [[0.5]]]
    """
    if isinstance(parts, Gradients):
        stacked, count = parts, jax.tree.leaves(parts)[0].shape[0]
        parts = [jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(count)]
    if not parts:
        raise ValueError("the mean of no gradients: give at least one micro-batch's")
    dense = jax.tree.map(lambda *xs: sum(xs) / len(xs), *(part.dense for part in parts))

    def share(gradient: RowGradients) -> RowGradients:
        return dataclasses.replace(gradient, values=gradient.values / len(parts))

    calls = {
        path: [call for part in parts for call in part.tables[path]] for path in parts[0].tables
    }
    return Gradients(dense, _map_rows(share, calls))


def _map_rows(
    function: Callable[[RowGradients], RowGradients],
    tables: dict[str, list[dict[str, RowGradients]]],
) -> dict[str, list[dict[str, RowGradients]]]:
    return jax.tree.map(function, tables, is_leaf=lambda x: isinstance(x, RowGradients))
