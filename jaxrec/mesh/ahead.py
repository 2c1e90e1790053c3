"""Results of a model's lookups that are computed before the step they are part of."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from jaxrec.embed.row_gradients import Routes
from jaxrec.embed.taps import (
    Ahead,
    AheadVariable,
    Probe,
    TappedModule,
    tapped_modules,
    zeros_like,
)
from jaxrec.mesh.store import mesh_stores


@dataclasses.dataclass(eq=False)
class LookupProbe(Probe):
    """Keeps the embeddings of each call.

    Attributes:
        routed: Routes of the calls that were computed before, in order.
        calls: The routes and embeddings of the calls so far.
    """

    routed: Sequence[Ahead] = ()
    calls: list[Ahead] = dataclasses.field(default_factory=list)

    def lookup(self, tables, features, **options):
        routes = _routes_of(self.routed, len(self.calls))
        activations, residuals = tables.lookup(features, routes=routes, **options)
        self.calls.append(Ahead(residuals.routes, activations))
        return activations


@dataclasses.dataclass(eq=False)
class RouteProbe(Probe):
    """Keeps the routes of each call; calls look nothing up and give zeros."""

    calls: list[Ahead] = dataclasses.field(default_factory=list)

    def lookup(self, tables, features, **options):
        self.calls.append(Ahead(tables.route(features)))
        shapes = jax.eval_shape(lambda: tables.lookup(features, **options)[0])
        return jax.tree.map(zeros_like, shapes)


@dataclasses.dataclass(eq=False)
class RoutedProbe(Probe):
    """Looks embeddings up along routes that were computed before.

    Attributes:
        routed: Routes of the calls, in order.
        num_calls: Number of calls so far.
    """

    routed: Sequence[Ahead]
    num_calls: int = 0

    def lookup(self, tables, features, **options):
        routes = _routes_of(self.routed, self.num_calls)
        self.num_calls += 1
        return tables.lookup(features, routes=routes, **options)[0]


def _routes_of(routed: Sequence[Ahead], call: int) -> Routes | None:
    return routed[call].routes if call < len(routed) else None


def look_up_ahead(
    evaluate: Callable[[nnx.Module], Any], model: nnx.Module
) -> dict[str, list[Ahead]]:
    """Return the embeddings of each collection's calls in one evaluation, by collection path.

    The calls take the routes that `use_ahead` gave the model. The model stays as it is. XLA removes
    the rest of the evaluation as dead code.
    """
    return _probe(evaluate, model, lambda module: LookupProbe(_contents(module)))


def route_ahead(evaluate: Callable[[nnx.Module], Any], model: nnx.Module) -> dict[str, list[Ahead]]:
    """Return the routes of each collection's calls in one evaluation, by collection path.

    The model stays as it is. Routes follow from the batch alone, so that the model is not computed.
    """
    return _probe(evaluate, model, lambda module: RouteProbe())


def follows_from_batch(
    evaluate: Callable[[nnx.Module, Any], Any], model: nnx.Module, batch: Any
) -> bool:
    """Return whether the routes of a batch follow from the batch alone.

    They do not where the ids that a model looks up follow from variables that steps change, such as
    maps of managed collisions, pools of histories or codes of a dense layer.

    Args:
        evaluate: Function that makes the lookups of a batch.
        model: A model over a mesh.
        batch: A batch on the devices.
    """
    graph, state = nnx.split(model)
    # Simulated devices exchange ids after the exchanges that led to the rows.
    order = {id(x) for each in mesh_stores(model).values() for x in jax.tree.leaves(each.rows)}
    leaves = jax.tree.leaves(state)

    def route(state: Any, batch: Any) -> Any:
        return route_ahead(lambda model: evaluate(model, batch), nnx.merge(graph, state))

    jaxpr = jax.make_jaxpr(route)(state, batch).jaxpr
    needed = {id(x) for x in jaxpr.outvars}
    for equation in reversed(jaxpr.eqns):
        if any(id(x) in needed for x in equation.outvars):
            needed |= {id(x) for x in equation.invars}
    variables = zip(leaves, jaxpr.invars[: len(leaves)], strict=True)
    return not any(id(x) in needed for leaf, x in variables if id(leaf) not in order)


def _probe(
    evaluate: Callable[[nnx.Module], Any],
    model: nnx.Module,
    make_probe: Callable[[TappedModule], LookupProbe | RouteProbe],
) -> dict[str, list[Ahead]]:
    # With variables of its own: batch normalization would change the model's statistics twice.
    copy = nnx.merge(*nnx.split(model), copy=True)
    probes = {path: make_probe(module) for path, module in tapped_modules(copy).items()}
    for path, module in tapped_modules(copy).items():
        module.probe = probes[path]
    evaluate(copy)
    return {path: each.calls for path, each in probes.items()}


def _contents(module: TappedModule) -> list[Ahead]:
    return [variable.get_value() or Ahead(None) for variable in module.ahead]


@contextlib.contextmanager
def use_ahead(model: nnx.Module, ahead: Mapping[str, Sequence[Ahead]]) -> Iterator[None]:
    """Let differentiated calls use what was computed ahead, in the same order, while this lasts."""
    before = {path: module.ahead for path, module in tapped_modules(model).items()}
    for path, module in tapped_modules(model).items():
        module.ahead = nnx.List([AheadVariable(call) for call in ahead[path]])
    try:
        yield
    finally:
        for path, module in tapped_modules(model).items():
            module.ahead = before[path]


@contextlib.contextmanager
def use_routes(model: nnx.Module, ahead: Mapping[str, Sequence[Ahead]]) -> Iterator[None]:
    """Let calls that are not differentiated use routes, in the same order, while this lasts."""
    for path, module in tapped_modules(model).items():
        module.probe = RoutedProbe(ahead[path])
    try:
        yield
    finally:
        for module in tapped_modules(model).values():
            module.probe = None
