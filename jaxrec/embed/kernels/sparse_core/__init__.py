"""Lookups and updates of rows on the SparseCores of TPUs, by Pallas.

* `subcores`: the subcores that run a kernel, and their copies of rows by index. Begin there.
* `sums`: sums of rows by segment, a block of segments at a time.
* `lookups`: pooled and plain lookups of rows.
* `update`: fused updates.
"""

# How these kernels are built
#
# * Rows are read and written by indirect copies, `Subcores.read_rows` and `write_rows`, one for a
#   block of rows. JAX's interpreter has no such copies, and gets a copy for each row instead.
# * A lookup and an update are the same sum: terms in the order of their bags, or of their rows, are
#   cut into blocks of segments, and one subcore sums a block in its own memory. So no two subcores
#   add to one row, and results repeat bit for bit. One subcore sums a row that many lookups have.
# * XLA lists the terms, by `reference.flatten_bags` for lookups and `build_runs` for updates.

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrec.embed.formats import is_packed
from jaxrec.embed.kernels.sparse_core.lookups import pooled_lookup as pooled_lookup
from jaxrec.embed.kernels.sparse_core.lookups import row_lookup as row_lookup
from jaxrec.embed.kernels.sparse_core.subcores import MOST_COLUMNS, refuse_chip
from jaxrec.embed.kernels.sparse_core.update import fused_update as fused_update
from jaxrec.embed.kernels.sparse_core.update import refuse_update

_OLDEST_JAX = (0, 12, 0)
# A TPU keeps a table in tiles of 128 columns, and a copy by index takes whole tiles of a row.
_TILE = 128


def refuse(primitive: str, arguments: Mapping[str, Any]) -> str | None:
    """Return why these kernels do not take a call; None: they do."""
    if jax.__version_info__ < _OLDEST_JAX:
        oldest = ".".join(map(str, _OLDEST_JAX))
        return f"it needs JAX {oldest} or later, and this is {jax.__version__}"
    if (reason := refuse_chip()) is not None:
        return reason
    table = arguments["table"]
    if is_packed(table) or table.dtype != jnp.float32:
        name = table.row_format.name if is_packed(table) else table.dtype
        return f"its rows are float32, and these are {name}"
    if 0 in table.shape:
        return "its table has rows and columns, and this one has none"
    if (dim := table.shape[1]) % _TILE or dim > MOST_COLUMNS:
        widths = f"a multiple of {_TILE} up to {MOST_COLUMNS}"
        return f"its rows have {widths} columns, and these have {dim}"
    if primitive == "fused_update":
        return refuse_update(arguments)
    if primitive == "pooled_lookup" and jnp.dtype(arguments["dtype"]) != jnp.float32:
        return f"its sums are float32, and these are {jnp.dtype(arguments['dtype'])}"
    return None
