"""Memory that uneven groups of tables waste."""

from __future__ import annotations

import warnings
from collections import Counter

from jaxrec.embed.state import state_bytes
from jaxrec.mesh.layout import MeshLayout
from jaxrec.mesh.placed_group import PlacedGroup

# A warning needs this many wasted bytes, and more than the group uses.
_MIN_WASTE = 64 << 20


def warn_of_unused_memory(layout: MeshLayout) -> None:
    """Warn of groups whose arrays are mostly empty.

    JAX's arrays over a mesh have equal parts on all devices. So each device allocates as much for a
    group of tables as the fullest device needs.
    """
    for placed in layout.groups:
        if placed.is_replicated:
            continue
        used = rows_by_device(placed)
        allocated = placed.local_rows * placed.num_devices
        unused = (allocated - sum(used)) * row_bytes(placed)
        if unused < _MIN_WASTE or allocated < 2 * sum(used):
            continue
        empty = used.count(0)
        warnings.warn(
            f"tables {', '.join(placed.tables)} take {_size(sum(used) * row_bytes(placed))} with "
            f"their optimizer state, but {_size(allocated * row_bytes(placed))} are allocated: "
            f"tables of one width, type and optimizer are one array with equal parts on all "
            f"{placed.num_devices} devices, of which {empty} hold none of these tables. Spread "
            "them over the devices: place single tables with row_wise(), several with table_wise() "
            "on a device each, or let jaxrec.plan.Planner place them",
            stacklevel=2,
        )


def rows_by_device(placed: PlacedGroup) -> list[int]:
    """Return the number of the group's rows on each device."""
    rows: Counter[int] = Counter()
    for each in placed.shards:
        rows[each.shard.device] += each.shard.num_rows
    return [rows[device] for device in range(placed.num_devices)]


def row_bytes(placed: PlacedGroup) -> int:
    """Return the bytes of a row of the group's array and of its optimizer state."""
    group = placed.group
    return group.row_format.row_bytes(group.dim) + state_bytes(group.optimizer, group.dim)


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
