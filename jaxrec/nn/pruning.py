"""In-training embedding pruning: tables with more ids than rows give rows to the ids used most."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float32, Int32

from jaxrec.embed import EmbeddingBagCollection, EmbeddingCollection
from jaxrec.embed.batch_checks import check_ids
from jaxrec.ragged import JaggedArray, KeyedArray, KeyedJaggedArray, complete_cumsum
from jaxrec.ragged.arrays import on_auto_axes, take
from jaxrec.ragged.bounds import BAD_ID
from jaxrec.ragged.offsets import without_padding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Addresses:
    """The row and the decayed number of uses of each id, ``[num_ids]``.

    Ids without a row of their own have the table's last row.
    """

    rows: Int32[Array, " ids"]
    uses: Float32[Array, " ids"]


class AddressVariable(nnx.Variable):
    """Variable of a table's `Addresses`."""


def first_addresses(num_ids: int, num_rows: int) -> Addresses:
    """Return addresses that give rows to the first ids, and the shared last row to all others."""
    rows = jnp.minimum(jnp.arange(num_ids, dtype=jnp.int32), num_rows - 1)
    return Addresses(rows, jnp.zeros(num_ids, jnp.float32))


def count_uses(addresses: Addresses, column: JaggedArray) -> Addresses:
    """Add the occurrences of a column's ids to ``addresses.uses``, over all devices of a mesh."""
    # Addresses are replicated, so over a mesh each device needs the counts of all devices.
    ids = jnp.asarray(column.values)
    ones = jnp.ones_like(ids, jnp.float32)
    occurs = without_padding(ones, complete_cumsum(column.lengths))

    def count(ids: Array, occurs: Array, uses: Array) -> Array:
        return uses.at[ids].add(occurs, mode="drop")

    uses = on_auto_axes(count, ids, occurs, addresses.uses, is_replicated=True)
    return dataclasses.replace(addresses, uses=uses)


def find_rows(addresses: Addresses, column: JaggedArray) -> Int32[Array, "*devices capacity"]:
    """Return the row of each id of a column, `BAD_ID` for ids outside; also over a mesh."""
    ids = jnp.asarray(column.values)
    ids = jnp.where(ids < 0, addresses.rows.shape[0], ids)  # JAX counts negative ones from the end
    return take(addresses.rows, ids, fill_value=BAD_ID)


@jax.jit(static_argnums=(1, 2))
def reassign(
    addresses: Addresses, num_rows: int, decay: float = 1.0
) -> tuple[Addresses, Bool[Array, " rows"]]:
    """Give rows to the ids used most; return new addresses, and which rows changed, ``[num_rows]``.

    The last of ``num_rows`` rows is shared. ``decay`` multiplies the uses so far.
    """
    # Among equally used ids those with a row come first, so that rows do not change in vain, then
    # lower ids. An id that keeps a row keeps the same one: its embedding is not moved.
    rows, uses, shared = addresses.rows, addresses.uses, num_rows - 1
    has_row = rows != shared
    most_used = jnp.lexsort((~has_row, -uses))[:shared]
    gets_row = jnp.zeros(rows.shape, bool).at[most_used].set(True)
    stays, comes = gets_row & has_row, gets_row & ~has_row
    is_occupied = jnp.zeros(num_rows, bool).at[shared].set(True)
    is_occupied = is_occupied.at[jnp.where(stays, rows, num_rows)].set(True, mode="drop")
    # The k-th newcomer gets the k-th free row. A stable sort puts the free rows first, in order.
    free_rows = jnp.argsort(is_occupied).astype(jnp.int32)
    place = jnp.cumsum(comes, dtype=jnp.int32) - 1
    new = jnp.where(comes, free_rows.at[place].get(mode="clip"), shared)
    changed = jnp.zeros(num_rows, bool).at[jnp.where(comes, new, num_rows)].set(True, mode="drop")
    return Addresses(jnp.where(stays, rows, new), uses * decay), changed


