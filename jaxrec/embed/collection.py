"""Collections of tables as Flax modules."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Shaped

from jaxrec import optim
from jaxrec.embed.batch_checks import TracedCapacities, check_ids
from jaxrec.embed.config import EmbeddingBagConfig, EmbeddingConfig, TableConfig
from jaxrec.embed.functional import init_tables
from jaxrec.embed.outputs import refuse_weighted_max, warn_of_unused_weights
from jaxrec.embed.padding import zero_padding_rows
from jaxrec.embed.stash import Stash, check_stash
from jaxrec.embed.store import StoreFactory, TableStore, check_state
from jaxrec.embed.taps import (
    TappedModule,
    current_differentiation,
    require_jaxrec_gradient,
    tapped_modules,
)
from jaxrec.optim.wrappers import AVERAGE_OFFSET
from jaxrec.ragged import JaggedArray, KeyedArray, KeyedJaggedArray
from jaxrec.ragged.raw_ids import is_raw, refuse
from jaxrec.ragged.shared_bags import with_known_capacities

# The random key of each collection, for rows that are drawn after the tables were made (in open
# vocabularies). As an attribute of the module it would be static, and Flax would compile the step
# again for each key.
_keys: weakref.WeakKeyDictionary[Collection, Array] = weakref.WeakKeyDictionary()


class TableVariable(nnx.Variable):
    """Variable that holds a collection's `TableStore`.

    It is not an `nnx.Param`: optax, weight decay and clipping never see tables.
    """


class Collection(TappedModule):
    """Base of `EmbeddingBagCollection` and `EmbeddingCollection`.

    Attributes:
        tables: A `TableVariable` with the store of the tables and their optimizer state.
        stash: See `jaxrec.embed.stash`.
    """

    _config: ClassVar[type[TableConfig]]

    def __init__(
        self,
        tables: Sequence[TableConfig],
        *,
        optimizer: optim.RowOptimizer | None,
        is_weighted: bool,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
        store: StoreFactory | None,
        stash: Stash | None,
    ):
        tables = self._checked_tables(tables)
        optimizer = optim.rowwise_adagrad() if optimizer is None else optimizer
        name = type(self).__name__
        if not isinstance(optimizer, optim.RowOptimizer):
            raise TypeError(
                f"{name}: optimizer is a row optimizer such as jaxrec.optim.rowwise_adagrad(), got "
                f"{optimizer!r}; optax transformations are for the dense part, in jaxrec.Optimizer"
            )
        if not isinstance(rngs, nnx.Rngs):
            raise TypeError(f"{name}: rngs is a flax.nnx.Rngs such as nnx.Rngs(0), got {rngs!r}")
        if is_weighted:
            refuse_weighted_max(tables)
        check_stash(stash)
        super().__init__()
        self.stash = stash
        key = rngs.params()
        self.tables = TableVariable(init_tables(tables, optimizer, key, store))
        # `nnx.jit` and `nnx.eval_shape` may make the model: a tracer would be dead afterwards.
        if not isinstance(key, jax.core.Tracer):
            _keys[self] = key
        # With all tables frozen there is nothing to miss, and `jax.grad` of the model is allowed.
        self.is_trainable = any(
            table.trainable and (table.optimizer or optimizer).is_trained for table in tables
        )
        self.is_weighted = is_weighted
        self.dtype = jnp.dtype(dtype).name
        # Sees each compilation of a step, since a collection is called once for each trace.
        self._traced_capacities = TracedCapacities()

    @property
    def first_key(self) -> Array | None:
        """Random key of the tables' first values; None in copies, and if `jax.jit` made them."""
        return _keys.get(self)

    @property
    def configs(self) -> tuple[TableConfig, ...]:
        """The tables' configurations, in order."""
        return self._store.configs

    @property
    def bounds(self) -> dict[str, int]:
        """Number of valid ids of each feature, for ``bounds=`` of the batch's constructors."""
        return self._store.bounds

    @property
    def _store(self) -> TableStore:
        return self.tables.get_value()

    def table(self, name: str) -> Float[Array, "num_embeddings embedding_dim"]:
        """Return a copy of one table's rows.

        In the loss of `jaxrec.value_and_grad` the copy is differentiated: a softmax over all items,
        or a penalty on the table, trains it. The step then updates every row of the table.

        Raises:
            KeyError: There is no table of that name.
            TypeError: A loss reads a table over a mesh, or one whose gradient exceeds a GiB.
        """
        return self.read_table(name)

    def table_average(self, name: str) -> Float[Array, "num_embeddings embedding_dim"]:
        """Return the moving averages of one table's rows that `jaxrec.optim.ema` keeps.

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

        The row of a padding id becomes zeros, whatever its values.

        Raises:
            KeyError: There is no table of that name.
            ValueError: The shape is another.
        """
        store = self._store.write(name, values)
        self.tables.set_value(zero_padding_rows(store, {name}))

    def table_state(self, name: str) -> dict[str, Array]:
        """Return a copy of one table's optimizer state, arrays of ``num_embeddings`` rows.

        Raises:
            KeyError: There is no table of that name.
        """
        return self._store.read_state(name)

    def load_table_state(self, name: str, state: Mapping[str, Array | np.ndarray]) -> None:
        """Set the optimizer state of one table's rows, in place.

        Raises:
            KeyError: There is no table of that name.
            ValueError: The state is not what the table's optimizer keeps.
        """
        self.tables.set_value(self._store.write_state(name, dict(state)))

    def rows(self, name: str, ids: Any) -> Shaped[np.ndarray, "n embedding_dim"]:
        """Return the rows of some ids on the host, without a copy of the table.

        Call it between two steps, in the thread that trains. With several processes, all of them
        call it with the same ids, and each gets all rows.

        Args:
            name: Name of the table.
            ids: Row indices, integers ``[n]``, in any order, repeated or not. A table with an open
                vocabulary (`jaxrec.tier.make`) takes the ids or strings of batches. If an id's row
                was evicted to a store, it is read there. An id without a row reads what it reads in
                evaluation (`jaxrec.tier.Dynamic.unknown`).

        Returns:
            ``[n, embedding_dim]`` in the order of the ids, of the table's type.

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
        """Set the rows of some ids, in place; their optimizer state stays.

        With several processes, all of them call it with the same arguments.

        Args:
            name: Name of the table.
            ids: Distinct ids, as for `rows`. In a table with an open vocabulary, each must have a
                row already, in the table or in its store.
            values: ``[n, embedding_dim]`` in the order of the ids; converted to the table's type.

        Raises:
            KeyError, TypeError: As for `rows`.
            ValueError: As for `rows`; an id is given twice or has no row of its own; the values
                have another shape, or are not zeros for the padding id.
        """
        self._require_eager("load_rows", name)
        self._refuse_padding_row(name, ids, values)
        self.tables.set_value(self._store.rows_of(name, ids).write({"rows": values}))

    def row_state(self, name: str, ids: Any) -> dict[str, np.ndarray]:
        """Return the optimizer state of some ids' rows, on the host.

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
        """Set the optimizer state of some ids' rows, in place; the rows stay.

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

    def _refuse_padding_row(self, name: str, ids: Any, values: Array | np.ndarray) -> None:
        """Raise a ValueError if the row of a padding id would get a value other than zero."""
        row = {config.name: config.padding_id for config in self.configs}.get(name)
        if row is None:
            return
        # Ids and values of other shapes are errors of the write itself.
        is_padding = np.asarray(ids) == row
        if np.shape(is_padding) == np.shape(values)[:1] and np.any(np.asarray(values)[is_padding]):
            raise ValueError(
                f"table {name!r} has padding_id={row}, whose row stays zeros, got other values for "
                "it; leave the id out, or give it zeros"
            )

    def _require_eager(self, method: str, name: str) -> None:
        """Raise a TypeError in a function that is being traced or differentiated."""
        remedy = (
            "look the ids up by calling the collection with a batch, or call "
            f"{method} before and pass the rows in"
        )
        if current_differentiation() is not None:
            raise TypeError(
                f"a loss calls {method}({name!r}, ...), through which no gradient flows; {remedy}"
            )
        # While a function is traced, even a new constant is a tracer.
        if isinstance(jnp.zeros(()), jax.core.Tracer):
            raise TypeError(
                f"{method}({name!r}, ...) reads or writes rows from the host, which a function "
                f"that jax.jit or nnx.jit compiles cannot do; {remedy}"
            )
        if not self.deterministic and self.is_trainable:
            require_jaxrec_gradient(None)

    def _checked_tables(self, tables: Sequence[TableConfig]) -> tuple[TableConfig, ...]:
        """Return the tables as a tuple; raise a TypeError if one is of another kind."""
        wanted = self._config.__name__
        if isinstance(tables, TableConfig | str | Mapping) or not isinstance(tables, Iterable):
            raise TypeError(
                f"{type(self).__name__} takes a sequence of {wanted}s, such as [{wanted}(...)], "
                f"got {tables!r}"
            )
        tables = tuple(tables)
        for table in tables:
            if not isinstance(table, self._config):
                raise TypeError(f"{type(self).__name__} takes {wanted}s, got {table!r}")
        return tables

    def _check_batch(self, features: KeyedJaggedArray) -> None:
        """Raise an error if a batch cannot be looked up, and record its capacities."""
        if not isinstance(features, KeyedJaggedArray):
            raise TypeError(
                f"{type(self).__name__} is called with a KeyedJaggedArray, got "
                f"{type(features).__name__}; make one by KeyedJaggedArray.from_lists, from_dense, "
                "from_lengths or from_dict"
            )
        if is_raw(features.values):
            refuse("features")
        check_ids(features, self._store.layout.bounds, always=self.debug)
        self._traced_capacities.add(type(self).__name__, features)


def find_collections(model: nnx.Module) -> dict[str, Collection]:
    """Return a model's collections by path, such as "ranker/embeddings"; shared ones once."""
    modules = tapped_modules(model)
    return {path: each for path, each in modules.items() if isinstance(each, Collection)}


