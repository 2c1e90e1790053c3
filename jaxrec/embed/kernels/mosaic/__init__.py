"""The primitives on NVIDIA GPUs, by the Mosaic backend of Pallas.

* `indexing`: loads and stores at computed indices, which Mosaic lacks. Begin there.
* `lanes`: which threads hold which elements.
* `programs`: the programs of a kernel, and their launch.
* `instructions`, `stand_ins`: what the functions of `indexing` do on a GPU, and in interpreters.
* `tile`: tiles of rows, and loops over them.
* `extents`: where each bag's ids begin and end.
* `flat_lookups`: bags as flat lookups.
* `lookups`: pooled and plain lookups of rows.
* `readers`: rows of floats, and packed rows, as lookups read them.
* `sorted_lookups`: lookups in the order of their rows.
* `runs`: the rows that occur, with their lookups, and the sums of hot rows' gradients.
* `update`: fused updates, and sums of rows' gradients.
* `row_functions`: an optimizer's `update`, computed inside a kernel.
* `stored_rows`: rows and their state as an update reads and writes them, packed ones too.
* `hstu`: HSTU attention, by Hopper's copy engine and matrix products.
"""

# How these kernels are built
#
# As those of `triton`, whose comments hold here too, on another backend. Differences:
#
# * A program has 128 threads, and rows lie over them as `lanes.Lanes` says. Columns are padded
#   to a multiple of what the threads of a row load at once, not to a power of two.
# * Rows that are asked to be NaN are loaded as NaN, so that sums of rows need no selection.
# * Sums over a program's threads need barriers, so that no loop here has one.

from collections.abc import Mapping
from typing import Any

import jax

from jaxrec.embed.formats import is_packed
from jaxrec.embed.kernels.mosaic.flat_lookups import flatten_bags as flatten_bags
from jaxrec.embed.kernels.mosaic.hstu import attention as attention
from jaxrec.embed.kernels.mosaic.hstu import attention_gradients as attention_gradients
from jaxrec.embed.kernels.mosaic.hstu import refuse_attention
from jaxrec.embed.kernels.mosaic.lookups import pooled_lookup as pooled_lookup
from jaxrec.embed.kernels.mosaic.lookups import row_lookup as row_lookup
from jaxrec.embed.kernels.mosaic.readers import Reader
from jaxrec.embed.kernels.mosaic.update import fused_update as fused_update
from jaxrec.embed.kernels.mosaic.update import refuse_update
from jaxrec.embed.kernels.mosaic.update import sum_rows as sum_rows

_OLDEST_JAX = (0, 11, 2)
# A thread holds sums of its columns in registers, and wider rows would need more than it has.
_MOST_COLUMNS = 4096


def refuse(primitive: str, arguments: Mapping[str, Any]) -> str | None:
    """Return why these kernels do not take a call; None: they do."""
    if jax.__version_info__ < _OLDEST_JAX:
        oldest = ".".join(map(str, _OLDEST_JAX))
        return f"it needs JAX {oldest} or later, and this is {jax.__version__}"
    if primitive in ("attention", "attention_gradients"):
        return refuse_attention(arguments)
    table = arguments.get("table")
    if table is not None and 0 in table.shape:
        return "its table has rows and columns, and this one has none"
    rows = arguments.get("gradients") if table is None else table
    if rows is not None and rows.shape[1] > _MOST_COLUMNS:
        return f"its rows have up to {_MOST_COLUMNS} columns, and these have {rows.shape[1]}"
    if primitive == "fused_update":
        return refuse_update(arguments)
    if is_packed(table) and Reader.of(table) is None:
        return f"it does not unpack {table.row_format.name}"
    return None


_UPDATE = {"elements": (4, 8, 16), "cut": (32, 64, 128, 256), "block": (16, 64, 256, 1024)}

# By primitive, the options that `jaxrec tune` searches, in this order, and their values.
OPTIONS: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "pooled_lookup": {"loads": (1, 2, 4, 8), "depth": (1, 2, 4, 8)},
    "row_lookup": {"loads": (1, 2, 4, 8)},
    "fused_update": _UPDATE,
    "sum_rows": _UPDATE,
}
