"""Calls of a model over a mesh that route the next batch, for evaluations."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array

from jaxrec.mesh.agree import on_every_device
from jaxrec.mesh.ahead import (
    AheadCalls,
    Capacities,
    GroupPath,
    measure_demand,
    route_ahead,
    use_routes,
)
from jaxrec.mesh.call_checks import batch_facts, check_call, table_facts
from jaxrec.mesh.store import mesh_stores
from jaxrec.train.routing import route_in_turn


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
        routes: AheadCalls = {}

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
        self, state: Any, carry: Any, routes: AheadCalls, batch: Any, following: Any
    ) -> tuple[Any, Any, AheadCalls, dict[GroupPath, Array]]:
        model = nnx.merge(self._graph, state)
        with use_routes(model, routes):
            carry, result = self._function(model, carry, batch)
        routes = self._route(state, following)
        return carry, result, routes, measure_demand(routes)

    def _route(self, state: Any, batch: Any) -> AheadCalls:
        model = nnx.merge(self._graph, state)
        return route_ahead(lambda model: self._forward(model, batch), model)
