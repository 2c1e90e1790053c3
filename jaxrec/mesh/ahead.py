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


def changes_ids(model: nnx.Module) -> bool:
    """Return whether calls of the model change the ids that it looks up for a batch.

    A module says so by an attribute ``changes_ids = True``: maps of managed collisions and pools of
    ids do. Others that compute ids from variables that their calls change have to, too.
    """
    return any(getattr(module, "changes_ids", False) for _, module in nnx.iter_modules(model))


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
