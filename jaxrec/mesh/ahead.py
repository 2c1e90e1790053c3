"""Results of a model's lookups that are computed before the step they are part of."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from jaxrec.embed.taps import Ahead, AheadVariable, Probe, tapped_modules, zeros_like


@dataclasses.dataclass(eq=False)
class LookupProbe(Probe):
    """Keeps the embeddings of each call."""

    calls: list[Ahead] = dataclasses.field(default_factory=list)

    def lookup(self, tables, features, **options):
        activations, residuals = tables.lookup(features, **options)
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


def look_up_ahead(
    evaluate: Callable[[nnx.Module], Any], model: nnx.Module
) -> dict[str, list[Ahead]]:
    """Return the embeddings of each collection's calls in one evaluation, by collection path.

    The model stays as it is. XLA removes the rest of the evaluation as dead code.
    """
    return _probe(evaluate, model, LookupProbe)


def route_ahead(evaluate: Callable[[nnx.Module], Any], model: nnx.Module) -> dict[str, list[Ahead]]:
    """Return the routes of each collection's calls in one evaluation, by collection path.

    The model stays as it is. Routes follow from the batch alone, so that the model is not computed.
    """
    return _probe(evaluate, model, RouteProbe)


def _probe(
    evaluate: Callable[[nnx.Module], Any],
    model: nnx.Module,
    probe: type[LookupProbe] | type[RouteProbe],
) -> dict[str, list[Ahead]]:
    # With variables of its own: batch normalization would change the model's statistics twice.
    copy = nnx.merge(*nnx.split(model), copy=True)
    probes = {path: probe() for path in tapped_modules(copy)}
    for path, module in tapped_modules(copy).items():
        module.probe = probes[path]
    evaluate(copy)
    return {path: each.calls for path, each in probes.items()}


@contextlib.contextmanager
def use_ahead(model: nnx.Module, ahead: Mapping[str, Sequence[Ahead]]) -> Iterator[None]:
    """Let differentiated calls use what was computed ahead, in the same order, while this lasts."""
    for path, module in tapped_modules(model).items():
        module.ahead = nnx.List([AheadVariable(call) for call in ahead[path]])
    try:
        yield
    finally:
        for module in tapped_modules(model).values():
            module.ahead = nnx.List([])
