"""Tables as pytrees without a module, for Linen, Equinox and plain JAX."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence

from jaxtyping import Array, DTypeLike

from jaxrec.embed.config import TableConfig
from jaxrec.embed.layout import layout_tables
from jaxrec.embed.outputs import warn_of_unused_weights
from jaxrec.embed.padding import zero_padding_rows
from jaxrec.embed.row_gradients import Activations, Residuals, Routes
from jaxrec.embed.store import StoreFactory, TableStore
from jaxrec.embed.tables import Tables
from jaxrec.optim import RowOptimizer
from jaxrec.optim.hyperparameters import Step
from jaxrec.ragged import KeyedJaggedArray

# A context variable, since `jaxrec.shard` calls the user's function that makes a model, and that
# function takes no arguments.
_default_factory: contextvars.ContextVar[StoreFactory] = contextvars.ContextVar(
    "jaxrec_store_factory", default=Tables.init
)


@contextlib.contextmanager
def default_store(factory: StoreFactory) -> Iterator[None]:
    """Within this context, tables that are made without ``store=`` come from this factory."""
    token = _default_factory.set(factory)
    try:
        yield
    finally:
        _default_factory.reset(token)


def store_factory() -> StoreFactory:
    """Return the factory of tables that are made without ``store=``."""
    return _default_factory.get()


def init_tables(
    configs: Sequence[TableConfig],
    optimizer: RowOptimizer,
    key: Array,
    store: StoreFactory | None = None,
) -> TableStore:
    """Make fresh tables.

    Args:
        configs: The tables, all `EmbeddingBagConfig` or all `EmbeddingConfig`.
        optimizer: Optimizer of the tables that name none.
        key: Random key. A table's first values depend on it and on the table's name alone.
        store: Factory of the store. None: `Tables` on one device, or, in a function that
            `jaxrec.shard` calls, tables over its mesh.

    Raises:
        ValueError, TypeError: The tables cannot form a collection (see `layout_tables`).

    Example:
        >>> import jax, jaxrec
        >>> config = jaxrec.EmbeddingBagConfig("user", num_embeddings=10, embedding_dim=4)
        >>> tables = init_tables([config], jaxrec.optim.sgd(0.1), jax.random.key(0))
        >>> tables.read("user").shape
        (10, 4)
    """
    tables = (store or store_factory())(layout_tables(configs, optimizer), key)
    return zero_padding_rows(tables)


def lookup(
    tables: TableStore,
    features: KeyedJaggedArray,
    *,
    is_weighted: bool = False,
    dtype: DTypeLike = "float32",
    routes: Routes | None = None,
) -> tuple[Activations, Residuals]:
    """Look up all features of a batch.

    The result is differentiable with respect to the batch's weights, and not with respect to the
    tables: give the gradient of the activations to `apply_gradients`.

    Args:
        tables: The tables.
        features: The batch; keys that no table reads are ignored.
        is_weighted: Whether rows are multiplied by the batch's weights.
        dtype: Type of the activations.
        routes: Result of `TableStore.route` for the batch; None: compute it now.

    Returns:
        The activations, and the residuals for `apply_gradients`.

        Pooled tables give a `KeyedArray` of ``[batch, sum(dims)]``, blocks by table and then by
        feature. Over a mesh its batch axis is sharded.

        Per-id tables give a dict with ``[capacity, dim]`` for each output, zeros at padding. Over a
        mesh that is ``[devices, capacity, dim]``. If samples share bags (``inverse_indices``), the
        rows are those of the ids of ``features.expanded()``, sample by sample.

        An id outside its table gives NaN and updates nothing; `KeyedJaggedArray`'s constructors
        check ids on the host, with an error.

    Raises:
        KeyError: The batch lacks a feature.
        ValueError: ``is_weighted`` and the batch has no weights, or a table has max pooling;
            features have different numbers of bags and no ``inverse_indices`` say which sample has
            which; the batch lies over a mesh and the tables do not, or the reverse.

    Warns:
        UserWarning: The tables are pooled, the batch has weights, and ``is_weighted`` is False.

    Example:
        >>> import jax, jaxrec
        >>> config = jaxrec.EmbeddingBagConfig("user", 10, 2, initializer="ones")
        >>> tables = jaxrec.embed.init_tables([config], jaxrec.optim.sgd(0.1), jax.random.key(0))
        >>> batch = jaxrec.KeyedJaggedArray.from_lists({"user": [[1, 2], []]})
        >>> activations, residuals = lookup(tables, batch)
        >>> activations["user"].tolist()
        [[2.0, 2.0], [0.0, 0.0]]
    """
    if not is_weighted:
        warn_of_unused_weights(features, tables.configs)
    return tables.lookup(features, is_weighted=is_weighted, dtype=dtype, routes=routes)


def apply_gradients(
    tables: TableStore, residuals: Residuals, gradients: Activations, step: Step | int
) -> TableStore:
    """Update the rows of one lookup: the second half of a training step.

    A row is updated once by the sum of its gradients, however often it occurs. Other rows and their
    state stay as they are. Under `jax.jit` with ``tables`` donated, this happens in place.

    Args:
        tables: The tables that were looked up.
        residuals: Residuals that `lookup` returned beside the activations.
        gradients: Gradient of the loss with respect to the activations, shaped as they are.
        step: Number of updates made before, 0 at the first.

    Returns:
        The new tables.

    Example:
        >>> import jax, jaxrec
        >>> config = jaxrec.EmbeddingBagConfig("user", 3, 1, initializer="ones")
        >>> tables = jaxrec.embed.init_tables([config], jaxrec.optim.sgd(0.5), jax.random.key(0))
        >>> batch = jaxrec.KeyedJaggedArray.from_lists({"user": [[1, 1], [2]]})
        >>> activations, residuals = jaxrec.embed.lookup(tables, batch)
        >>> gradients = jax.grad(lambda pooled: pooled.values.sum())(activations)
        >>> tables = apply_gradients(tables, residuals, gradients, step=0)
        >>> tables.read("user")[:, 0].tolist()
        [1.0, 0.0, 0.5]
    """
    return tables.update([tables.row_gradients(residuals, gradients)], step)
