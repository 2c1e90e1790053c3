"""Steps over a mesh that route the next batch, or fetch its rows."""

from __future__ import annotations

import collections
import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import jax
from flax import nnx
from jaxtyping import Array

from jaxrec.data.pipeline import each_batch
from jaxrec.embed.collection import TableVariable
from jaxrec.embed.taps import Ahead
from jaxrec.mesh.agree import on_host
from jaxrec.mesh.ahead import (
    AheadCalls,
    Capacities,
    GroupPath,
    changes_ids,
    fetch_ahead,
    measure_demand,
    refetch_ahead,
    route_ahead,
    use_ahead,
)
from jaxrec.mesh.store import mesh_stores
from jaxrec.tier.planning.tier import tier_of
from jaxrec.train.step import CompiledCall, check_step, compile_step

# Number of calls after which the oldest measured demand is read.
_MAX_UNREAD = 2


def route_in_turn(
    batches: Iterable[Any],
    call: Callable[[Any, Any], tuple[Any, dict[GroupPath, Array]]],
    route: Callable[[Any], None],
    capacities: Capacities,
) -> Iterator[tuple[Any, Any]]:
    """Yield each batch with the result of ``call(batch, next batch)``, which routes the next batch.

    ``call`` returns its result and the demand of the batch that it routed; ``route`` routes a batch
    by itself where no call could. The demands choose the capacities of the exchanges.
    """
    batches = iter(batches)
    batch = next(batches)
    unread: collections.deque[dict[GroupPath, Array]] = collections.deque()
    for following in itertools.chain(batches, (None,)):
        # The last call routes its own batch again, and so does one before a batch of another shape:
        # a program for each pair of shapes would compile too often.
        is_alike = following is not None and _shape(following) == _shape(batch)
        result, demand = call(batch, following if is_alike else batch)
        yield batch, result
        if following is None:
            return
        # Before the next call, so that this loop keeps no arrays of the batch that is done.
        batch = following
        unread.append(demand)
        # To read a demand is to wait for its call, so it is read when the call is likely over.
        is_changed = len(unread) > _MAX_UNREAD and capacities.observe(
            jax.tree.map(on_host, unread.popleft())
        )
        # Routes of other capacities, or of another batch, do not fit the next call.
        if is_changed or not is_alike:
            route(batch)


