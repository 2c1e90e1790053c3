"""Reads and writes of tables outside of training steps, whole or by some of their ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from jaxrec.embed.differentiation import current_differentiation, require_jaxrec_gradient
from jaxrec.embed.store import TableStore, check_state
from jaxrec.embed.taps import TappedModule
from jaxrec.optim.ema import AVERAGE_OFFSET


class TableAccess(TappedModule):
    """A module whose tables are read and written by name."""

    @property
    def _store(self) -> TableStore:
        return self.tables.get_value()

    def table(self, name: str) -> Float[Array, "num_embeddings embedding_dim"]:
        """Return the rows of one table, a copy.

        In the loss of `jaxrec.value_and_grad` the copy is differentiated: a softmax over all items
        or a penalty on a table trains it. The table then gets a dense gradient, and its row
        optimizer updates every row.

        Raises:
            KeyError: There is no table of that name.
            TypeError: A loss reads a table over a mesh, or one whose gradient exceeds a GiB.
        """
        return self.read_table(name)

    def table_average(self, name: str) -> Float[Array, "num_embeddings embedding_dim"]:
        """Return the moving averages of one table's rows, which `jaxrec.optim.ema` keeps, a copy.

        Raises:
            KeyError: There is no table of that name.
            ValueError: Its optimizer keeps no averages.
        """
        state = self._store.read_state(name)
        if AVERAGE_OFFSET not in state:
            raise ValueError(
                f"table {name!r} has no averages; give it the optimizer "
                "jaxrec.optim.ema(optimizer=..., decay=0.999)"
            )
        return self._store.read(name).astype(jnp.float32) + state[AVERAGE_OFFSET]

    def load_table(
        self, name: str, values: Float[Array | np.ndarray, "num_embeddings embedding_dim"]
    ) -> None:
        """Set the rows of one table, in place; its optimizer state stays.

        Raises:
            KeyError: If there is no table of that name.
            ValueError: If the shape is another.
        """
        self.tables.set_value(self._store.write(name, values))

    def table_state(self, name: str) -> dict[str, Array]:
        """Return the optimizer state of one table's rows, a copy.

        Raises:
            KeyError: If there is no table of that name.
        """
        return self._store.read_state(name)

    def load_table_state(self, name: str, state: Mapping[str, Array | np.ndarray]) -> None:
        """Set the optimizer state of one table's rows, in place.

        Raises:
            KeyError: If there is no table of that name.
            ValueError: If the state is not what the table's optimizer keeps.
        """
        self.tables.set_value(self._store.write_state(name, dict(state)))

    def rows(self, name: str, ids: Any) -> Shaped[np.ndarray, "n embedding_dim"]:
        """Return the rows of some ids of one table, on the host; the table is not copied.

        Call it between two steps, in the thread that trains. With several processes all of them
        call it with the same ids, and each gets all rows.

        Args:
            name: Name of the table.
            ids: Row indices, integers ``[n]``; they may repeat. A table with an open vocabulary
                (`jaxrec.tier.make`) takes ids or strings as batches have them. The row of an id
                that was evicted to a store is read there. An id without any row reads the values
                of evaluation (`jaxrec.tier.Dynamic.unknown`).

        Returns:
            The rows in the order of the ids, of the table's type.

        Raises:
            KeyError: There is no table of that name.
            TypeError: The ids are of another type; or this is called in a loss or in a compiled
                function.
            ValueError: An id is outside of the table, or the ids have several axes.

        Example:
            >>> import jaxrec
            >>> from flax import nnx
            >>> config = jaxrec.EmbeddingConfig("item", num_embeddings=100, embedding_dim=8)
            >>> embeddings = jaxrec.EmbeddingCollection([config], rngs=nnx.Rngs(0))
            >>> embeddings.load_rows("item", [7, 3], np.ones((2, 8)))
            >>> embeddings.rows("item", [3, 4, 3]).sum(axis=1) == 8
            array([ True, False,  True])
        """
        self._require_eager("rows", name)
        return self._store.rows_of(name, ids).read(with_state=False)["rows"]

    def load_rows(
        self, name: str, ids: Any, values: Float[Array | np.ndarray, "n embedding_dim"]
    ) -> None:
        """Set the rows of some ids of one table, in place; their optimizer state stays.

        With several processes all of them call it with the same arguments.

        Args:
            name: Name of the table.
            ids: Distinct ids, as for `rows`. In a table with an open vocabulary each has a row of
                its own, in the table or in its store.
            values: Rows in the order of the ids; converted to the table's type.

        Raises:
            KeyError, TypeError: As for `rows`.
            ValueError: As for `rows`; an id is given twice or has no row of its own; or the values
                have another shape.
        """
        self._require_eager("load_rows", name)
        self.tables.set_value(self._store.rows_of(name, ids).write({"rows": values}))

    def row_state(self, name: str, ids: Any) -> dict[str, np.ndarray]:
        """Return the optimizer state of some ids of one table, on the host.

        Args:
            name: Name of the table.
            ids: Ids, as for `rows`.

        Returns:
            Arrays ``[n, ...]`` by the names of `table_state`.

        Raises:
            KeyError, TypeError, ValueError: As for `rows`.
        """
        self._require_eager("row_state", name)
        values = self._store.rows_of(name, ids).read()
        del values["rows"]
        return values

    def load_row_state(self, name: str, ids: Any, state: Mapping[str, Array | np.ndarray]) -> None:
        """Set the optimizer state of some ids of one table, in place; their rows stay.

        Args:
            name: Name of the table.
            ids: Distinct ids, as for `load_rows`.
            state: Arrays ``[n, ...]`` by the names of `row_state`.

        Raises:
            KeyError, TypeError: As for `rows`.
            ValueError: As for `load_rows`, or the state is not what the table's optimizer keeps.
        """
        self._require_eager("load_row_state", name)
        check_state(name, self._store.checkpoint_shapes(name).state, state)
        self.tables.set_value(self._store.rows_of(name, ids).write(state))

    def _require_eager(self, method: str, name: str) -> None:
        """Raise where rows would be read while a function is traced or differentiated."""
        remedy = (
            "look the ids up by calling the collection with a batch, or call "
            f"{method} before and pass the rows in"
        )
        if current_differentiation() is not None:
            raise TypeError(
                f"a loss calls {method}({name!r}, ...), through which no gradient flows; {remedy}"
            )
        # A constant is a tracer where a function is traced, whatever its arguments are.
        if isinstance(jnp.zeros(()), jax.core.Tracer):
            raise TypeError(
                f"{method}({name!r}, ...) reads or writes rows from the host, which a function "
                f"that jax.jit or nnx.jit compiles cannot do; {remedy}"
            )
        if not self.deterministic and self.is_trainable:
            require_jaxrec_gradient(None)
