"""Which rows a device's lookups need of which other device."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxrec.embed import kernels
from jaxrec.mesh.layout import PlacedGroup


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Route:
    """The slots that a device's lookups need, without repeats, those of one owner together.

    Attributes:
        slots: The slots, ascending; padded with the number of slots.
        index: For each lookup the position of its slot in ``slots``; -1 where it has none.
        owners: For each lookup its slot's owner.
        begins: First position of each owner's slots.
        ends: The position after its last.
    """

    slots: Int32[Array, " n"]
    index: Int32[Array, " n"]
    owners: Int32[Array, " n"]
    begins: Int32[Array, " devices"]
    ends: Int32[Array, " devices"]


def plan_route(placed: PlacedGroup, rows: Int32[Array, " n"]) -> Route:
    """The route of lookups of the given rows of a group."""
    slots = placed.slots(rows)
    runs = kernels.build_runs(slots, placed.num_slots)
    first_slots = jnp.arange(placed.num_devices + 1, dtype=jnp.int32) * placed.local_rows
    bounds = jnp.searchsorted(runs.unique, first_slots).astype(jnp.int32)
    index = jnp.where(slots < placed.num_slots, runs.inverse, -1)
    owners = jnp.minimum(slots // placed.local_rows, placed.num_devices - 1)
    return Route(runs.unique, index, owners, bounds[:-1], bounds[1:])


def places(route: Route, begins: Int32[Array, " devices"], capacity: int) -> Int32[Array, " n"]:
    """For each lookup the place of its slot among those of a round.

    A round takes ``capacity`` of each owner's positions, from ``begins``; the place counts owner by
    owner. -1 where the slot is not in the round.
    """
    begin = begins[route.owners]
    end = jnp.minimum(begins + capacity, route.ends)[route.owners]
    is_inside = (route.index >= begin) & (route.index < end)
    return jnp.where(is_inside, route.owners * capacity + route.index - begin, -1)


def window(
    placed: PlacedGroup, route: Route, begins: Int32[Array, " devices"], capacity: int
) -> tuple[Int32[Array, "devices capacity"], Int32[Array, "devices capacity"]]:
    """The positions of a round for each owner, and the rows of its array that they stand for.

    Unused places hold a position past the end, and the row after the owner's last.
    """
    positions = begins[:, None] + jnp.arange(capacity, dtype=jnp.int32)[None]
    is_used = positions < route.ends[:, None]
    first_slots = jnp.arange(placed.num_devices, dtype=jnp.int32)[:, None] * placed.local_rows
    slots = route.slots.at[positions].get(mode="clip")
    return (
        jnp.where(is_used, positions, route.slots.size),
        jnp.where(is_used, slots - first_slots, placed.local_rows),
    )
