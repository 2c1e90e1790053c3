"""Routes, rows, embeddings and capacities of batches, computed ahead of their steps.

A message between two devices holds `DEFAULT_CAPACITY_FACTOR` = 1.25 even shares of a device's
lookups at first. A batch with many repeated ids needs less, since each row travels once. A batch
whose rows lie mostly on one owner needs more, and then takes several rounds. The results are exact
at any capacity; a bad one costs time alone. Capacity factors come from a ladder, so that few
programs compile.
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
from jaxtyping import Array, Bool, Float

from jaxrec.embed.row_gradients import Routes
from jaxrec.embed.store import TableStore
from jaxrec.embed.taps import (
    Ahead,
    AheadVariable,
    Probe,
    TappedModule,
    tapped_modules,
    zeros_like,
)
from jaxrec.mesh.exchange import DEFAULT_CAPACITY_FACTOR
from jaxrec.mesh.store import mesh_stores, stale_lines
from jaxrec.ragged import KeyedJaggedArray

AheadCalls: TypeAlias = dict[str, list[Ahead]]
"""Routes, and maybe rows or embeddings, of each collection's calls, by collection path."""


@dataclasses.dataclass(eq=False)
class LookupProbe(Probe):
    """Probe whose lookups take given routes, and record routes and embeddings.

    Attributes:
        routed: Routes of the calls, in order. Calls past the last one are routed now.
        calls: Routes and embeddings of the calls so far.
    """

    routed: Sequence[Ahead] = ()
    calls: list[Ahead] = dataclasses.field(default_factory=list)

    def lookup(self, tables, features, **options):
        call = len(self.calls)
        routes = self.routed[call].routes if call < len(self.routed) else None
        activations, residuals = tables.lookup(features, routes=routes, **options)
        self.calls.append(Ahead(residuals.routes, activations))
        return activations


@dataclasses.dataclass(eq=False)
class RouteProbe(Probe):
    """Probe that makes routes without a lookup; the calls return zeros.

    Attributes:
        make: Function ``make(call, tables, features, **options)`` that returns the routes of a
            call, by its number.
        calls: Routes of the calls so far.
    """

    make: Callable[..., Routes]
    calls: list[Ahead] = dataclasses.field(default_factory=list)

    def lookup(self, tables, features, **options):
        self.calls.append(Ahead(self.make(len(self.calls), tables, features, **options)))
        shapes = jax.eval_shape(lambda: tables.lookup(features, **options)[0])
        return jax.tree.map(zeros_like, shapes)


def lookup_ahead(evaluate: Callable[[nnx.Module], Any], model: nnx.Module) -> AheadCalls:
    """Evaluate the model once; return the embeddings of each collection's calls, by its path.

    The calls take the routes that `use_ahead` gave the model. The model does not change.
    """
    # XLA removes the rest of the evaluation as dead code.
    return _probe(evaluate, model, lambda path, module: LookupProbe(_contents(module)))


def route_ahead(evaluate: Callable[[nnx.Module], Any], model: nnx.Module) -> AheadCalls:
    """Evaluate the model once; return the routes of each collection's calls, by its path.

    The model does not change.
    """

    # Routes follow from the batch alone, so XLA removes all of the model's own computation.
    def route(call: int, tables: TableStore, features: KeyedJaggedArray, **options: Any) -> Routes:
        return tables.route(features)

    return _probe(evaluate, model, lambda path, module: RouteProbe(route))


def fetch_ahead(
    evaluate: Callable[[nnx.Module], Any],
    model: nnx.Module,
    routes: AheadCalls,
    waiting: AheadCalls,
) -> tuple[AheadCalls, AheadCalls, dict[str, Bool[Array, ""]]]:
    """Fetch the rows of each collection's calls for a batch, before an update of the model.

    The model does not change.

    Args:
        evaluate: Function of the model that makes all lookups of the batch.
        model: The model.
        routes: Routes of these lookups.
        waiting: Routes and rows of the batch before; see `TableStore.fetch`.

    Returns:
        ``routes`` with the fetched rows; ``waiting``; and for each collection a boolean that is
        True once its rows are read, for `use_ahead`.
    """
    waiting, is_read = dict(waiting), {path: jnp.array(True) for path in waiting}

    def probe(path: str, module: TappedModule) -> RouteProbe:
        def fetch(
            call: int, tables: TableStore, features: KeyedJaggedArray, **options: Any
        ) -> Routes:
            fetched, waiting[path], is_known = tables.fetch(
                features, _routed(routes[path][call]), waiting[path], **options
            )
            is_read[path] &= is_known
            return fetched

        return RouteProbe(fetch)

    fetched = _probe(evaluate, model, probe)
    return fetched, waiting, is_read