class EmbeddingBagCollection(Collection):
    """Tables whose rows are pooled over each bag of ids, to their sum, mean or maximum.

    Args:
        tables: The tables. Those of equal width, type and optimizer are stored and looked up
            together.
        optimizer: Row optimizer of the tables that name none; None: row-wise Adagrad.
            `jaxrec.Optimizer.update` applies it.
        is_weighted: Whether each row is multiplied by its id's weight. A mean still divides by the
            number of ids, as TorchRec's does. Tables with max pooling take no weights.
        dtype: Type of the pooled embeddings; sums are taken in float32.
        rngs: Gives the random key of the tables' first values.
        store: Makes the `TableStore` that holds the rows; None: `Tables` on one device, or on the
            mesh in a function that `jaxrec.shard` calls.
        stash: Where a lookup's residuals, which its update needs, stay while the dense part runs.
            None: on the device. "host": in pinned host memory. "recompute": nowhere, they are
            computed again. Results are the same.

    Raises:
        TypeError, ValueError: If the tables cannot form a collection.

    Example:
        >>> import jaxrec
        >>> from flax import nnx
        >>> config = jaxrec.EmbeddingBagConfig("user", num_embeddings=100, embedding_dim=8)
        >>> embeddings = EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
        >>> batch = jaxrec.KeyedJaggedArray.from_lists({"user": [[3, 5], [], [7]]})
        >>> embeddings(batch)["user"].shape
        (3, 8)
    """

    _config: ClassVar[type[TableConfig]] = EmbeddingBagConfig

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        *,
        optimizer: optim.RowOptimizer | None = None,
        is_weighted: bool = False,
        dtype: DTypeLike = "float32",
        rngs: nnx.Rngs,
        store: StoreFactory | None = None,
        stash: Stash | None = None,
    ):
        super().__init__(
            tables,
            optimizer=optimizer,
            is_weighted=is_weighted,
            dtype=dtype,
            rngs=rngs,
            store=store,
            stash=stash,
        )

    def __call__(self, features: KeyedJaggedArray) -> KeyedArray:
        """Return the pooled embeddings of a batch.

        Args:
            features: The batch; keys that no table reads are ignored.

        Returns:
            ``[batch, sum(dims)]``: a block of columns for each feature of each table, by table and
            then by feature. A block's key is the feature, or ``feature@table`` if several tables
            read the feature. Empty bags give zeros.

        Raises:
            KeyError: If the batch lacks a feature.
            ValueError: If an id is outside its table, or the collection is weighted and the batch
                has no weights. Inside of `jax.jit`, an id outside its table makes the result NaN.

        Warns:
            UserWarning: The batch has weights and the collection is not weighted.
        """
        self._check_batch(features)
        if not self.is_weighted:
            warn_of_unused_weights(features, self.configs)
        pooled = self.lookup(features, is_weighted=self.is_weighted, dtype=self.dtype)
        return cast(KeyedArray, pooled)


