"""One ragged column as a padded array: `JaggedArray`, and `BatchColumn` for a column of a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int32, Shaped

from jaxrec.ragged import nested, printing
from jaxrec.ragged.arrays import AnyArray, each_device, require_one_batch, to_device
from jaxrec.ragged.bounds import raw_column
from jaxrec.ragged.capacity import capacity_for
from jaxrec.ragged.columns import floats
from jaxrec.ragged.fbgemm import dense_to_jagged, jagged_to_padded_dense
from jaxrec.ragged.offsets import complete_cumsum, segment_ids
from jaxrec.ragged.packing import id_bits_of
from jaxrec.ragged.raw_ids import as_raw, register_ragged


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class JaggedArray:
    """A ragged column: the rows' elements one after the other, then padding.

    TorchRec's JaggedTensor with a static capacity. Row ``b`` owns
    ``values[offsets[b]:offsets[b + 1]]``; elements past ``offsets[-1]`` are padding.

    Attributes:
        values: ``[capacity, ...]``: ids, or other elements.
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
        id_bits: Literal[32, 64] = 32,
    ) -> JaggedArray:
        """Make a column of rows on the host.

        Args:
            rows: A list, tuple or array of elements for each row; elements are numbers or arrays of
                one shape. Integers of 32 or 64 bits become int32, float64 becomes float32, and
                narrower types stay as they are.
            weights: One number for each element, nested like ``rows``, or None.
            capacity: Capacity of the column; None: `capacity_for` its elements.
            id_bits: 64: the elements are raw ids, integers or strings; see `PackOptions`.

        Returns:
            The column, in NumPy arrays.

        Raises:
            TypeError: Elements are not numbers, or differ in shape.
            ValueError: An integer does not fit int32 (a raw id: 64 bits), weights are not nested
                like the rows, or the capacity is too small.
        """
        if id_bits_of({"id_bits": id_bits}) == 64:
            values, lengths, _ = raw_column("rows", nested.from_lists("rows", rows, id_bits=64))
        else:
            values, lengths = nested.flat_elements(rows)
        if capacity is None:
            capacity = capacity_for(len(values))
        if len(values) > capacity:
            raise ValueError(
                f"the rows have {len(values)} elements, but the capacity is {capacity}; "
                f"give at least {len(values)} (on the ladder: {capacity_for(len(values))})"
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
        padded = np.pad(values, [padding, *[(0, 0)] * (values.ndim - 1)])
        return cls(
            as_raw(padded) if id_bits == 64 else padded, lengths.astype(np.int32), flat_weights
        )

    @classmethod
    def from_dense(
        cls,
        dense: Shaped[AnyArray, "batch length *element"],
        lengths: Int[AnyArray, " batch"] | None = None,
        weights: Shaped[AnyArray, "batch length"] | None = None,
    ) -> JaggedArray:
        """Make a column of the first ``lengths[b]`` elements of each dense row; works under jit.

        TorchRec's ``from_dense_lengths``.

        Args:
            dense: ``[batch, length, ...]``.
            lengths: ``[batch]`` from 0 to ``length``; None: all of every row. Longer ones are cut.
            weights: ``[batch, length]`` a weight for each element, or None.

        Returns:
            The column, of capacity ``batch * length``; in JAX arrays.

        Raises:
            ValueError: An integer on the host does not fit int32.
        """
        # Lengths may be traced but the capacity is static, so it holds all of every row.
        batch, length = dense.shape[:2]
        if lengths is None:
            lengths = jnp.full(batch, length, jnp.int32)
        lengths = jnp.clip(jnp.asarray(lengths, jnp.int32), 0, length)
        offsets = complete_cumsum(lengths)
        capacity = batch * length
        return cls(
            dense_to_jagged(dense, offsets, capacity),
            lengths,
            None if weights is None else dense_to_jagged(jnp.asarray(weights), offsets, capacity),
        )

    @classmethod
    def empty(cls, dtype: Any = np.int32, *, weighted: bool = False) -> JaggedArray:
        """Make a column without rows."""
        weights = np.zeros(0, np.float32) if weighted else None
        return cls(np.zeros(0, dtype), np.zeros(0, np.int32), weights)

    @property
    def capacity(self) -> int:
        """Length of ``values`` with padding; on a mesh, per device."""
        return self.values.shape[self.lengths.ndim - 1]

    @property
    def batch_size(self) -> int:
        """Number of rows; on a mesh, per device."""
        return self.lengths.shape[-1]

    @property
    def offsets(self) -> Int32[AnyArray, " offsets"]:
        """``[batch + 1]``: start of each row in ``values``, then the end of the last row."""
        require_one_batch(self.lengths, "offsets")
        return complete_cumsum(self.lengths)

    @property
    def segment_ids(self) -> Int32[Array, " capacity"]:
        """Row of each element; ``batch_size`` at padding."""
        return segment_ids(self.offsets, self.capacity)

    def to_lists(self) -> list[list[Any]]:
        """Return the rows as nested lists of Python numbers; on the host."""
        require_one_batch(self.lengths, "to_lists")
        return nested.to_lists(np.asarray(self.values), np.asarray(self.lengths))

    def weights_to_lists(self) -> list[list[float]]:
        """Return the weights as nested lists; on the host.

        Raises:
            ValueError: The column has no weights, or lies over a mesh.
        """
        require_one_batch(self.lengths, "weights_to_lists")
        return nested.to_lists(np.asarray(self._given_weights()), np.asarray(self.lengths))

    def to_padded_dense(
        self, length: int | None = None, padding_value: Any = 0
    ) -> Shaped[Array, "batch length *element"]:
        """Return the rows as a dense array, padded or cut at their ends.

        A column over a mesh gives the rows of all devices, still sharded over them.

        Args:
            length: Elements of each row, static. None: the longest row's; not under jit.
            padding_value: Value behind a row's elements.

        Raises:
            TypeError: ``length`` is missing under jit.
        """
        return self._padded(self.values, length, padding_value)

    def to_padded_dense_weights(
        self, length: int | None = None, padding_value: Any = 0
    ) -> Shaped[Array, "batch length"]:
        """Compute `to_padded_dense` of the weights.

        Raises:
            TypeError: ``length`` is missing under jit.
            ValueError: The column has no weights.
        """
        return self._padded(self._given_weights(), length, padding_value)

    def _padded(self, values: Any, length: int | None, padding_value: Any) -> Array:
        """Return values or weights as a dense array, padded or cut at the rows' ends."""
        size = self._static_length(length)

        def pad(lengths: Array, values: Array) -> Array:
            return jagged_to_padded_dense(values, complete_cumsum(lengths), size, padding_value)

        dense = each_device(pad, to_device(self.lengths), to_device(values))
        return dense if self.lengths.ndim == 1 else dense.reshape(-1, *dense.shape[2:])

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


register_ragged(JaggedArray, ("values", "lengths", "weights"))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BatchColumn(JaggedArray):
    """A column of a batch whose samples share bags, or of slots of `jaxrec.tier`.

    Attributes:
        inverse_indices: ``[batch]`` int32, the row of each sample; None: row ``b`` is sample
            ``b``'s.
        sample_capacity: See `KeyedJaggedArray.sample_capacities`; 0: unknown.
        are_slots: Whether the values are slots assigned by `jaxrec.tier`.
    """

    # A column carries these so that `KeyedJaggedArray.from_dict` restores the batch that `to_dict`
    # took apart.
    inverse_indices: Int32[AnyArray, " samples"] | None = None
    sample_capacity: int = 0
    are_slots: bool = False


register_ragged(
    BatchColumn,
    ("values", "lengths", "weights", "inverse_indices"),
    ("sample_capacity", "are_slots"),
)
