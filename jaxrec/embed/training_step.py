"""Differentiation of models with tables. Begin here: comments follow one training step."""

# One training step, from the loss to the rows
#
# A table may have a billion rows, and a batch reads a few thousand of them. If the table were a
# parameter, JAX would return its gradient as an array of the table's shape, nearly all zeros, and
# optax would walk over all of it at every step. So tables are not parameters. They live in a
# `TableVariable`, which is not an `nnx.Param`: optax, weight decay, clipping and averages of
# parameters never see them. How does their gradient leave the loss, then? Follow one step.
#
# 1. Probe (`taps.probe_calls`). We trace the loss once for shapes alone, and each collection notes
#    the shape of the embeddings of every call. Only the loss knows how often it calls a collection:
#    twice, or not at all. Nothing is computed here.
#
# 2. Tap (`taps.tapped`, `TappedModule.lookup`). Each of these calls gets a *tap*: zeros of the
#    shape that the probe noted, which the call adds to the embeddings that it looked up. A zero
#    changes no number, and the gradient with respect to the tap is the gradient with respect to
#    the embeddings. So we call `nnx.value_and_grad` over parameters and taps, and it never
#    differentiates a table.
#
#    We tried three shorter ways, and none works:
#
#    * A table as a `jax.Ref` that a backward rule changes. If no differentiated input reaches the
#      rule, the rule does not run and the table is silently not trained. A table that is looked up
#      twice is updated twice. And the program cannot be exported.
#    * A backward rule that returns the new table as the cotangent. JAX adds the cotangents of two
#      lookups of one table, and so adds two tables.
#    * A sparse cotangent. JAX rejects it: a cotangent has the type of its primal, a whole table.
#
# 3. Residuals. A lookup also returns what its update will need: the row of each id, the id's bag
#    and its factor. They leave the loss in an `nnx.Variable`, because Flax carries variables out of
#    `nnx.remat` and `nnx.jit`. `jax.lax.scan`, `jax.vmap` and the like do not. A lookup in one of
#    those would be a table that never learns, in a model whose loss falls anyway, so it is an error
#    (`taps.Differentiation`).
#
# 4. Cotangents become gradients of rows (`_table_gradients`, then `row_gradients`). The gradient of
#    a tap is that of the bags, ``[bags, dim]``, and the residuals say which rows each bag read. We
#    do not add anything up yet: a row must be updated once a step, whatever number of ids,
#    features, calls and micro-batches it occurs in. With Adagrad, the update by a sum of two
#    gradients differs from two updates by one gradient each.
#
# 5. `Gradients` carries both kinds of gradients to the optimizer. It is a pytree, so that it
#    crosses `jax.jit` and `jax.lax.scan`. But people do arithmetic on pytrees of gradients, and row
#    indices are among the leaves: ``jax.tree.map(lambda g: 2 * g, ...)`` would double them, and the
#    update would change other rows. So they are sealed, and arithmetic on them is an error
#    (`gradients.seal`).
#
#    The gradients of rows are also made to depend on the loss (`gradients.tie_to`). A loss that is
#    linear in the embeddings has a gradient that does not depend on them, and then XLA may write
#    the table before the lookup reads it, which costs a copy of the whole table.
#
# 6. Update (`optimizer`, then `Tables.update`). optax takes the gradients of parameters. Each
#    collection's store takes those of its rows. It sorts the lookups of all calls by row and adds
#    up the gradients of each row. One kernel then reads each row with its state, applies the row
#    optimizer, and writes the row once, in place if the model was donated. The cost grows with the
#    ids of the batch, not with the table.
#
#    If the loss or a gradient is not finite, every row index becomes the index of padding, and
#    nothing is written. The usual `jnp.where(is_finite, new, old)` would need both tables in
#    memory.
#
# The compiled step has no copy of a table's shape, and a table's memory stays where it was:
# tests/embed/test_compiled.py checks both.

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool

