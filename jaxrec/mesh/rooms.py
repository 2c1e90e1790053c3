"""How much room the exchange has, from what batches were seen to need.

Without anything measured, a round has room for 1.25 even shares of a device's lookups from it to
each owner (`jaxrec.mesh.tables.SLACK`). Rows that repeat within a batch travel once, so a batch may
need much less; where owners are unevenly asked, more, and an exchange by rows then takes several
rounds. Both cost time and nothing else: whatever the room, the exchange is exact.

Rooms come from a ladder, so that few programs compile.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxrec.embed.lookup import Routes
from jaxrec.embed.taps import Ahead, tapped_modules
from jaxrec.mesh.tables import SLACK, ShardedTables

# Rooms are powers of 2 ** (1 / 4): less than a fifth above what is needed.
_RUNGS_PER_DOUBLING = 4
# Of what is needed next, beyond what was seen.
_MARGIN = 1.05
# Batches that must all have needed less before there is less room.
WINDOW = 32

Group: TypeAlias = tuple[str, str]
"""The path of a collection in its model, and the name of a group of its tables."""


def measured_loads(found: Mapping[str, list[Ahead]]) -> dict[Group, Float[Array, ""]]:
    """What a batch needs: rows from a device to an owner, at most, in even shares of its lookups.

    Args:
        found: What `jaxrec.embed.taps.route_ahead` found of the batch.

    Returns:
        For each group that is exchanged with room to choose the largest need of all its calls, the
        same on all devices.
    """
    loads: dict[Group, Array] = {}
    for path, calls in found.items():
        for call in calls:
            routes: Routes = call.routes or {}
            for name, route in routes.items():
                if (load := getattr(route, "load", None)) is not None:
                    largest = jnp.max(load)
                    key = path, name
                    loads[key] = jnp.maximum(loads[key], largest) if key in loads else largest
    return loads


def rung(load: float) -> float:
    """The room for a need of so many even shares, with a margin.

    Example:
        >>> [round(rung(load), 2) for load in (0.3, 0.95, 1.0, 7.9)]
        [0.35, 1.0, 1.19, 9.51]
    """
    steps = math.log2(max(load, 1e-3) * _MARGIN) * _RUNGS_PER_DOUBLING
    return 2.0 ** (math.ceil(steps - 1e-9) / _RUNGS_PER_DOUBLING)


@dataclasses.dataclass
class Rooms:
    """Chooses the rooms of a model's exchanges, batch by batch.

    Where a batch needs more than there is room for, there is more from then on; where `WINDOW`
    batches in a row needed less, there is less. All processes see the same needs and choose alike.

    Attributes:
        model: The model; its tables' `ShardedTables.slack` is changed.
    """

    model: nnx.Module

    def __post_init__(self) -> None:
        self._seen: dict[Group, collections.deque[float]] = {}

    def see(self, loads: Mapping[Group, float | np.ndarray | Array]) -> bool:
        """Takes what a batch needed; whether rooms changed, which compiles another program."""
        changed: dict[Group, float] = {}
        for group, load in loads.items():
            seen = self._seen.setdefault(group, collections.deque(maxlen=WINDOW))
            seen.append(float(load))
            wanted = rung(max(seen))
            room = self._room(group)
            if seen[-1] > room or (len(seen) == WINDOW and wanted < room):
                changed[group] = wanted
        self._set(changed)
        return bool(changed)

    def _room(self, group: Group) -> float:
        path, name = group
        return dict(self._tables(path).slack).get(name, SLACK)

    def _set(self, rooms: Mapping[Group, float]) -> None:
        for path, module in tapped_modules(self.model).items():
            of_module = {name: room for (at, name), room in rooms.items() if at == path}
            if of_module:
                tables = self._tables(path)
                slack = tuple((dict(tables.slack) | of_module).items())
                module.tables.set_value(dataclasses.replace(tables, slack=slack))

    def _tables(self, path: str) -> ShardedTables:
        tables = tapped_modules(self.model)[path].tables.get_value()
        assert isinstance(tables, ShardedTables)
        return tables
