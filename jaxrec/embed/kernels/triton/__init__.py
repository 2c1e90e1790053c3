"""The primitives on NVIDIA GPUs, by the Triton backend of Pallas.

Memory bounds these kernels, so every program loads a tile of rows at once: some groups (bags, runs)
side by side, and some rows of each. While the rows of one turn of a loop are on their way, the ids
of the next are loaded. Rows are padded to a power of two columns, as Triton requires, and masked.
Atomics are not used, so results repeat bit for bit.

An update sorts its lookups by row and lists the rows that occur. Each of them is updated by one
kernel, which adds up the gradients of its lookups; those of hot rows are summed in parts before.

JAX has deprecated this backend since 0.11: it warns when a program is lowered.

* `tile`: tiles, and the launch of a kernel.
* `extents`: where each bag's ids begin and end.
* `flat_lookups`: bags as flat lookups.
* `lookups`: pooled and plain lookups of rows.
* `readers`: rows of floats, and packed rows, as lookups read them.
* `sorted_lookups`: lookups in the order of their rows, and the sums of hot rows' gradients.
* `runs`: the rows that occur, with their lookups.
* `update`: fused updates, and sums of rows' gradients.
"""

from collections.abc import Mapping

from jaxrec.embed.kernels.triton.flat_lookups import flatten_bags as flatten_bags
from jaxrec.embed.kernels.triton.lookups import pooled_lookup as pooled_lookup
from jaxrec.embed.kernels.triton.lookups import row_lookup as row_lookup
from jaxrec.embed.kernels.triton.update import fused_update as fused_update
from jaxrec.embed.kernels.triton.update import refuse as refuse
from jaxrec.embed.kernels.triton.update import sum_rows as sum_rows

_WARPS = (1, 2, 4, 8)
_LOOKUP = {"elements": (4, 8, 16, 32), "warps": _WARPS}
# 32 elements of an update need 170 to 240 registers, which leaves 8 to 12 warps resident.
_UPDATE = {
    "elements": (4, 8, 16),
    "warps": _WARPS,
    "cut": (32, 64, 128, 256),
    "block": (64, 256, 1024),
}

# The options that `jaxrec tune` chooses, by primitive: their values, in the order of the search.
OPTIONS: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "pooled_lookup": _LOOKUP,
    "row_lookup": _LOOKUP,
    "fused_update": _UPDATE,
    "sum_rows": _UPDATE,
}
