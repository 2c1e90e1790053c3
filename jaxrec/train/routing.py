"""Steps and other calls over a mesh that route the next batch."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import jax
from flax import nnx
from jaxtyping import Array

from jaxrec.data.pipeline import each_batch
from jaxrec.embed.taps import Ahead
from jaxrec.mesh.agree import on_every_device, on_host
from jaxrec.mesh.ahead import (
    Capacities,
    GroupPath,
    measure_demand,
    route_ahead,
    use_ahead,
    use_routes,
)
from jaxrec.mesh.call_checks import batch_facts, check_call, table_facts
from jaxrec.mesh.store import mesh_stores
from jaxrec.train.step import check_step, compile_step

RoutesAhead: TypeAlias = dict[str, list[Ahead]]
"""Routes of each collection's calls, by collection path."""

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
        self, step: Callable[..., Any], forward: Callable[[Any, Any], Any], *modules: Any
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
        # Which of the two programs is needed shows only with the first batch; neither is compiled
        # before.
        self._alone = compile_step(step, *modules)
        self._routed = compile_step(self._step_and_route, *modules, self._ahead)
        self._route_now = jax.jit(
            lambda graph, state, batch: self._route_in_step(nnx.merge(graph, state), batch),
            static_argnums=0,
        )

    def __call__(self, batches: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Dispatch a step for each batch.

        Args:
            batches: Batches on the devices. The steps run one batch behind this iterator.

        Yields:
            Each batch and the result of its step, which the devices may still compute.

        Raises:
            TypeError: ``batches`` is a single batch.
        """
        batches = each_batch(batches)
        batch = next(batches, None)
        if batch is None:
            return
        self._route(batch)
        batches = itertools.chain((batch,), batches)
        del batch  # so that its arrays are freed once the loop is past them
        if not jax.tree.leaves(self._ahead.get_value()):
            yield from ((each, self._alone(each)) for each in batches)
            return
        yield from route_in_turn(batches, self._routed, self._route, self._capacities)

    def _route(self, batch: Any) -> None:
        """Route a batch outside of a step."""
        graph, state = nnx.split(self._model)
        self._ahead.set_value(self._route_now(graph, state, batch))

    def _step_and_route(self, *args: Any) -> tuple[Any, dict[GroupPath, Array]]:
        *modules, ahead, batch, following = args
        model = modules[0]
        with use_ahead(model, ahead.get_value()):
            result = self._step(*modules, batch)
        routes = self._route_in_step(model, following)
        ahead.set_value(routes)
        return result, measure_demand(routes)

    def _route_in_step(self, model: nnx.Module, batch: Any) -> RoutesAhead:
        return route_ahead(lambda model: self._forward(model, batch), model)


class RoutedCalls:
    """A compiled function of a model, a carry and a batch, with the next batch routed ahead.

    The model does not change, as in an evaluation, and its arrays are not donated.
    ``function(model, carry, batch)`` returns the new carry and a result; ``forward(model, batch)``
    makes all of its lookups, in the same order.
    """

    def __init__(
        self,
        graph: Any,
        function: Callable[[Any, Any, Any], tuple[Any, Any]],
        forward: Callable[[Any, Any], Any],
    ) -> None:
        self._graph, self._function, self._forward = graph, function, forward
        self._alone = jax.jit(self._call)
        self._routed = jax.jit(self._call_and_route)
        self._route_now = jax.jit(self._route)

    def __call__(
        self, model: nnx.Module, carry: Any, batches: Iterable[Any], *, is_ahead: bool
    ) -> Iterator[tuple[Any, Any]]:
        """Call the function for each batch; yield each call's carry and result.

        ``is_ahead`` is for models over a mesh: the calls then run one batch behind ``batches``, and
        the capacities of the model's exchanges change.
        """
        batches = iter(batches)
        _, state = nnx.split(model)
        if not is_ahead:
            for batch in batches:
                self._check(model, batch)
                carry, result = self._alone(state, carry, batch)
                yield carry, result
            return
        first = next(batches, None)
        if first is None:
            return
        # Where the carry lies after the first call: the second one compiles no other program.
        mesh = next(iter(mesh_stores(model).values())).mesh
        carry = jax.tree.map(lambda array: on_every_device(array, mesh), carry)
        routes: RoutesAhead = {}

        def route(batch: Any) -> None:
            nonlocal state, routes
            _, state = nnx.split(model)
            routes = self._route_now(state, batch)

        def call(batch: Any, following: Any) -> tuple[Any, dict[GroupPath, Array]]:
            nonlocal carry, routes
            self._check(model, batch, following)
            carry, result, routes, demand = self._routed(state, carry, routes, batch, following)
            return (carry, result), demand

        route(first)
        batches = itertools.chain((first,), batches)
        del first
        for _, result in route_in_turn(batches, call, route, Capacities(model)):
            yield result

    def _check(self, model: nnx.Module, *batches: Any) -> None:
        name = getattr(self._function, "__name__", type(self._function).__name__)
        check_call("steps", f"call of {name}", lambda: table_facts(model) | batch_facts(batches))

    def _call(self, state: Any, carry: Any, batch: Any) -> tuple[Any, Any]:
        return self._function(nnx.merge(self._graph, state), carry, batch)

    def _call_and_route(
        self, state: Any, carry: Any, routes: RoutesAhead, batch: Any, following: Any
    ) -> tuple[Any, Any, RoutesAhead, dict[GroupPath, Array]]:
        model = nnx.merge(self._graph, state)
        with use_routes(model, routes):
            carry, result = self._function(model, carry, batch)
        routes = self._route(state, following)
        return carry, result, routes, measure_demand(routes)

    def _route(self, state: Any, batch: Any) -> RoutesAhead:
        model = nnx.merge(self._graph, state)
        return route_ahead(lambda model: self._forward(model, batch), model)


def _shape(batch: Any) -> tuple[Any, list[Any]]:
    """Return the structure of a batch, and the shapes and types of its arrays."""
    leaves, tree = jax.tree.flatten(batch)
    return tree, list(map(jax.typeof, leaves))
