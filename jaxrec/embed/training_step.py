"""A training step: differentiation of models that look embeddings up."""

# One training step, from the loss to the rows
#
# A table may have a billion rows, of which a batch reads some thousands. Were it a parameter, JAX
# would return its gradient as an array of the table's shape, zeros nearly everywhere, and optax
# would walk over all of it at every step. So tables are not parameters. They live in a
# `TableVariable`, which is not an `nnx.Param`: optax, weight decay, clipping and averages of
# parameters never see them. How does their gradient leave the loss, then? Follow one step.
#
# 1. Probe (`taps.probe_calls`). The loss is traced once for shapes alone, and each collection notes
#    the shape of the embeddings of every call. Only the loss knows how often it looks up: it may
#    call a collection twice, or not at all. Nothing is computed here.
#
# 2. Tap (`taps.tapped`, `TappedModule.lookup`). Each of these calls gets a *tap*, zeros of the
#    shape that was noted, and adds it to the embeddings that it looked up. That changes no number,
#    but the gradient with respect to the tap is the gradient with respect to the embeddings.
#    `nnx.value_and_grad` over parameters and taps now gives all that is needed, and differentiates
#    no table.
#
#    Three shorter ways do not work. A table as a `jax.Ref` that a backward rule changes is silently
#    not trained where nothing differentiated reaches the rule, is updated once for each lookup, and
#    cannot be exported. A rule that returns the new table as its cotangent breaks when a table is
#    looked up twice: JAX adds cotangents, and so adds two tables up. Sparse cotangents are
#    rejected: a cotangent has the type of what it belongs to.
#
# 3. Residuals. A lookup also returns what its update will need: the row of each id, its bag and its
#    factor. They leave the loss in an `nnx.Variable`, since Flax carries variables out of
#    `nnx.remat` and `nnx.jit`. `jax.lax.scan`, `jax.vmap` and the like carry nothing out. A lookup
#    in there would be a table that never learns in a model whose loss falls anyway, so it is an
#    error (`taps.Differentiation`).
#
# 4. Cotangents become gradients of rows (`_table_gradients`, then `row_gradients`). The gradient of
#    a tap is that of each bag, ``[bags, dim]``; with the residuals it says what each row gets.
#    Nothing is added up yet. A row must be updated once a step, however many ids, features, calls
#    and micro-batches it occurs in: Adagrad of a sum is not the sum of two Adagrads.
#
# 5. `Gradients` carries both kinds to the optimizer. It is a pytree, so that it crosses `jax.jit`
#    and `jax.lax.scan`, and people do arithmetic on pytrees of gradients. Row indices are among its
#    leaves; doubled along with the gradients, they would update other rows. So they are sealed, and
#    arithmetic on them is an error. The gradients of rows are also tied to the loss
#    (`gradients.tie_to`). Where they do not depend on the embeddings, nothing else tells XLA to
#    read a table before it is written, and it would read from a copy of the whole table.
#
# 6. Update (`optimizer`, then `Tables.update`). optax takes the gradients of parameters. Each
#    collection's store takes those of its rows: the lookups of all calls are sorted by row, the
#    gradients of a row are added up, and one kernel reads each row with its state, applies the row
#    optimizer and writes it once, in place if the model was donated. The cost grows with the ids of
#    the batch and not with the table. Where the loss or a gradient is not finite, every row number
#    becomes that of padding, so that nothing is written. To choose between the old and the new
#    table, XLA would have to hold both.
#
# The compiled step has no copy of a table's shape, and a table's memory stays where it was:
# tests/embed/test_compiled.py holds both.

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool

from jaxrec.embed.gradients import Calls, Gradients, tie_to
from jaxrec.embed.taps import (
    Tap,
    can_change,
    differentiating,
    lost_gradient,
    probe_calls,
    tapped,
    tapped_modules,
)


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

            # The numbers are those of the page above.
            own = _of_this_trace(model)
            before = _values(own)
            with tapped(own, probe_calls(bound, own, args)):  # 1 and 2
                value, gradients = nnx.value_and_grad(
                    bound, argnums=nnx.DiffState(0, nnx.Any(wrt, Tap)), has_aux=has_aux
                )(own, *args)
                taps, dense = nnx.split_state(gradients, Tap, ...)
                tables = _table_gradients(own, taps)  # 3 and 4
        scalar = value[0] if has_aux else value
        is_finite = jnp.isfinite(scalar)
        _keep_finite(before, is_finite)
        if own is not model:
            _require_unchanged(before)
        stores = {
            path: module.tables.get_value().without_rows
            for path, module in tapped_modules(own).items()
            if path in tables
        }
        # 5; the update, 6, is that of `jaxrec.Optimizer`.
        return value, Gradients.of(dense, tie_to(scalar, tables), stores, is_finite)

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


def _values(model: nnx.Module) -> _Values:
    """Return the variables that a loss may change, with their present values."""
    stores = {id(module.tables) for module in tapped_modules(model).values()}
    return [
        (variable, variable.get_raw_value())
        for _, variable in nnx.iter_graph(model)
        if _is_variable(variable) and id(variable) not in stores
    ]


def _keep_finite(before: _Values, is_finite: Bool[Array, ""]) -> None:
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


def _table_gradients(model: nnx.Module, taps: nnx.State) -> dict[str, Calls]:
    """Return the gradients of rows, by path of the collection and call by call."""
    cotangents: dict[str, dict[Any, Any]] = {}
    for (*parents, kind, call), tap in nnx.to_flat_state(taps):
        cotangents.setdefault("/".join(map(str, parents)), {})[kind, call] = tap.get_value()
    tables = {}
    for path, module in tapped_modules(model).items():
        store, own = module.tables.get_value(), cotangents.get(path, {})
        calls = [
            store.row_gradients(_residuals(variable), own["taps", call])
            for call, variable in enumerate(module.residuals)
        ]
        calls += [
            store.dense_gradients(name, own["table_taps", name]) for name in module.table_taps
        ]
        if calls:
            tables[path] = calls
    return tables


def _residuals(variable: nnx.Variable) -> Any:
    residuals = variable.get_value()
    if residuals is None:
        raise lost_gradient()
    return residuals
