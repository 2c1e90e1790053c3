"""Batches looked at ahead of their steps: routes, embeddings, and the capacities they need.

Before anything is measured, a message between two devices has space for 1.25 even shares of a
device's lookups (`DEFAULT_CAPACITY_FACTOR`). Rows that repeat within a batch travel once, so a
batch may need much less. Where requests to owners are uneven it needs more, and an exchange of rows
then takes several rounds. Both cost time only: whatever the capacity, the exchange is exact.
Capacity factors come from a ladder, so that few programs compile.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxrec.embed.row_gradients import Routes
from jaxrec.embed.taps import (
    Ahead,
    AheadVariable,
    Probe,
    TappedModule,
    tapped_modules,
    zeros_like,
)
from jaxrec.mesh.exchange import DEFAULT_CAPACITY_FACTOR
from jaxrec.mesh.store import mesh_stores


@dataclasses.dataclass(eq=False)
class LookupProbe(Probe):
    """Looks embeddings up, along routes where these were computed before, and keeps both.

    Attributes:
        routed: Routes of the calls, in order.
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
        module.probe = LookupProbe(ahead[path])
    try:
        yield
    finally:
        for module in tapped_modules(model).values():
            module.probe = None


# Steps of the ladder are powers of 2 ** (1 / 4): less than a fifth above the demand.
_STEPS_PER_DOUBLING = 4
# Safety margin over the measured demand.
_MARGIN = 1.05
# Number of batches in a row that must need less before a capacity shrinks.
WINDOW = 32

GroupPath: TypeAlias = tuple[str, str]
"""Path of a collection in its model, and the name of a group of its tables."""


def measure_demand(ahead: Mapping[str, list[Ahead]]) -> dict[GroupPath, Float[Array, ""]]:
    """Return the capacity factors that a batch needs.

    Args:
        ahead: Result of `jaxrec.mesh.ahead.route_ahead` for the batch.

    Returns:
        Largest demand over all calls of each group whose exchange has a capacity, the same on all
        devices.
    """
    demands: dict[GroupPath, Array] = {}
    for path, calls in ahead.items():
        for call in calls:
            for name, group_route in (call.routes or {}).items():
                demand = getattr(group_route.route, "demand", None)
                if demand is not None:
                    largest, key = jnp.max(demand), (path, name)
                    before = demands.get(key, largest)
                    demands[key] = jnp.maximum(before, largest)
    return demands


def capacity_factor(demand: float) -> float:
    """Return the smallest capacity factor of the ladder for a demand, with a margin."""
    steps = math.log2(max(demand, 1e-3) * _MARGIN) * _STEPS_PER_DOUBLING
    return 2.0 ** (math.ceil(steps - 1e-9) / _STEPS_PER_DOUBLING)


@dataclasses.dataclass
class Capacities:
    """Chooses the capacity factors of a model's exchanges, batch by batch.

    A capacity grows when a batch needs more, and shrinks when `WINDOW` batches in a row needed
    less. All processes see the same demands and choose alike.

    Attributes:
        model: The model; its tables' `MeshStore.capacity_factors` are changed.
    """

    model: nnx.Module

    def __post_init__(self) -> None:
        self._seen: dict[GroupPath, collections.deque[float]] = {}

    def observe(self, demands: Mapping[GroupPath, float | np.ndarray | Array]) -> bool:
        """Record a batch's demands; return whether a factor changed, which takes a new program."""
        changed: dict[GroupPath, float] = {}
        for group, demand in demands.items():
            seen = self._seen.setdefault(group, collections.deque(maxlen=WINDOW))
            seen.append(float(demand))
            wanted, factor = capacity_factor(max(seen)), self._factor(group)
            if seen[-1] > factor or (len(seen) == WINDOW and wanted < factor):
                changed[group] = wanted
        set_capacity_factors(self.model, changed)
        return bool(changed)

    def _factor(self, group: GroupPath) -> float:
        return capacity_factors(self.model).get(group, DEFAULT_CAPACITY_FACTOR)


def capacity_factors(model: nnx.Module) -> dict[GroupPath, float]:
    """Return the capacity factors that measured batches gave the groups of a model's tables."""
    return {
        (path, name): factor
        for path, tables in mesh_stores(model).items()
        for name, factor in tables.capacity_factors
    }


def set_capacity_factors(model: nnx.Module, factors: Mapping[GroupPath, float]) -> None:
    """Set the capacity factors of some groups, in place; a changed factor takes a new program."""
    for path, module in tapped_modules(model).items():
        of_module = {name: factor for (at, name), factor in factors.items() if at == path}
        if of_module:
            store, tables = module.tables.get_value(), mesh_stores(model)[path]
            all_factors = tuple((dict(tables.capacity_factors) | of_module).items())
            tables = dataclasses.replace(tables, capacity_factors=all_factors)
            module.tables.set_value(store.with_placed(tables))


def describe_capacities(model: nnx.Module) -> list[dict[str, Any]]:
    """Describe the capacity factors of a model's tables for `restore_capacities`.

    Returns:
        For each group with a measured factor a dictionary for a JSON file. A factor holds for one
        number of devices and one exchange, which the dictionary names.
    """
    return [
        {
            "collection": path,
            "group": placed.name,
            "devices": placed.num_devices,
            "exchange": exchange.name,
            "factor": dict(tables.capacity_factors)[placed.name],
        }
        for path, tables in mesh_stores(model).items()
        for placed, exchange in tables.layout
        if placed.name in dict(tables.capacity_factors)
    ]


def restore_capacities(model: nnx.Module, described: Iterable[Mapping[str, Any]]) -> None:
    """Set the capacity factors of groups that have the same devices and the same exchange again.

    Other groups keep theirs: a factor is a ratio to an even share of one number of devices.

    Args:
        model: The model, changed in place.
        described: Result of `describe_capacities`, of this model or of another.
    """
    known = {
        tuple(each[key] for key in ("collection", "group", "devices", "exchange")): each["factor"]
        for each in described
    }
    factors = {}
    for path, tables in mesh_stores(model).items():
        for placed, exchange in tables.layout:
            factor = known.get((path, placed.name, placed.num_devices, exchange.name))
            if factor is not None:
                factors[path, placed.name] = float(factor)
    set_capacity_factors(model, factors)