from jaxrec.embed.gradients import Calls, Gradients, tie_to
from jaxrec.embed.stash import restore_residuals
from jaxrec.embed.taps import (
    Tap,
    ahead_reads,
    can_change,
    differentiating,
    lost_gradient,
    probe_calls,
    tapped,
    tapped_modules,
)
from jaxrec.embed.variables import is_variable

Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")


def value_and_grad(
    loss: Callable[Arguments, Value], *, has_aux: bool = False, wrt: Any = nnx.Param
) -> Callable[Arguments, tuple[Value, Gradients]]:
    """Differentiate a loss like `nnx.value_and_grad`, for models that look up embeddings.

    The loss may call any number of collections any number of times, also under `nnx.remat` and
    `nnx.jit`. It is traced twice (the first time for shapes alone) and evaluated once. A table that
    the loss reads whole (`collection.table`) gets a dense gradient, and the step updates all of
    its rows.

    If the loss is not finite, the other variables that it changed, such as the statistics of a
    BatchNorm, keep their old values.

    Args:
        loss: Function of the model and any further arguments that returns a scalar, or with
            ``has_aux`` a pair of a scalar and anything.
        has_aux: Whether ``loss`` returns such a pair.
        wrt: Filter of the dense variables to differentiate with respect to. Tables always get
            gradients, whatever the filter.

    Returns:
        A function of the same arguments that returns the value of ``loss`` and the `Gradients`. It
        may be called inside `jax.lax.scan` and the like with a model from outside, if the loss
        changes no variable of the model.

    Raises:
        TypeError: The first argument is not a model; the loss reads a whole table over a mesh, or
            one whose gradient takes more than a GiB.
        RuntimeError: The loss looks embeddings up inside `jax.lax.scan`, `jax.vmap` and the like;
            or it changes a variable of a model from outside of such a transformation.

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

    function = cast(Callable[..., Any], loss)

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
                value = function(model, *args, **kwargs)
                for is_read in ahead_reads(model):
                    if has_aux:
                        value = _wait(value[0], is_read), value[1]
                    else:
                        value = _wait(value, is_read)
                return value

            # Numbers in the comments are those of the steps at the top of this file.
            own = _of_this_trace(model)
            before = _values(own)
            with tapped(own, probe_calls(bound, own, args)):  # 1 and 2
                value, gradients = nnx.value_and_grad(
                    bound, argnums=nnx.DiffState(0, nnx.Any(wrt, Tap)), has_aux=has_aux
                )(own, *args)
                taps, dense = nnx.split_state(gradients, Tap, ...)
                taps, dense = _await_dense(own, taps, dense)
                tables = _table_gradients(own, taps)  # 3 and 4
        scalar = value[0] if has_aux else value
        is_finite = jnp.isfinite(scalar)
        # The optimizer skips parameters and rows, but it never sees the variables that the loss
        # itself writes. A NaN in a BatchNorm's statistics would spoil every later step.
        _keep_finite(before, is_finite)
        if own is not model:
            _require_unchanged(before)
        # `Gradients` needs the tables' layout for norms. It must not carry the tables themselves
        # out of a compiled function.
        stores = {
            path: module.tables.get_value().without_rows
            for path, module in tapped_modules(own).items()
            if path in tables
        }
        # 5; the update, 6, is that of `jaxrec.Optimizer`.
        return value, Gradients.of(dense, tie_to(scalar, tables), stores, is_finite)

    return cast(Callable[Arguments, tuple[Value, Gradients]], evaluate)


@jax.custom_vjp
def _wait(loss: Array, is_read: Bool[Array, ""]) -> Array:
    """Return the loss, whose derivative waits until rows fetched for the next step are here.

    ``is_read`` becomes True then.
    """
    # A compiler that hides a transfer begins it as late as its time allows. No number of this step
    # depends on these rows, and if only the update waits for them, they travel beside the small
    # kernels after the last matrix product. Here the forward pass is left to hide them.
    return loss


def _wait_backward(is_read: Bool[Array, ""], gradient: Array) -> tuple[Array, None]:
    return jnp.where(is_read, gradient, jnp.nan), None


_wait.defvjp(lambda loss, is_read: (loss, is_read), _wait_backward)


def _of_this_trace(model: nnx.Module) -> nnx.Module:
    """Return the model, or a copy if it comes from outside of the current transformation."""
    variables = jax.tree.leaves(nnx.state(model), is_leaf=is_variable)
    if all(can_change(variable) for variable in variables):
        return model
    # The variables of a model from outside of a scan cannot be written, but taps and residuals have
    # to be. A copy made here belongs to the scan's own trace.
    graph, state = nnx.split(model)
    return nnx.merge(graph, state, copy=True)


_Values = list[tuple[nnx.Variable, Any]]


def _values(model: nnx.Module) -> _Values:
    """Return the variables that a loss may change, with their present values."""
    # Without the tables: `_keep_finite` would hold the old and the new one at once.
    stores = {id(module.tables) for module in tapped_modules(model).values()}
    return [
        (variable, variable.get_raw_value())
        for _, variable in nnx.iter_graph(model)
        if is_variable(variable) and id(variable) not in stores
    ]


def _keep_finite(before: _Values, is_finite: Bool[Array, ""]) -> None:
    """Give the variables that the loss changed their old values again if it is not finite."""

    # Only floats go back: counters and random keys are never NaN, and a key that went back would
    # draw the same dropout mask again.
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
    """Raise a RuntimeError if the loss changed a variable, since the change would be lost."""
    for variable, old in before:
        if variable.get_raw_value() is not old:
            raise RuntimeError(
                f"the loss changes a {type(variable).__name__} of a model that comes from outside "
                "of jax.lax.scan, jax.jit or another transformation, and the change would be "
                "lost. Pass the model through the transformation: with nnx.scan, nnx.jit, or its "
                "nnx.state as a carry"
            )


def _await_dense(
    model: nnx.Module, taps: nnx.State, dense: nnx.State
) -> tuple[nnx.State, nnx.State]:
    """Make stashed residuals wait for the gradients of the dense part; return those gradients."""
    modules = tapped_modules(model).values()
    variables = [each for module in modules if module.stash for each in module.residuals]
    if not variables:
        return taps, dense
    # Without the barrier, XLA would compute residuals once, and copy them back early. And without
    # the parameters' gradients in it, XLA's scheduler for GPUs would compute these beside the
    # copies or the exchange of ids, and hold the activations of all layers until then.
    values = [_residuals(variable) for variable in variables]
    values, taps, dense = jax.lax.optimization_barrier((values, taps, dense))
    for variable, value in zip(variables, values, strict=True):
        variable.set_value(value)
    return taps, dense


def _table_gradients(model: nnx.Module, taps: nnx.State) -> dict[str, Calls]:
    """Return the gradients of rows by the collection's path, one entry for each call.

    ``taps`` are the gradients of the taps.
    """
    # The path of a tap ends in the attribute and the call: ("ranker", "embeddings", "taps", 0).
    cotangents: dict[str, dict[Any, Any]] = {}
    for (*parents, kind, call), tap in nnx.to_flat_state(taps):
        cotangents.setdefault("/".join(map(str, parents)), {})[kind, call] = tap.get_value()
    tables = {}
    for path, module in tapped_modules(model).items():
        store, own = module.tables.get_value(), cotangents.get(path, {})
        calls = [
            store.row_gradients(restore_residuals(_residuals(variable), store), own["taps", call])
            for call, variable in enumerate(module.residuals)
        ]
        # A table that was read whole joins as one more call, which looked all of its rows up.
        calls += [
            store.dense_gradients(name, own["table_taps", name]) for name in module.table_taps
        ]
        if calls:
            tables[path] = calls
    return tables


def _residuals(variable: nnx.Variable) -> Any:
    """Return the residuals of a call; raise if the call has not written them."""
    residuals = variable.get_value()
    # The probe saw this call, but its residuals never arrived: say, the lookup ran on a copy of the
    # model.
    if residuals is None:
        raise lost_gradient()
    return residuals