def refetch_ahead(
    evaluate: Callable[[nnx.Module], Any],
    model: nnx.Module,
    fetched: AheadCalls,
    updated: AheadCalls,
) -> AheadCalls:
    """Fetch those rows of `fetch_ahead` again that an update of the model wrote.

    Args:
        evaluate: As for `fetch_ahead`.
        model: The model, after the update.
        fetched: Result of `fetch_ahead`, from before the update.
        updated: Routes of the calls whose rows the update wrote.
    """

    def probe(path: str, module: TappedModule) -> RouteProbe:
        written = [_routed(call) for call in updated[path]]

        def refetch(
            call: int, tables: TableStore, features: KeyedJaggedArray, **options: Any
        ) -> Routes:
            return tables.refetch(features, _routed(fetched[path][call]), written, **options)

        return RouteProbe(refetch)

    return _probe(evaluate, model, probe)


def _routed(call: Ahead) -> Routes:
    """Return the routes of a call that was routed ahead."""
    assert call.routes is not None
    return call.routes


def changes_ids(model: nnx.Module) -> bool:
    """Return whether a step may change the ids that the model looks up for the next batch.

    A module says so with ``changes_ids = True`` if it computes ids from variables that its calls
    change. Maps of managed collisions and pools of ids do.
    """
    # Routes of such a model would be those of the ids before the step in between.
    return any(getattr(module, "changes_ids", False) for _, module in nnx.iter_modules(model))


def _probe(
    evaluate: Callable[[nnx.Module], Any],
    model: nnx.Module,
    make_probe: Callable[[str, TappedModule], LookupProbe | RouteProbe],
) -> AheadCalls:
    # The copy has its own variables. With the model's, batch normalization would update its
    # statistics once here and again in the step.
    copy = nnx.merge(*nnx.split(model), copy=True)
    probes = {path: make_probe(path, module) for path, module in tapped_modules(copy).items()}
    for path, module in tapped_modules(copy).items():
        module.probe = probes[path]
    evaluate(copy)
    return {path: each.calls for path, each in probes.items()}


def _contents(module: TappedModule) -> list[Ahead]:
    """Return the results that `use_ahead` gave a collection, one for each of its calls."""
    return [variable.get_value() or Ahead(None) for variable in module.ahead]


@contextlib.contextmanager
def use_ahead(
    model: nnx.Module,
    ahead: Mapping[str, Sequence[Ahead]],
    is_read: Mapping[str, Bool[Array, ""]] | None = None,
) -> Iterator[None]:
    """Within this context, a differentiated loss uses these routes and embeddings.

    Args:
        model: The model.
        ahead: One `Ahead` for each call of a collection, in order, by the collection's path.
        is_read: Result of `fetch_ahead`, which updates of the tables depend on.
    """
    # Calls are matched by their order, so a step must make the calls that the probe saw.
    before = {path: module.ahead for path, module in tapped_modules(model).items()}
    for path, module in tapped_modules(model).items():
        module.ahead = nnx.List([AheadVariable(call) for call in ahead[path]])
        module.is_read = nnx.List([AheadVariable(is_read[path])] if is_read else [])
    try:
        yield
    finally:
        for path, module in tapped_modules(model).items():
            module.ahead, module.is_read = before[path], nnx.List([])


@contextlib.contextmanager
def use_routes(model: nnx.Module, ahead: Mapping[str, Sequence[Ahead]]) -> Iterator[None]:
    """Within this context, lookups that are not differentiated use these routes.

    ``ahead`` maps each collection's path to one `Ahead` for each of its calls, in order. Only the
    routes are used.
    """
    for path, module in tapped_modules(model).items():
        module.probe = LookupProbe(ahead[path])
    try:
        yield
    finally:
        for module in tapped_modules(model).values():
            module.probe = None


# The ladder's steps are powers of 2 ** (1 / 4). So a capacity is less than a fifth larger than the
# demand with its margin.
_STEPS_PER_DOUBLING = 4
# Safety margin over the measured demand.
_MARGIN = 1.05
# Number of batches in a row that must need less before a capacity shrinks. A new capacity compiles
# a new program, so a single light batch must not change it.
WINDOW = 32

GroupPath: TypeAlias = tuple[str, str]
"""Path of a collection in its model, and the name of a group of its tables.

For the capacity of lines that are sent again, the name is `stale_lines` of the group's.
"""


