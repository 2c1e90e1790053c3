"""Configurations of tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike

from jaxrec.embed.first_values import INITIALIZERS
from jaxrec.embed.formats import TABLE_FORMATS, RowFormat, check_rows
from jaxrec.embed.formats.floats import PlainRows
from jaxrec.optim import RowOptimizer

# Key, shape and type to values, as in `jax.nn.initializers`.
Initializer: TypeAlias = Callable[[Array, tuple[int, ...], DTypeLike], Array]

TABLE_DTYPES = tuple(TABLE_FORMATS)
POOLINGS = ("sum", "mean", "max")


@dataclasses.dataclass(frozen=True)
class TableConfig:
    """Configuration of a table; use `EmbeddingBagConfig` or `EmbeddingConfig`.

    Attributes:
        name: Name of the table, unique in its collection.
        num_embeddings: Rows of the table; its ids are ``0 .. num_embeddings - 1``. Tables with more
            than 2**31 rows lie over a mesh (`jaxrec.shard`) or behind a cache
            (`jaxrec.tier.Cached`), and their batches have ids of 64 bits.
        embedding_dim: Columns of the table, 1 or more.
        feature_names: Keys of the batch that read this table; by default the table's own name.
            Several tables may read one feature.
        dtype: Format of the stored rows: "float32", "bfloat16", "float16", or one byte an element:
            "int8" (a float32 scale and offset for each row), "float8_e4m3" or "float8_e5m2" (a
            float32 scale for each row). Rows of one byte an element are read, looked up and updated
            in float32, and stored by stochastic rounding. `jax.numpy`'s types are taken too.
        initializer: One of "uniform" (within ``±1/sqrt(num_embeddings)``, TorchRec's default),
            "normal" (standard deviation ``1/sqrt(embedding_dim)``), "xavier_uniform",
            "xavier_normal", "zeros", "ones"; or a function ``(key, shape, dtype) -> array`` as in
            `jax.nn.initializers`. Row ``r`` is then
            ``initializer(jax.random.fold_in(key, r), (1, embedding_dim))``, under `jax.vmap`. The
            function sees one row, so its values must not depend on the number of rows:
            ``lecun_normal()``, which scales by fan-in, is refused when the table is made.
        optimizer: Row optimizer of this table; None: the collection's.
        trainable: Whether the table is trained. False is ``optimizer=jaxrec.optim.frozen()``: rows
            stay as they are, there is no optimizer state, and steps spend nothing on the table.
        padding_id: An id that stands for no value, such as one that fills up bags of a fixed
            length; None: there is none. It adds nothing to its bag and does not count in a mean, as
            in PyTorch's ``nn.EmbeddingBag(padding_idx=)``; looked up by itself it gives zeros. Its
            row is zeros and stays zeros: it gets no gradient, and no optimizer changes it or its
            state. Tables that are loaded, from checkpoints and TorchRec too, get zeros there.
        inference_format: Format of rows stored for inference alone, in place of ``dtype``'s;
            `jaxrec.serve.quantize` sets it.
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    feature_names: Sequence[str] = ()
    dtype: DTypeLike = "float32"
    initializer: str | Initializer = "uniform"
    optimizer: RowOptimizer | None = None
    trainable: bool = dataclasses.field(default=True, kw_only=True)
    padding_id: int | None = dataclasses.field(default=None, kw_only=True)
    inference_format: RowFormat | None = dataclasses.field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        # Outputs of a feature that several tables read are called "feature@table".
        if not isinstance(self.name, str) or not self.name or "@" in self.name:
            raise ValueError(
                f"a table's name is a non-empty string without '@', got name={self.name!r}"
            )
        # The dataclass is frozen and hashable, so fields are normalized past its own `__setattr__`:
        # lists become tuples, NumPy's integers Python's, and types their names.
        for field in ("num_embeddings", "embedding_dim"):
            object.__setattr__(self, field, self._positive_int(field))
        object.__setattr__(self, "feature_names", self._checked_features())
        object.__setattr__(self, "dtype", self._checked_dtype())
        if isinstance(self.initializer, str) and self.initializer not in INITIALIZERS:
            raise ValueError(
                f"table {self.name!r}: initializer={self.initializer!r} is not one of "
                f"{', '.join(INITIALIZERS)}; give one of these or a function (key, shape, dtype)"
            )
        if self.optimizer is not None and not isinstance(self.optimizer, RowOptimizer):
            raise TypeError(
                f"table {self.name!r}: optimizer is a row optimizer such as "
                f"jaxrec.optim.rowwise_adagrad(), got {self.optimizer!r}"
            )
        if not isinstance(self.trainable, bool):
            raise TypeError(
                f"table {self.name!r}: trainable is True or False, got {self.trainable!r}"
            )
        if self.padding_id is not None:
            object.__setattr__(self, "padding_id", self._checked_padding_id())

    @property
    def row_format(self) -> RowFormat:
        """Format of the stored rows."""
        return self.inference_format or TABLE_FORMATS[str(self.dtype)]

    def stores_like(self, other: TableConfig) -> bool:
        """Return whether another table has the same row format, and both or none are trained."""
        mine, theirs = self.inference_format is None, other.inference_format is None
        return (self.row_format, mine) == (other.row_format, theirs)

    def check_rows(self, where: str, rows: Array | np.ndarray, first_row: int = 0) -> None:
        """Raise a ValueError if the table's format cannot hold ``rows``, ``[n, embedding_dim]``.

        Args:
            where: Begins the message, such as "table 'user', ".
            rows: The rows.
            first_row: Row index of the first of them, for the message.
        """
        # Plain rows that are trained may have any value, NaN too. Packed rows cannot hold a NaN,
        # and rows for inference should not.
        if self.inference_format is not None or not isinstance(self.row_format, PlainRows):
            check_rows(self.row_format, where, rows, first_row)

    def _positive_int(self, field: str) -> int:
        value = getattr(self, field)
        # In Python, True is an integer.
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(
                f"table {self.name!r}: {field} is an integer of 1 or more, got {value!r}"
            )
        return int(value)

    def _checked_padding_id(self) -> int:
        value = self.padding_id
        is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if value is None or not is_integer or not 0 <= value < self.num_embeddings:
            raise ValueError(
                f"table {self.name!r}: padding_id is one of the table's ids, 0 to "
                f"{self.num_embeddings - 1}, or None, got {value!r}"
            )
        return int(value)

    def _checked_features(self) -> tuple[str, ...]:
        names = self.feature_names
        # A string is a sequence of strings: "user" would mean the features "u", "s", "e" and "r".
        if isinstance(names, str):
            raise TypeError(
                f"table {self.name!r}: feature_names is a sequence of names, got the string "
                f"{names!r}; write ({names!r},)"
            )
        names = tuple(names) or (self.name,)
        if not all(isinstance(name, str) and name for name in names):
            raise ValueError(f"table {self.name!r}: feature_names are strings, got {names!r}")
        if len(set(names)) != len(names):
            raise ValueError(f"table {self.name!r}: a feature name occurs twice in {names!r}")
        return names

    def _checked_dtype(self) -> str:
        try:
            return table_dtype(self.dtype)
        except ValueError as error:
            raise ValueError(f"table {self.name!r}: {error}") from None


def find_config(configs: Sequence[TableConfig], name: str) -> TableConfig:
    """Return the configuration of a table; raise a KeyError if no table has the name."""
    by_name = {config.name: config for config in configs}
    if name not in by_name:
        raise KeyError(f"no table is named {name!r}; there are {', '.join(map(repr, by_name))}")
    return by_name[name]


def refuse_training(tables: Sequence[TableConfig]) -> None:
    """Raise a TypeError if any of the tables is for inference."""
    quantized = [table for table in tables if table.inference_format is not None]
    if quantized:
        formats = ", ".join(f"{table.name!r} ({table.row_format.name})" for table in quantized)
        raise TypeError(
            f"tables {formats} are quantized for inference and cannot be trained; train the model "
            "that jaxrec.serve.quantize was given, and quantize it again"
        )


def table_dtype(dtype: DTypeLike) -> str:
    """Return the name of a ``dtype``; raise a ValueError if tables cannot have it."""
    # JAX's name "float8_e4m3fn" says "finite, no infinities"; ours is the shorter one.
    try:
        name = jnp.dtype(dtype).name.removesuffix("fn")
    except TypeError:
        name = ""
    if name not in TABLE_DTYPES:
        raise ValueError(f"dtype is one of {', '.join(TABLE_DTYPES)}, got {dtype!r}")
    return name


# Rows are int32, and so are the row after the last (padding) and one more, which reads give as NaN.
MAX_ROWS = np.iinfo(np.int32).max - 2


def check_num_rows(tables: Sequence[TableConfig]) -> None:
    """Raise a ValueError if int32 cannot number the rows of a table on one device."""
    for table in tables:
        if table.num_embeddings > MAX_ROWS:
            raise ValueError(
                f"table {table.name!r}: row indices on a device are int32, so that a table has at "
                f"most {MAX_ROWS} rows there, got num_embeddings={table.num_embeddings}; cut its "
                "rows over devices by jaxrec.shard(make_model, plan, mesh), keep most of them "
                "elsewhere by jaxrec.tier.Cached, or hash its ids into fewer rows"
            )


@dataclasses.dataclass(frozen=True)
class EmbeddingConfig(TableConfig):
    """A table whose rows are looked up one per id, for `EmbeddingCollection`.

    See `TableConfig` for the fields.

    Raises:
        ValueError, TypeError: If a field is not what its description says.

    Example:
        >>> EmbeddingConfig("item", num_embeddings=1000, embedding_dim=16).feature_names
        ('item',)
    """


@dataclasses.dataclass(frozen=True)
class EmbeddingBagConfig(TableConfig):
    """A table whose rows are pooled over each bag of ids, for `EmbeddingBagCollection`.

    See `TableConfig` for the other fields.

    Attributes:
        pooling: "sum", "mean" or "max". An empty bag gives zeros. The mean divides by the number of
            ids, also where they are weighted. The maximum is taken column by column: its gradient
            goes to the row that has the largest element, the first of equal ones. It takes no
            weights, as ``torch.nn.EmbeddingBag(mode="max")``.

    Raises:
        ValueError, TypeError: If a field is not what its description says.

    Example:
        >>> EmbeddingBagConfig("user", 4096, 64, feature_names=("user",), pooling="mean").pooling
        'mean'
    """

    pooling: Literal["sum", "mean", "max"] = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pooling not in POOLINGS:
            raise ValueError(
                f"table {self.name!r}: pooling is 'sum', 'mean' or 'max', got {self.pooling!r}"
            )
