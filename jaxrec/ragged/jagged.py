"""One ragged column as a padded array."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int32, Shaped

from jaxrec.ragged import nested, printing
from jaxrec.ragged.arrays import AnyArray
from jaxrec.ragged.capacity import rung
from jaxrec.ragged.columns import floats
from jaxrec.ragged.dense import dense_to_jagged, jagged_to_padded_dense
from jaxrec.ragged.offsets import complete_cumsum, segment_ids


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class JaggedArray:
    """A ragged column: the rows' elements one after the other, then padding.

    TorchRec's JaggedTensor with a static capacity. Row ``b`` owns
    ``values[offsets[b]:offsets[b + 1]]``; what lies past ``offsets[-1]`` is padding of no meaning.

    Attributes:
        values: ``[capacity, ...]``, ids or whatever else the rows consist of.
        lengths: ``[batch]`` int32, elements of each row.
        weights: ``[capacity]``, a weight for each element, or None.

    Example:
        >>> column = JaggedArray.from_lists([[1, 2], [], [3]])
        >>> column
        JaggedArray([[1, 2], [], [3]], capacity=8)
        >>> column.to_padded_dense(2, padding_value=-1).tolist()
        [[1, 2], [-1, -1], [3, -1]]
    """

    values: Shaped[AnyArray, "capacity *element"]
    lengths: Int32[AnyArray, " batch"]
    weights: Shaped[AnyArray, "capacity *weight"] | None = None

    @classmethod
    def from_lists(
        cls,
        rows: Sequence[Any],
        weights: Sequence[Any] | None = None,
        *,
        capacity: int | None = None,
    ) -> JaggedArray:
        """A column of rows on the host.

        Args:
            rows: A list, tuple or array of elements for each row; elements are numbers or arrays of
                one shape. Integers become int32, floating point at most float32.
            weights: One number for each element, nested like ``rows``, or None.
            capacity: Room for elements; None: the `rung` that holds them.

        Returns:
            The column, in NumPy arrays.

        Raises:
            TypeError: Elements are no numbers, or of several shapes.
            ValueError: An integer does not fit int32, weights are not nested like the rows, or the
                capacity is too small.
        """
        values, lengths = nested.flat_elements(rows)
        if capacity is None:
            capacity = rung(len(values))
        if len(values) > capacity:
            raise ValueError(
                f"the rows have {len(values)} elements, but the capacity is {capacity}; "
                f"give at least {len(values)} (on the ladder: {rung(len(values))})"
            )
        padding = (0, capacity - len(values))
        flat_weights = None
        if weights is not None:
            flat_weights, weight_lengths = nested.flat_elements(weights)
            if not np.array_equal(weight_lengths, lengths) or flat_weights.ndim != 1:
                raise ValueError("weights are not nested like the rows; each element needs one")
            flat_weights = np.pad(floats("weights", "weight", flat_weights), padding)
            if flat_weights.dtype.kind in "iu":
                flat_weights = flat_weights.astype(np.float32)
        return cls(
            np.pad(values, [padding, *[(0, 0)] * (values.ndim - 1)]),
            lengths.astype(np.int32),
            flat_weights,
        )

    @classmethod
    def from_dense(
        cls,
        dense: Shaped[AnyArray, "batch length *element"],
        lengths: Int[AnyArray, " batch"] | None = None,
        weights: Shaped[AnyArray, "batch length"] | None = None,
    ) -> JaggedArray:
        """The first ``lengths[b]`` elements of each row of a dense array; works under jit.

        TorchRec's ``from_dense_lengths``.

        Args:
            dense: ``[batch, length, ...]``.
            lengths: ``[batch]`` from 0 to ``length``; None: all of every row. Longer ones are cut.
            weights: ``[batch, length]`` a weight for each element, or None.

        Returns:
            The column, of capacity ``batch * length``; in JAX arrays.
        """
        batch, length = dense.shape[:2]
        if lengths is None:
            lengths = jnp.full(batch, length, jnp.int32)
        lengths = jnp.clip(jnp.asarray(lengths, jnp.int32), 0, length)
        offsets = complete_cumsum(lengths)
        capacity = batch * length
        return cls(
            dense_to_jagged(jnp.asarray(dense), offsets, capacity),
            lengths,
            None if weights is None else dense_to_jagged(jnp.asarray(weights), offsets, capacity),
        )

    @classmethod
    def empty(cls, dtype: Any = np.int32, *, weighted: bool = False) -> JaggedArray:
        """A column without rows."""
        weights = np.zeros(0, np.float32) if weighted else None
        return cls(np.zeros(0, dtype), np.zeros(0, np.int32), weights)

    @property
    def capacity(self) -> int:
        """Elements there is room for, padding included."""
        return self.values.shape[0]

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return self.lengths.shape[0]

    @property
    def offsets(self) -> Int32[AnyArray, " offsets"]:
        """``[batch + 1]``: where each row starts in ``values``, and where the last one ends."""
        return complete_cumsum(self.lengths)

    @property
    def segment_ids(self) -> Int32[Array, " capacity"]:
        """The row of each element; ``batch_size`` at padding."""
        return segment_ids(self.offsets, self.capacity)

    def to_lists(self) -> list[list[Any]]:
        """The rows as nested lists of Python numbers; on the host."""
        return nested.to_lists(np.asarray(self.values), np.asarray(self.lengths))

    def weights_to_lists(self) -> list[list[float]]:
        """The weights as nested lists; on the host.

        Raises:
            ValueError: There are none.
        """
        return nested.to_lists(np.asarray(self._given_weights()), np.asarray(self.lengths))

    def to_padded_dense(
        self, length: int | None = None, padding_value: Any = 0
    ) -> Shaped[Array, "batch length *element"]:
        """The rows as a dense array, padded or cut at their ends.

        Args:
            length: Elements of each row, static. None: the longest row's; not under jit.
            padding_value: What stands after a row's elements.

        Raises:
            TypeError: ``length`` is missing under jit.
        """
        return jagged_to_padded_dense(
            self.values, self.offsets, self._static_length(length), padding_value
        )

    def to_padded_dense_weights(
        self, length: int | None = None, padding_value: Any = 0
    ) -> Shaped[Array, "batch length"]:
        """`to_padded_dense` of the weights.

        Raises:
            TypeError: ``length`` is missing under jit.
            ValueError: There are no weights.
        """
        return jagged_to_padded_dense(
            self._given_weights(), self.offsets, self._static_length(length), padding_value
        )

    def _static_length(self, length: int | None) -> int:
        if length is not None:
            return length
        if isinstance(self.lengths, jax.core.Tracer):
            raise TypeError("to_padded_dense needs a static length= under jit")
        return int(np.max(self.lengths, initial=0))

    def _given_weights(self) -> Any:
        if self.weights is None:
            raise ValueError("the column has no weights")
        return self.weights

    def __repr__(self) -> str:
        return printing.jagged(self)