def measure_demand(ahead: Mapping[str, list[Ahead]]) -> dict[GroupPath, Float[Array, ""]]:
    """Return the capacity factor that each group needs, the largest over all calls.

    ``ahead`` is the result of `route_ahead` or `refetch_ahead`. Groups whose exchange has no
    capacity are missing. All devices get equal numbers.
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
                if group_route.fetched is not None and group_route.fetched.demand is not None:
                    largest, key = jnp.max(group_route.fetched.demand), (path, stale_lines(name))
                    demands[key] = jnp.maximum(demands.get(key, largest), largest)
    return demands


def capacity_factor(demand: float) -> float:
    """Return the smallest capacity factor on the ladder that holds a demand and its margin."""
    # Without the 1e-9, rounding would lift a demand that is on the ladder to the next step.
    steps = math.log2(max(demand, 1e-3) * _MARGIN) * _STEPS_PER_DOUBLING
    return 2.0 ** (math.ceil(steps - 1e-9) / _STEPS_PER_DOUBLING)


@dataclasses.dataclass
class Capacities:
    """Choice of the capacity factors of a model's exchanges, batch by batch.

    A factor grows as soon as a batch needs more. It shrinks when `WINDOW` batches in a row needed
    less. `observe` writes it to `MeshStore.capacity_factors` of the model's tables.
    """

    # All processes see the same demands, so they choose alike without a collective.

    model: nnx.Module

    def __post_init__(self) -> None:
        self._seen: dict[GroupPath, collections.deque[float]] = {}

    def observe(self, demands: Mapping[GroupPath, float | np.ndarray | Array]) -> bool:
        """Record a batch's demands; return whether a factor changed.

        A changed factor compiles a new program.
        """
        factors, changed = capacity_factors(self.model), {}
        for group, demand in demands.items():
            seen = self._seen.setdefault(group, collections.deque(maxlen=WINDOW))
            seen.append(float(demand))
            wanted = capacity_factor(max(seen))
            factor = factors.get(group, DEFAULT_CAPACITY_FACTOR)
            if seen[-1] > factor or (len(seen) == WINDOW and wanted < factor):
                changed[group] = wanted
        set_capacity_factors(self.model, changed)
        return bool(changed)


def capacity_factors(model: nnx.Module) -> dict[GroupPath, float]:
    """Return the capacity factors that were set for groups of a model's tables."""
    return {
        (path, name): factor
        for path, tables in mesh_stores(model).items()
        for name, factor in tables.capacity_factors
    }


def set_capacity_factors(model: nnx.Module, factors: Mapping[GroupPath, float]) -> None:
    """Set the capacity factors of some groups, in place.

    A changed factor compiles a new program.
    """
    for path, module in tapped_modules(model).items():
        of_module = {name: factor for (at, name), factor in factors.items() if at == path}
        if of_module:
            store, tables = module.tables.get_value(), mesh_stores(model)[path]
            all_factors = tuple((dict(tables.capacity_factors) | of_module).items())
            tables = dataclasses.replace(tables, capacity_factors=all_factors)
            module.tables.set_value(store.with_placed(tables))


def describe_capacities(model: nnx.Module) -> list[dict[str, Any]]:
    """Return a model's capacity factors in a form that JSON can hold, for `restore_capacities`."""
    # A factor is a ratio to an even share, so it holds for one number of devices and one exchange.
    # Both are part of the description.
    return [
        {
            "collection": path,
            "group": name,
            "devices": placed.num_devices,
            "exchange": exchange.name,
            "factor": dict(tables.capacity_factors)[name],
        }
        for path, tables in mesh_stores(model).items()
        for placed, exchange in tables.layout
        for name in (placed.name, stale_lines(placed.name))
        if name in dict(tables.capacity_factors)
    ]


def restore_capacities(model: nnx.Module, described: Iterable[Mapping[str, Any]]) -> None:
    """Set the capacity factors that `describe_capacities` returned, in place.

    A group with another exchange, or on another number of devices, keeps its factor.
    """
    known = {
        tuple(each[key] for key in ("collection", "group", "devices", "exchange")): each["factor"]
        for each in described
    }
    factors = {}
    for path, tables in mesh_stores(model).items():
        for placed, exchange in tables.layout:
            for name in (placed.name, stale_lines(placed.name)):
                factor = known.get((path, name, placed.num_devices, exchange.name))
                if factor is not None:
                    factors[path, name] = float(factor)
    set_capacity_factors(model, factors)
