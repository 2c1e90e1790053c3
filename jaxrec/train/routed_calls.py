"""Calls of a function for batches over a mesh, each of which also routes the next batch."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import jax
from flax import nnx
from jaxtyping import Array

from jaxrec.embed.taps import Ahead
from jaxrec.mesh.agree import on_every_device, on_host
from jaxrec.mesh.ahead import route_ahead, use_routes
from jaxrec.mesh.call_checks import batch_facts, check_call, table_facts
from jaxrec.mesh.capacity import Capacities, GroupPath, measure_demand
from jaxrec.mesh.store import mesh_stores

# Number of calls after which the oldest measured demand is read.
MAX_UNREAD = 2

RoutesAhead: TypeAlias = dict[str, list[Ahead]]
"""Routes of each collection's calls, by collection path."""


class RoutedCalls:
    """A compiled function of a model, a carry and a batch, with the next batch routed ahead.

    The model does not change. `jaxrec.train.RoutedSteps` is the same for training steps.

    Args:
        graph: Graph of the model (``nnx.split(model)[0]``).
        function: ``function(model, carry, batch)`` returns the new carry and a result.
        forward: ``forward(model, batch)`` makes all lookups of the function, in the same order.
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
        """Call the function for each batch.

        Args:
            model: A model of the graph. With ``is_ahead`` the capacities of its exchanges change.
            carry: The first carry.
            batches: Batches on the devices.
            is_ahead: Whether batches are routed ahead, for models over a mesh; the iterator of the
                batches is then one batch ahead of the calls.

        Yields:
            The carry and the result of each call, which the devices may still compute.
        """
        batches = iter(batches)
        _, state = nnx.split(model)
        if not is_ahead:
            for batch in batches:
                self._check(model, batch)
                carry, result = self._alone(state, carry, batch)
                yield carry, result
            return
        batch = next(batches, None)
        if batch is None:
            return
        # Where the carry lies after the first call: the second one compiles no other program.
        mesh = next(iter(mesh_stores(model).values())).mesh
        carry = jax.tree.map(lambda array: on_every_device(array, mesh), carry)
        capacities = Capacities(model)
        routes = self._route_now(state, batch)
        unread: collections.deque[dict[GroupPath, Array]] = collections.deque()
        for following in itertools.chain(batches, (None,)):
            # The last call routes its own batch again.
            next_batch = batch if following is None else following
            self._check(model, batch, next_batch)
            carry, result, routes, demand = self._routed(state, carry, routes, batch, next_batch)
            yield carry, result
            if following is None:
                return
            batch = following
            unread.append(demand)
            if len(unread) > MAX_UNREAD and capacities.observe(
                jax.tree.map(on_host, unread.popleft())
            ):
                _, state = nnx.split(model)
                routes = self._route_now(state, batch)

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