class EmbeddingCollection(Collection):
    """Tables whose rows are looked up one per id, for sequences.

    Args:
        tables: The tables; they may differ in width.
        optimizer: Row optimizer of the tables that name none; None: row-wise Adagrad.
            `jaxrec.Optimizer.update` applies it.
        need_indices: Whether each `JaggedArray` of the result has the ids as its ``weights``.
        dtype: Type of the embeddings.
        rngs: Gives the random key of the tables' first values.
        store: Makes the `TableStore` that holds the rows; None: `Tables` on one device, or on the
            mesh in a function that `jaxrec.shard` calls.
        stash: Where a lookup's residuals, which its update needs, stay while the dense part runs.
            None: on the device. "host": in pinned host memory. "recompute": nowhere, they are
            computed again. Results are the same.

    Raises:
        TypeError, ValueError: If the tables cannot form a collection.

    Example:
        >>> import jaxrec
        >>> from flax import nnx
        >>> config = jaxrec.EmbeddingConfig("item", num_embeddings=100, embedding_dim=8)
        >>> embeddings = EmbeddingCollection([config], rngs=nnx.Rngs(0))
        >>> batch = jaxrec.KeyedJaggedArray.from_lists({"item": [[3, 5], [], [7]]})
        >>> embeddings(batch)["item"].values.shape  # 3 ids, padded to the capacity
        (8, 8)
    """

    _config: ClassVar[type[TableConfig]] = EmbeddingConfig

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        *,
        optimizer: optim.RowOptimizer | None = None,
        need_indices: bool = False,
        dtype: DTypeLike = "float32",
        rngs: nnx.Rngs,
        store: StoreFactory | None = None,
        stash: Stash | None = None,
    ):
        super().__init__(
            tables,
            optimizer=optimizer,
            is_weighted=False,
            dtype=dtype,
            rngs=rngs,
            store=store,
            stash=stash,
        )
        self.need_indices = need_indices

    def __call__(self, features: KeyedJaggedArray) -> dict[str, JaggedArray]:
        """Return the embeddings of a batch's ids.

        Args:
            features: The batch; keys that no table reads are ignored.

        Returns:
            For each feature of each table a `JaggedArray` with ``values`` of
            ``[capacity, embedding_dim]``, zeros at padding. Its key is the feature, or
            ``feature@table`` if several tables read the feature. If samples share bags
            (``inverse_indices``), each sample has the embeddings of its own bag, and capacities
            are the batch's `KeyedJaggedArray.sample_capacities`.

        Raises:
            KeyError: If the batch lacks a feature.
            ValueError: If an id is outside its table. Inside of `jax.jit`, its embedding is NaN.
        """
        self._check_batch(features)
        # Computed once, for the lookup and for the expansion below.
        features = with_known_capacities(features)
        activations = cast(dict[str, Array], self.lookup(features, dtype=self.dtype))
        outputs = self._store.layout.outputs
        # Only the features that are read: expanding copies ids, and a batch may have many others.
        read = features.select(list(dict.fromkeys(output.feature for output in outputs)))
        read, result = read.expanded(), {}
        for output in outputs:
            column = read[output.feature]
            indices = column.values if self.need_indices else None
            result[output.key] = JaggedArray(activations[output.key], column.lengths, indices)
        return result
