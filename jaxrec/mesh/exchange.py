"""How rows and their gradients travel between the devices of a mesh; all inside `jax.shard_map`.

A device sorts the slots its batch needs and drops repeats, so that each row travels once. The slots
of one owner then lie together. They go out in rounds of at most ``capacity`` for each owner: shapes
are static, nothing is dropped, and how many rounds it takes is decided together by all devices. An
even batch takes one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jaxrec.embed import kernels
from jaxrec.embed.kernels import Lookups
from jaxrec.mesh.layout import PlacedGroup
from jaxrec.optim import RowOptimizer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Route:
    """The slots that a device needs, without repeats.

    Attributes:
        slots: The slots, ascending; padded with the number of slots.
        index: For each lookup the position of its slot in ``slots``; -1 where it has none.
        begins: First position of each owner's slots.
        ends: The position after its last.
    """

    slots: Int32[Array, " n"]
    index: Int32[Array, " n"]
    begins: Int32[Array, " devices"]
    ends: Int32[Array, " devices"]


def plan_route(placed: PlacedGroup, rows: Int32[Array, " n"]) -> Route:
    """The route of lookups of the given rows of a group."""
    slots = placed.slots(rows)
    runs = kernels.build_runs(slots, placed.num_slots)
    position = (
        jnp.zeros(slots.shape, jnp.int32).at[runs.order].set(runs.segments, unique_indices=True)
    )
    owners = jnp.arange(placed.num_devices + 1, dtype=jnp.int32) * placed.local_rows
    bounds = jnp.searchsorted(runs.unique, owners).astype(jnp.int32)
    index = jnp.where(slots < placed.num_slots, position, -1)
    return Route(runs.unique, index, bounds[:-1], bounds[1:])


def fetch_rows(
    placed: PlacedGroup,
    table: Float[Array, "local_rows dim"],
    route: Route,
    axes: tuple[str, ...],
    capacity: int,
) -> Float[Array, "n dim"]:
    """The rows of a route's slots, in their order.

    Args:
        placed: Where the group lies.
        table: This device's rows.
        route: What this device needs.
        axes: Names of the mesh's axes.
        capacity: Rows that go between each pair of devices in a round.
    """

    def one_round(state):
        begins, rows = state
        ends = jnp.minimum(begins + capacity, route.ends)
        positions, asked = _window(placed, route, begins, ends, capacity)
        asked = _exchange(asked, axes)
        found = kernels.row_lookup(table, asked.reshape(-1)).reshape(*asked.shape, -1)
        rows = rows.at[positions].set(_exchange(found, axes), mode="drop")
        return ends, rows

    rows = jnp.zeros((route.slots.size, table.shape[1]), table.dtype)
    _, rows = _until_done(one_round, (route.begins, rows), route.ends, axes)
    return rows


def send_gradients(
    placed: PlacedGroup,
    table: Float[Array, "local_rows dim"],
    state: dict[str, Array],
    route: Route,
    gradients: Float[Array, "n dim"],
    optimizer: RowOptimizer,
    step: Int32[Array, ""],
    axes: tuple[str, ...],
    capacity: int,
) -> tuple[Float[Array, "local_rows dim"], dict[str, Array]]:
    """Brings gradients to the rows' owners, who update each row once.

    Args:
        placed: Where the group lies.
        table: This device's rows.
        state: Their optimizer state.
        route: Which rows the gradients are of.
        gradients: This device's gradient of each slot of the route.
        optimizer: How rows change.
        step: Number of updates made before.
        axes: Names of the mesh's axes.
        capacity: Rows that go between each pair of devices in a round.
    """

    def one_round(carry):
        begins, (table, state) = carry
        # All gradients of a row must come in one round, so devices agree on a slot to stop at:
        # for each owner, the first that some device cannot send any more.
        first_left = jnp.where(
            begins + capacity < route.ends,
            route.slots.at[begins + capacity].get(mode="clip"),
            placed.num_slots,
        )
        stop = jax.lax.pmin(first_left, axes)
        ends = jnp.minimum(jnp.searchsorted(route.slots, stop).astype(jnp.int32), route.ends)
        positions, rows = _window(placed, route, begins, ends, capacity)
        sent = gradients.at[positions].get(mode="fill", fill_value=0)
        rows, received = _exchange(rows, axes), _exchange(sent, axes)
        new = kernels.fused_update(
            table,
            state,
            Lookups(rows.reshape(-1), None, None),
            received.reshape(-1, received.shape[-1]),
            optimizer,
            step,
        )
        return ends, new

    _, new = _until_done(one_round, (route.begins, (table, state)), route.ends, axes)
    return new


def sum_by_slot(
    lookups: Lookups,
    index: Int32[Array, " n"],
    gradients: Float[Array, "lines dim"],
    clip_value: float | None,
) -> Float[Array, "n dim"]:
    """This device's gradient of each slot: the sum over the slot's lookups.

    Args:
        lookups: The lookups and their gradients' lines.
        index: Position of each lookup's slot, -1 for none.
        gradients: The gradient of the looked-up embeddings.
        clip_value: Bound on each element of it.
    """
    # The fused update with plain SGD of rate -1, on zeros, is that sum.
    sums = jnp.zeros((index.size, gradients.shape[1]), jnp.float32)
    sgd = _summing(clip_value)
    return kernels.fused_update(
        sums, {}, dataclasses.replace(lookups, rows=index), gradients, sgd, jnp.int32(0)
    )[0]


@functools.cache
def _summing(clip_value: float | None) -> RowOptimizer:
    return _Sum(clip_value=clip_value)


@dataclasses.dataclass(frozen=True)
class _Sum(RowOptimizer):
    """Adds the gradient to the row."""

    def init(self, num_rows: int, dim: int) -> dict[str, Array]:
        return {}

    def update(self, rows, gradients, state, step):
        return rows + gradients, state


def _window(
    placed: PlacedGroup,
    route: Route,
    begins: Int32[Array, " devices"],
    ends: Int32[Array, " devices"],
    capacity: int,
) -> tuple[Int32[Array, "devices capacity"], Int32[Array, "devices capacity"]]:
    """The next positions for each owner, and the rows of its array that they stand for.

    Unused places hold a position past the end, and the row after the owner's last.
    """
    positions = begins[:, None] + jnp.arange(capacity, dtype=jnp.int32)[None]
    is_used = positions < ends[:, None]
    first_slots = jnp.arange(placed.num_devices, dtype=jnp.int32)[:, None] * placed.local_rows
    slots = route.slots.at[positions].get(mode="clip")
    return (
        jnp.where(is_used, positions, route.slots.size),
        jnp.where(is_used, slots - first_slots, placed.local_rows),
    )


def _exchange(values: Array, axes: tuple[str, ...]) -> Array:
    """Line ``d`` goes to device ``d``; line ``d`` of the result came from there."""
    return jax.lax.all_to_all(values, axes, split_axis=0, concat_axis=0, tiled=True)


def _until_done(
    one_round: Callable,
    start: tuple[Int32[Array, " devices"], Any],
    ends: Int32[Array, " devices"],
    axes: tuple[str, ...],
) -> tuple[Int32[Array, " devices"], Any]:
    """Runs rounds until no device has anything left to send."""

    def is_left(begins: Int32[Array, " devices"]) -> Bool[Array, ""]:
        return jax.lax.pmax(jnp.any(begins < ends).astype(jnp.int32), axes) > 0

    def body(carry):
        state = one_round(carry[0])
        return state, is_left(state[0])

    state, _ = jax.lax.while_loop(lambda carry: carry[1], body, (start, is_left(start[0])))
    return state
