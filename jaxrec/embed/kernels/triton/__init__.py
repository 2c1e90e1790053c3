"""The primitives on NVIDIA GPUs, by the Triton backend of Pallas.

* `tile`: tiles, and the launch of a kernel.
* `extents`: where each bag's ids begin and end.
* `flat_lookups`: bags as flat lookups.
* `lookups`: pooled and plain lookups of rows.
* `readers`: rows of floats, and packed rows, as lookups read them.
* `sorted_lookups`: lookups in the order of their rows, and the sums of hot rows' gradients.
* `runs`: the rows that occur, with their lookups.
* `update`: fused updates, and sums of rows' gradients.
"""

# How these kernels are built
#
# Memory bounds them: a lookup does one addition for each number that it reads. So each program has
# many rows on their way at once, a *tile*: some groups (bags, or runs of one row) side by side, and
# some rows of each. While the rows of one turn of the loop are on their way, the ids of the next
# turn are loaded. Triton wants a power of two columns, so rows are padded and the rest is masked.
#
# An update sorts its lookups by row and lists the rows that occur. One kernel then goes over that
# list: for each row it adds up the gradients of the row's lookups, applies the optimizer and writes
# the row. The gradients of frequent rows are summed in parts by many programs before. No atomics,
# so the same batch gives the same bits.
#
# JAX has deprecated this backend since 0.11, and warns when a program is lowered.

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

# By primitive, the options that `jaxrec tune` searches, in this order, and their values.
OPTIONS: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "pooled_lookup": _LOOKUP,
    "row_lookup": _LOOKUP,
    "fused_update": _UPDATE,
    "sum_rows": _UPDATE,
}