class PrunedEmbeddings(nnx.Module):
    """Tables with fewer rows than ids: in training, rows go from unused ids to used ones.

    In-training embedding pruning, as in TorchRec's ITEPEmbeddingBagCollection and
    ITEPEmbeddingCollection. The ids that occur most have their own rows. Call `prune` every
    thousand steps or so to choose these ids again. There are two differences to TorchRec. Ids
    without a row share the table's last row, which no id owns (in TorchRec the row of id 0). An id
    that gets a row starts with the values of the shared row (in TorchRec with zeros).

    Args:
        embeddings: The tables, with as many rows as fit in memory.
        num_ids: Number of ids of each pruned table, more than its rows. Other tables are not
            pruned.
        decay: Factor of the counted uses at each `prune`, 0.98 in FBGEMM.

    Attributes:
        addresses: The `Addresses` of each pruned table: 8 bytes per id, on every device of a mesh.

    Raises:
        ValueError: A table does not exist, has fewer than two rows, or does not have more ids than
            rows.

    Example:
        >>> import jaxrec
        >>> tables = [jaxrec.EmbeddingBagConfig("user", num_embeddings=3, embedding_dim=4)]
        >>> embeddings = jaxrec.EmbeddingBagCollection(tables, rngs=nnx.Rngs(0))
        >>> pruned = PrunedEmbeddings(embeddings, {"user": 1000})
        >>> batch = KeyedJaggedArray.from_lists({"user": [[7, 999], [7]]}, bounds=pruned.bounds)
        >>> pruned(batch)["user"].shape
        (2, 4)
        >>> pruned.prune()  # ids that got a row
        {'user': 2}
        >>> pruned.addresses["user"].get_value().rows[jnp.array([7, 8, 999])].tolist()
        [0, 2, 1]
    """

    def __init__(
        self,
        embeddings: EmbeddingBagCollection | EmbeddingCollection,
        num_ids: Mapping[str, int],
        *,
        decay: float = 0.98,
    ):
        sizes = {table.name: table.num_embeddings for table in embeddings.configs}
        for name, count in num_ids.items():
            if name not in sizes:
                raise ValueError(f"num_ids names {name!r}, which is not a table of {sorted(sizes)}")
            if not 2 <= sizes[name] < count:
                raise ValueError(
                    f"table {name!r} has {sizes[name]} rows for {count} ids; a pruned table has at "
                    "least 2 and fewer than it has ids; leave it out of num_ids, or change one"
                )
        self.embeddings = embeddings
        self.decay = decay
        # Table name by feature, for pruned tables only.
        self.pruned = {
            feature: table.name
            for table in embeddings.configs
            if table.name in num_ids
            for feature in table.feature_names
        }
        # Flax's `model.eval()` sets this, as it does for dropout; no uses are counted then.
        self.deterministic = False
        self.addresses = nnx.Dict(
            {
                name: AddressVariable(first_addresses(count, sizes[name]))
                for name, count in num_ids.items()
            }
        )

    @property
    def bounds(self) -> dict[str, int]:
        """Number of ids by feature, the ``bounds`` for packing."""
        own = {
            feature: self.addresses[table].get_value().rows.shape[0]
            for feature, table in self.pruned.items()
        }
        return self.embeddings.bounds | own

    def __call__(self, features: KeyedJaggedArray) -> KeyedArray | dict[str, JaggedArray]:
        """Look a batch up in the collection, and in training count its ids.

        Raises:
            ValueError: An id is outside ``num_ids``. Under jit it makes the result NaN instead.
            KeyError: The batch lacks a feature.
        """
        check_ids(features, self.bounds, always=False)
        values = []
        for key, column in features.to_dict().items():
            if key not in self.pruned:
                values.append(jnp.asarray(column.values))
                continue
            variable = self.addresses[self.pruned[key]]
            if not self.deterministic:
                variable.set_value(count_uses(variable.get_value(), column))
            values.append(find_rows(variable.get_value(), column))
        return self.embeddings(dataclasses.replace(features, values=jnp.concatenate(values, -1)))

    def prune(self) -> dict[str, int]:
        """Give rows to the ids used most; call it between steps, outside of compiled functions.

        A row that gets another id starts with the values of the shared row and new optimizer state.
        Only such rows are written; no table is copied.

        Returns:
            For each pruned table the number of ids that got a row.
        """
        tables = {table.name: table for table in self.embeddings.configs}
        admitted = {}
        for name, variable in self.addresses.items():
            num_rows, dim = tables[name].num_embeddings, tables[name].embedding_dim
            addresses, changed = reassign(variable.get_value(), num_rows, self.decay)
            variable.set_value(addresses)
            rows = np.flatnonzero(changed)
            admitted[name] = rows.size
            if not rows.size:
                continue
            # An id without a row trained the shared row, so its own row goes on from there.
            shared = self.embeddings.rows(name, [num_rows - 1])
            self.embeddings.load_rows(name, rows, shared.repeat(rows.size, axis=0))
            optimizer = self.embeddings.tables.get_value().rows_of(name, rows).optimizer
            self.embeddings.load_row_state(name, rows, optimizer.init(rows.size, dim))
        return admitted
