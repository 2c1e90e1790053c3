"""Differentiation of models that look embeddings up."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool

from jaxrec.embed.differentiation import can_change, differentiating, lost_gradient
from jaxrec.embed.gradients import Gradients, tie_to
from jaxrec.embed.row_gradients import RowGradients
from jaxrec.embed.taps import Tap, attach, detach, probe_calls, tapped_modules


def value_and_grad(
    loss: Callable[..., Any], *, has_aux: bool = False, wrt: Any = nnx.Param
) -> Callable[..., tuple[Any, Gradients]]:
    """Differentiate a loss like `nnx.value_and_grad`, for models that look up embeddings.

    The loss function may call any number of collections any number of times, also under
    `nnx.remat` and `nnx.jit`. It is traced twice (the first time for shapes alone) and evaluated
    once. A table that it reads whole by `collection.table` gets a dense gradient, which joins the
    update: every row of the table then counts as one of the batch.

    Where the loss is not finite, the variables that it changed besides, such as the statistics of
    a BatchNorm, keep the values that they had.

    Args:
        loss: Function of the model and any further arguments that returns a scalar, or with
            ``has_aux`` a pair of a scalar and anything.
        has_aux: Whether ``loss`` returns such a pair.
        wrt: Filter of the variables to differentiate with respect to; tables always are, without
            being among them.

    Returns:
        A function of the same arguments that returns the value of ``loss`` and the `Gradients`. It
        may be called inside `jax.lax.scan` and the like with a model from outside, if the loss
        changes no variable of the model.

    Raises:
        TypeError: The first argument is not a model; the loss reads a whole table over a mesh, or
            one whose gradient takes more than a GiB.
        RuntimeError: The loss looks embeddings up inside `jax.lax.scan`, `jax.vmap` and the like.

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
        if not isinstance(model, nnx.Module):
            raise TypeError(
                "jaxrec.value_and_grad differentiates with respect to the model, the first "
                f"argument of the loss; got {type(model).__name__} there"
            )
        with differentiating() as differentiation:

            def bound(model: nnx.Module, *args: Any) -> Any:
                differentiation.begin()
                return loss(model, *args, **kwargs)

            own = _of_this_trace(model)
            before = _values(own, wrt)
            attach(own, probe_calls(bound, own, args))
            try:
                value, gradients = nnx.value_and_grad(
                    bound, argnums=nnx.DiffState(0, nnx.Any(wrt, Tap)), has_aux=has_aux
                )(own, *args)
                taps, dense = nnx.split_state(gradients, Tap, ...)
                tables = _table_gradients(own, taps)
            finally:
                detach(own)
        scalar = value[0] if has_aux else value
        is_finite = jnp.isfinite(scalar)
        _keep_finite(own, before, is_finite)
        if own is not model:
            _require_unchanged(before)
        stores = {
            path: module.tables.get_value().without_rows
            for path, module in tapped_modules(own).items()
            if path in tables
        }
        tables = tie_to(scalar, tables)
        return value, Gradients.of(dense, tables, stores, is_finite)

    return evaluate


def _of_this_trace(model: nnx.Module) -> nnx.Module:
    """Return the model, or a copy if it comes from outside of a transformation such as a scan."""
    variables = jax.tree.leaves(nnx.state(model), is_leaf=_is_variable)
    if all(can_change(variable) for variable in variables):
        return model
    graph, state = nnx.split(model)
    return nnx.merge(graph, state, copy=True)


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


_Values = list[tuple[nnx.Variable, Any]]


def _values(model: nnx.Module, wrt: Any) -> _Values:
    """Return the variables that a loss may change, with their present values."""
    held = {id(module.tables) for module in tapped_modules(model).values()}
    return [
        (variable, variable.get_raw_value())
        for _, variable in nnx.iter_graph(model)
        if _is_variable(variable) and id(variable) not in held
    ]


def _keep_finite(model: nnx.Module, before: _Values, is_finite: Bool[Array, ""]) -> None:
    """Set changed variables back to the values before where the loss is not finite."""

    def keep(new: Any, old: Any) -> Any:
        is_float = hasattr(new, "dtype") and jnp.issubdtype(new.dtype, jnp.floating)
        same = is_float and getattr(old, "shape", None) == new.shape
        return jnp.where(is_finite, new, old) if same else new

    for variable, old in before:
        new = variable.get_raw_value()
        trees: list[Any] = [jax.tree.structure(new), jax.tree.structure(old)]
        if new is not old and trees[0] == trees[1]:
            variable.set_raw_value(jax.tree.map(keep, new, old))


def _require_unchanged(before: _Values) -> None:
    for variable, old in before:
        if variable.get_raw_value() is not old:
            raise RuntimeError(
                f"the loss changes a {type(variable).__name__} of a model that comes from outside "
                "of jax.lax.scan, jax.jit or another transformation, and the change would be "
                "lost. Pass the model through the transformation: with nnx.scan, nnx.jit, or its "
                "nnx.state as a carry"
            )


def _table_gradients(
    model: nnx.Module, taps: nnx.State
) -> dict[str, list[dict[str, RowGradients]]]:
    """Return the gradients of rows, by path of the collection and call by call."""
    cotangents: dict[str, dict[Any, Any]] = {}
    for (*parents, kind, call), tap in nnx.to_flat_state(taps):
        cotangents.setdefault("/".join(map(str, parents)), {})[kind, call] = tap.get_value()
    tables = {}
    for path, module in tapped_modules(model).items():
        store, found = module.tables.get_value(), cotangents.get(path, {})
        calls = [
            store.row_gradients(_residuals(variable), found["taps", call])
            for call, variable in enumerate(module.residuals)
        ]
        calls += [
            store.dense_gradients(name, found["table_taps", name]) for name in module.table_taps
        ]
        if calls:
            tables[path] = calls
    return tables


def _residuals(variable: nnx.Variable) -> Any:
    residuals = variable.get_value()
    if residuals is None:
        raise lost_gradient()
    return residuals