class RoutedSteps:
    """Training steps over a mesh, each of which also routes the next batch.

    A step's program sends the ids of the next batch to the owners of their rows, so that the
    compiler can overlap this exchange with the computation. (TorchRec's
    ``TrainPipelineSparseDist``.) The measured demand of the batches chooses the capacities of the
    exchange (`jaxrec.mesh.ahead`). Results are bit for bit those without routing ahead. On one
    device nothing is routed, and the steps are those of `jaxrec.train.compile_step`.

    Args:
        step: Function ``step(*modules, batch)``, as for `jaxrec.train.compile_step`.
        forward: Function ``forward(model, batch)`` that makes all lookups of ``step``, in the same
            order.
        *modules: The model, its optimizer and all other modules that ``step`` changes. Their arrays
            are donated.
        fetch_ahead: Whether a step also fetches the next batch's rows from other devices before its
            update, so that the compiler can overlap this exchange, too. Rows that the update writes
            are fetched again after it. (TorchRec calls this PEC.) The step may change tables by
            `jaxrec.Optimizer` alone. Steps then run two batches behind ``batches``. True has no
            effect on one device, for models with ``changes_ids = True``, and for those of
            `jaxrec.tier.make`.

    Raises:
        TypeError: An argument has another type.

    Example:
        >>> import jax.numpy as jnp, jaxrec, optax
        >>> from flax import nnx
        >>> model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
        >>> optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))
        >>> def train_step(model, optimizer, x):
        ...     loss, gradients = jaxrec.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        ...     optimizer.update(model, gradients)
        ...     return loss
        >>> steps = RoutedSteps(train_step, lambda model, x: model(x), model, optimizer)
        >>> losses = [float(loss) for _, loss in steps([jnp.ones((1, 1))] * 20)]
        >>> losses[-1] < 0.1 * losses[0]
        True
    """

    def __init__(
        self,
        step: Callable[..., Any],
        forward: Callable[[Any, Any], Any],
        *modules: Any,
        fetch_ahead: bool = False,
    ) -> None:
        check_step(step, modules)
        if not callable(forward) or isinstance(forward, nnx.Pytree):
            raise TypeError(
                "forward must be a function forward(model, batch), such as lambda model, batch: "
                f"model(batch), got a {type(forward).__name__}"
            )
        if not isinstance(modules[0], nnx.Module) or isinstance(modules[0], nnx.Optimizer):
            raise TypeError(
                f"the first module must be the model, got a {type(modules[0]).__name__}"
            )
        self._step, self._forward = step, forward
        self._model = modules[0]
        self._ahead: nnx.Variable[Any] = nnx.Variable(None)
        self._capacities = Capacities(self._model)
        self._fetching: _FetchingSteps | None = None
        # Ids that calls change are not known two steps ahead. A tier writes rows between two steps,
        # so that all rows would be fetched again.
        is_known = not changes_ids(self._model) and tier_of(self._model) is None
        if fetch_ahead and mesh_stores(self._model) and is_known:
            self._fetching = _FetchingSteps(step, forward, *modules)
        # Which of the two programs is needed shows only with the first batch; neither is compiled
        # before.
        self._alone = compile_step(step, *modules)
        self._routed = compile_step(self._step_and_route, *modules, self._ahead)
        self._route_now = CompiledCall(self._route_in_step)

    def __call__(self, batches: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Dispatch a step for each batch.

        Args:
            batches: Batches on the devices. The steps run one batch behind this iterator, with
                ``fetch_ahead`` two.

        Yields:
            Each batch and the result of its step, which the devices may still compute.

        Raises:
            TypeError: ``batches`` is a single batch.
        """
        batches = each_batch(batches)
        batch = next(batches, None)
        if batch is None:
            return
        if self._fetching is not None:
            yield from self._fetching.of_batches(itertools.chain((batch,), batches))
            return
        self._route_anew(batch)
        batches = itertools.chain((batch,), batches)
        del batch  # so that its arrays are freed once the loop is past them
        if not jax.tree.leaves(self._ahead.get_value()):
            yield from ((each, self._alone(each)) for each in batches)
            return
        yield from route_in_turn(batches, self._run, self._route_anew, self._capacities)

    def _run(self, batch: Any, following: Any) -> tuple[Any, dict[GroupPath, Array]]:
        """Dispatch a step that routes the following batch."""
        # Between two steps a user may have changed what ids follow from, say by
        # `PrunedEmbeddings.prune`, after the batch was routed.
        inputs = (reference() for reference in self._inputs)
        if not all(map(operator.is_, inputs, self._read_inputs())):
            self._route(batch)
        result = self._routed(batch, following)
        self._note_inputs()
        return result

    def _route_anew(self, batch: Any) -> None:
        self._route(batch)
        self._note_inputs()

    def _note_inputs(self) -> None:
        # Weak: an old table must not stay in memory beside the one that a user loads.
        self._inputs = list(map(weakref.ref, self._read_inputs()))

    def _read_inputs(self) -> list[Array]:
        """Return the model's arrays that a batch's `Ahead` may follow from."""
        variables = self._routed.model_variables
        values = [each.get_raw_value() for each in variables if self._is_input(each)]
        return [leaf for leaf in jax.tree.leaves(values) if isinstance(leaf, jax.Array)]

    def _is_input(self, variable: nnx.Variable) -> bool:
        # Routes follow from ids alone.
        return not isinstance(variable, TableVariable)

    def _route(self, batch: Any) -> None:
        """Route a batch outside of a step."""
        self._ahead.set_value(self._route_now(self._model, batch))

    def _step_and_route(self, *args: Any) -> tuple[Any, dict[GroupPath, Array]]:
        *modules, ahead, batch, following = args
        model = modules[0]
        with use_ahead(model, ahead.get_value()):
            result = self._step(*modules, batch)
        routes = self._route_in_step(model, following)
        ahead.set_value(routes)
        return result, measure_demand(routes)

    def _route_in_step(self, model: nnx.Module, batch: Any) -> AheadCalls:
        return route_ahead(lambda model: self._forward(model, batch), model)


Pair: TypeAlias = tuple[Any, Any]
"""A batch, and the batch that follows it."""


def pairs_of(batches: Iterable[Any]) -> Iterator[Pair]:
    """Yield each batch with the next one; the last batch is its own next one."""
    batches = iter(batches)
    batch = next(batches)
    for following in itertools.chain(batches, (None,)):
        yield batch, batch if following is None else following
        batch = following


def alike_pairs_of(batches: Iterable[Any]) -> Iterator[Pair]:
    """Yield pairs as `pairs_of`, but a batch before one of another shape is its own next one."""
    # Then few programs compile, as in `route_in_turn`, which routes the pair after this one anew.
    for batch, following in pairs_of(batches):
        yield batch, following if _shape(following) == _shape(batch) else batch


class PairSteps(RoutedSteps):
    """Steps on pairs of batches that look up or fetch rows of the second batch.

    Each step routes the second batch of the next pair, unless calls change the ids that are looked
    up. The last of ``modules`` is a variable with the `Ahead` of the first batch.
    """

    def __init__(self, step: Any, forward: Any, *modules: Any) -> None:
        super().__init__(step, forward, *modules)
        self._first = modules[-1]
        self._is_routed = bool(mesh_stores(self._model)) and not changes_ids(self._model)

    def _route(self, batch: Pair) -> None:
        """Route both batches of a pair, since capacities may have changed since the last step."""
        if not self._is_routed:
            self._ahead.set_value(None)
            return
        # `_forward` reads the second batch of a pair, so that the first is passed as the second
        # here.
        super()._route((batch[0], batch[0]))
        self._first.set_value(self._ahead_of_first(batch[0], self._ahead.get_value()))
        super()._route(batch)

    def _ahead_of_first(self, batch: Any, routes: AheadCalls) -> AheadCalls:
        """Return the `Ahead` of a pair's first batch, given its new routes."""
        # Its embeddings stay valid: only the routes that carry its gradients back are new.
        embeddings: AheadCalls = self._first.get_value()
        return {
            path: [
                Ahead(route.routes, call.activations)
                for route, call in zip(routes[path], calls, strict=True)
            ]
            for path, calls in embeddings.items()
        }


class _FetchingSteps(PairSteps):
    """Steps of `RoutedSteps` with ``fetch_ahead``."""

    # Step n reads the rows of batch n + 1, runs the user's step on batch n, and reads those rows
    # again that it wrote. It also routes batch n + 2, since rows can be read only along a route.

    def __init__(self, step: Any, forward: Any, *modules: Any) -> None:
        @functools.wraps(step)
        def step_of_pair(*args: Any) -> Any:
            *modules, _, pair = args
            return step(*modules, pair[0])

        super().__init__(
            step_of_pair, lambda model, pair: forward(model, pair[1]), *modules, nnx.Variable(None)
        )
        self._fetch_now = CompiledCall(
            lambda model, routes, pair: self._fetch(model, routes, routes, pair)[0]
        )

    def of_batches(self, batches: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Dispatch a step for each batch; yield the batch and the step's result."""
        for (batch, _), result in self(alike_pairs_of(batches)):
            yield batch, result

    def _is_input(self, variable: nnx.Variable) -> bool:
        # A user may have loaded a table, and the rows that came ahead are not the model's any more.
        return True

    def _ahead_of_first(self, batch: Any, routes: AheadCalls) -> AheadCalls:
        return self._fetch_now(self._model, routes, (batch, batch))

    def _fetch(
        self, model: nnx.Module, routes: AheadCalls, waiting: AheadCalls, pair: Pair
    ) -> tuple[AheadCalls, AheadCalls, Any]:
        return fetch_ahead(lambda model: self._forward(model, pair), model, routes, waiting)

    def _step_and_route(self, *args: Any) -> tuple[Any, dict[GroupPath, Array]]:
        *modules, first, ahead, pair, following = args
        model = modules[0]
        fetched, routes, is_read = self._fetch(model, ahead.get_value(), first.get_value(), pair)
        with use_ahead(model, routes, is_read):
            result = self._step(*modules, first, pair)
        fetched = refetch_ahead(lambda model: self._forward(model, pair), model, fetched, routes)
        first.set_value(fetched)
        later = self._route_in_step(model, following)
        ahead.set_value(later)
        return result, measure_demand(fetched) | measure_demand(later)


def _shape(batch: Any) -> tuple[Any, list[Any]]:
    """Return the structure of a batch, and the shapes and types of its arrays."""
    leaves, tree = jax.tree.flatten(batch)
    return tree, list(map(jax.typeof, leaves))
