"""Constructors of batches from host data: lists, dense arrays, Arrow and TorchRec's arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar, Unpack

from jaxrec.ragged import arrow, columns, nested
from jaxrec.ragged.capacity import CapacityMemory
from jaxrec.ragged.packing import Packed, PackOptions, id_bits_of, pack

Batch = TypeVar("Batch", bound="KeyedConstructors")


class KeyedConstructors:
    """Base of `KeyedJaggedArray`: constructors that check ids and pack them in NumPy arrays.

    `jaxrec.Packer` has the same constructors for a run of many batches.
    """

    # Memory of the packer that made this batch, for `shard_batch` and `pad_batch`. It is not part
    # of the pytree, where it would be static and compile a program per packer; so a batch loses it
    # in `jax.tree.map`.
    memory: ClassVar[CapacityMemory | None] = None

    @classmethod
    def _of(
        cls: type[Batch],
        values: Any,
        lengths: Any,
        weights: Any,
        inverse_indices: Any,
        keys: tuple[str, ...],
        capacities: tuple[int, ...],
        strides: tuple[int, ...],
        slot_keys: tuple[str, ...] = (),
        sample_capacities: tuple[int, ...] = (),
        memory: CapacityMemory | None = None,
    ) -> Batch:
        """Make a batch of fields that need no check, such as tracers."""
        # Neither `__init__` nor `setattr` (the class is frozen): JAX comes here for every batch
        # that enters or leaves a program, and both take longer than writing the dictionary.
        batch = object.__new__(cls)
        fields = vars(batch)
        fields["values"], fields["lengths"], fields["weights"] = values, lengths, weights
        fields["inverse_indices"] = inverse_indices
        fields["keys"], fields["capacities"], fields["strides"] = keys, capacities, strides
        fields["slot_keys"], fields["sample_capacities"] = slot_keys, sample_capacities
        if memory is not None:
            fields["memory"] = memory
        return batch

    @classmethod
    def from_lists(
        cls: type[Batch],
        data: Mapping[str, Any],
        weights: Mapping[str, Any] | None = None,
        **options: Unpack[PackOptions],
    ) -> Batch:
        """Make a batch of nested lists: for each feature a list of bags, one per sample.

        Args:
            data: Bags by feature; a bag is a list, tuple or one-dimensional array of ids.
            weights: Weights by feature, nested like ``data``.
            **options: `PackOptions`: ``inverse_indices``, ``capacities``, ``sample_capacities``,
                ``bounds``, ``bounds_mode`` and ``id_bits``.

        Returns:
            The batch, in NumPy arrays.

        Raises:
            TypeError: An id is not an integer (with 64 bits: nor a string, or the two are mixed),
                or the nesting is wrong.
            ValueError: An id is negative, beyond its table, or beyond int32 (with 64 bits: null, -1
                or beyond 64 bits); features differ in their number of samples; weights are not
                shaped like ids; a capacity is too small.

        Example:
            >>> from jaxrec.ragged import KeyedJaggedArray
            >>> KeyedJaggedArray.from_lists({"f": [[1, 2], [9]]}, bounds={"f": 9})
            Traceback (most recent call last):
                ...
            ValueError: feature 'f', sample 1: id 9 is outside [0, 9), the ids of its table
            >>> raw = {"user": [["anna"], ["bob"]], "item": [[2**40, -7], []]}
            >>> KeyedJaggedArray.from_lists(raw, id_bits=64)
            KeyedJaggedArray(batch_size=2, {
                'user': [[-5959755476600362720], [-7888184235188891589]],
                'item': [[1099511627776, -7], []],
            })
        """
        return cls._of(*_packed(nested.from_lists, data, weights, options))

    @classmethod
    def from_dense(
        cls: type[Batch],
        data: Mapping[str, Any],
        weights: Mapping[str, Any] | None = None,
        **options: Unpack[PackOptions],
    ) -> Batch:
        """Make a batch of dense arrays: one id per sample (``[batch]``) or k ids (``[batch, k]``).

        Each key has an array or lists of integers; with ``id_bits=64`` also of strings.

        Options, result and errors as for `from_lists`.

        Example:
            >>> from jaxrec.ragged import KeyedJaggedArray
            >>> import numpy as np
            >>> KeyedJaggedArray.from_dense({"f": np.array([[1, 2], [3, 4]])}).lengths
            array([2, 2], dtype=int32)
        """
        return cls._of(*_packed(columns.from_dense, data, weights, options))

    @classmethod
    def from_arrow(
        cls: type[Batch], data: Any, weights: Any | None = None, **options: Unpack[PackOptions]
    ) -> Batch:
        """Make a batch of Arrow columns; needs pyarrow.

        Args:
            data: A Table, a RecordBatch, or Arrays by feature. A column has integers (one id per
                sample) or lists of integers; every list type of Arrow will do. With ``id_bits=64``
                also strings, binary values and dictionaries of them. A null row is an empty bag.
            weights: Floating point columns, nested like ``data``.

        Options, result and errors as for `from_lists`; a null inside a list is an error.

        Example:
            >>> from jaxrec.ragged import KeyedJaggedArray
            >>> import pyarrow as pa
            >>> KeyedJaggedArray.from_arrow(pa.table({"f": [[1, 2], None]}))["f"].to_lists()
            [[1, 2], []]
        """
        data = arrow.named_columns(data)
        weights = None if weights is None else arrow.named_columns(weights)
        return cls._of(*_packed(arrow.from_arrow, data, weights, options))

    @classmethod
    def from_lengths(
        cls: type[Batch],
        keys: Sequence[str],
        values: Any,
        lengths: Any,
        weights: Any | None = None,
        strides: Sequence[int] | None = None,
        **options: Unpack[PackOptions],
    ) -> Batch:
        """Make a batch of TorchRec's flat key-major arrays, which have no padding.

        Args:
            keys: Names of the features.
            values: ``[ids]`` integers, or with ``id_bits=64`` strings; first all ids of the first
                key, then of the second.
            lengths: ``[sum(strides)]`` integers, ids of each bag.
            weights: ``[ids]`` or None.
            strides: Bags of each key; None: ``lengths`` divides equally among the keys.

        Options, result and errors as for `from_lists`. Also raises ValueError where
        lengths are negative, do not sum to the number of values, or do not fit the keys.

        Example:
            >>> from jaxrec.ragged import KeyedJaggedArray
            >>> batch = KeyedJaggedArray.from_lengths(["a", "b"], [1, 2, 3], [2, 0, 0, 1])
            >>> batch.to_lists()
            {'a': [[1, 2], []], 'b': [[], [3]]}
        """
        keys = columns.feature_names(keys)
        id_bits = id_bits_of(options)
        flat = columns.from_flat(keys, values, lengths, weights, strides, id_bits=id_bits)
        return cls._of(*pack(keys, flat, varied_strides=strides is not None, **options))

    @classmethod
    def from_offsets(
        cls: type[Batch],
        keys: Sequence[str],
        values: Any,
        offsets: Any,
        weights: Any | None = None,
        strides: Sequence[int] | None = None,
        **options: Unpack[PackOptions],
    ) -> Batch:
        """Make a batch like `from_lengths`, from ``[sum(strides) + 1]`` offsets that begin at 0."""
        keys = columns.feature_names(keys)
        lengths = columns.lengths_of_offsets(keys, offsets, strides)
        return cls.from_lengths(keys, values, lengths, weights, strides, **options)

    # TorchRec's names.
    from_lengths_sync = from_lengths
    from_offsets_sync = from_offsets


def _packed(
    to_column: Callable[..., columns.Column], data: Any, weights: Any, options: PackOptions
) -> Packed:
    """Pack features; ``to_column`` makes a column of the data and weights of each."""
    id_bits = id_bits_of(options)
    data, weights = columns.by_name("data", data), columns.by_name("weights", weights)
    if unknown := [key for key in weights if key not in data]:
        raise ValueError(f"weights name {unknown}, but the features are {list(data)}")
    by_key = [to_column(key, data[key], weights.get(key), id_bits=id_bits) for key in data]
    return pack(tuple(data), by_key, **options)
