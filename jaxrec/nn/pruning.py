"""In-training embedding pruning: more ids than rows, and the rows go to the ids that are used."""

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
    """The row and the use count of each id of a table.

    Attributes:
        rows: ``[num_ids]`` the row of each id; the table's last row for ids without a row.
        uses: ``[num_ids]`` occurrences of each id, old ones counting less.
    """

    rows: Int32[Array, " ids"]
    uses: Float32[Array, " ids"]


class AddressVariable(nnx.Variable):
    """Holds a table's `Addresses`."""


def first_addresses(num_ids: int, num_rows: int) -> Addresses:
    """Return addresses with rows for the first ids, the shared last row for all others."""
    rows = jnp.minimum(jnp.arange(num_ids, dtype=jnp.int32), num_rows - 1)
    return Addresses(rows, jnp.zeros(num_ids, jnp.float32))


def count_uses(addresses: Addresses, column: JaggedArray) -> Addresses:
    """Add the occurrences of a column's ids; also of a column on a mesh."""
    ids = jnp.asarray(column.values)
    ones = jnp.ones_like(ids, jnp.float32)
    occurs = without_padding(ones, complete_cumsum(column.lengths))

    def count(ids: Array, occurs: Array, uses: Array) -> Array:
        return uses.at[ids].add(occurs, mode="drop")

    uses = on_auto_axes(count, ids, occurs, addresses.uses, is_replicated=True)
    return dataclasses.replace(addresses, uses=uses)


def find_rows(addresses: Addresses, column: JaggedArray) -> Int32[Array, "*devices capacity"]:
    """Return the row of each of a column's ids, `BAD_ID` of those outside; also on a mesh."""
    ids = jnp.asarray(column.values)
    ids = jnp.where(ids < 0, addresses.rows.shape[0], ids)  # JAX counts negative ones from the end
    return take(addresses.rows, ids, fill_value=BAD_ID)


@jax.jit(static_argnums=(1, 2))
def reassign(
    addresses: Addresses, num_rows: int, decay: float = 1.0
) -> tuple[Addresses, Bool[Array, " rows"]]:
    """Give the rows to the ids that are used most; an id that keeps a row keeps the same one.

    Among equally used ids, ids with a row come first, then lower ids.

    Args:
        addresses: Rows and uses so far.
        num_rows: Number of rows of the table; the last is shared.
        decay: Factor of the uses so far.

    Returns:
        The new addresses, and ``[num_rows]`` which rows have another id than before.
    """
    rows, uses, shared = addresses.rows, addresses.uses, num_rows - 1
    has_row = rows != shared
    most_used = jnp.lexsort((~has_row, -uses))[:shared]
    gets_row = jnp.zeros(rows.shape, bool).at[most_used].set(True)
    stays, comes = gets_row & has_row, gets_row & ~has_row
    is_occupied = jnp.zeros(num_rows, bool).at[shared].set(True)
    is_occupied = is_occupied.at[jnp.where(stays, rows, num_rows)].set(True, mode="drop")
    # The k-th newcomer gets the k-th free row; sorting is stable.
    free_rows = jnp.argsort(is_occupied).astype(jnp.int32)
    place = jnp.cumsum(comes, dtype=jnp.int32) - 1
    new = jnp.where(comes, free_rows.at[place].get(mode="clip"), shared)
    changed = jnp.zeros(num_rows, bool).at[jnp.where(comes, new, num_rows)].set(True, mode="drop")
    return Addresses(jnp.where(stays, rows, new), uses * decay), changed


class PrunedEmbeddings(nnx.Module):
    """Tables with fewer rows than ids: in training, rows go from unused ids to used ones.

    In-training embedding pruning, as TorchRec's ITEPEmbeddingBagCollection and
    ITEPEmbeddingCollection do it: the ids that occur most have rows of their own, and `prune`,
    called every thousand steps or so, decides anew which those are. Unlike there, ids without a row
    share the table's last row, which belongs to no id (in TorchRec they share the row of id 0), and
    an id that gets a row starts with the values of the shared row (in TorchRec with zeros).

    Args:
        embeddings: The tables, with as many rows as fit in memory.
        num_ids: For each pruned table the number of its ids; more than its rows. Other tables are
            not pruned.
        decay: Factor of the counted uses at each `prune`, 0.98 in FBGEMM.

    Attributes:
        addresses: For each pruned table its `Addresses`: 8 bytes an id, on every device of a mesh.

    Raises:
        ValueError: A table has no more ids than rows, fewer than two rows, or does not exist.

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
        # The table of each feature whose table is pruned.
        self.pruned = {
            feature: table.name
            for table in embeddings.configs
            if table.name in num_ids
            for feature in table.feature_names
        }
        self.deterministic = False
        self.addresses = nnx.Dict(
            {
                name: AddressVariable(first_addresses(count, sizes[name]))
                for name, count in num_ids.items()
            }
        )

    @property
    def bounds(self) -> dict[str, int]:
        """For each feature the number of its ids, the bound for packing."""
        own = {
            feature: self.addresses[table].get_value().rows.shape[0]
            for feature, table in self.pruned.items()
        }
        return self.embeddings.bounds | own

    def __call__(self, features: KeyedJaggedArray) -> KeyedArray | dict[str, JaggedArray]:
        """Look a batch up in the collection; in training, count its ids.

        Raises:
            ValueError: An id is outside ``num_ids`` (seen outside of `jax.jit`; inside, it makes
                the result NaN).
            KeyError: If the batch lacks a feature.
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

        A row that changes hands starts as the shared row is, with fresh optimizer state. Only these
        rows are written, and no table is copied.

        Returns:
            For each pruned table how many ids got a row that had none.
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
            shared = self.embeddings.rows(name, [num_rows - 1])
            self.embeddings.load_rows(name, rows, shared.repeat(rows.size, axis=0))
            optimizer = self.embeddings.tables.get_value().rows_of(name, rows).optimizer
            self.embeddings.load_row_state(name, rows, optimizer.init(rows.size, dim))
        return admitted
