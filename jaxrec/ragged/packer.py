"""`Packer`: the batches of a run packed into a few different shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import jax
import numpy as np

from jaxrec.ragged.capacity import CapacityMemory, LengthMoments, checked_capacities
from jaxrec.ragged.columns import by_name, integers
from jaxrec.ragged.key_segments import refit
from jaxrec.ragged.keyed_jagged import KeyedJaggedArray
from jaxrec.ragged.packing import PackOptions
from jaxrec.ragged.shared_bags import known_capacities

# Options of `KeyedJaggedArray`'s constructors that a packer sets itself.
_CHOSEN = ("capacities", "sample_capacities")


class Packer:
    """Packs the batches of a run into a few different shapes, so that few programs compile.

    `jax.jit` compiles a step for each combination of capacities. A packer remembers the capacities
    of earlier batches and uses them again. The first batch gets capacities that hold nearly all
    batches with such lengths. A batch that does not fit makes all capacities larger. A run usually
    ends with two or three combinations.

    A batch remembers its packer. `jaxrec.mesh.shard_batch` uses it to choose the capacities of each
    device, the same on all processes, and `jaxrec.data.pad_batch` to choose those of a smaller
    batch. A packer may be used from several threads.

    Args:
        lengths: ``[samples]`` integers by feature: number of ids per sample, where it is known
            before the first batch.
        capacities: Smallest capacity of some features, of a batch or of a device's part.

    Raises:
        TypeError: Lengths or capacities are not integers.
        ValueError: A length or a capacity is negative.

    Example:
        >>> packer = Packer()
        >>> batch = packer.from_lists({"user": [[7], [8], [9]], "item": [[1, 2], [], [3]]})
        >>> batch.capacity_per_key
        {'user': 8, 'item': 8}
        >>> packer.from_lists({"user": [[1], [2], [3]], "item": [[4] * 9, [], []]}).capacities
        (16, 72)
    """

    def __init__(
        self, lengths: Mapping[str, Any] | None = None, capacities: Mapping[str, int] | None = None
    ):
        known = {
            key: integers(f"lengths of feature {key!r}", "length", array)
            for key, array in by_name("lengths", lengths).items()
        }
        for key, array in known.items():
            if array.size and array.min() < 0:
                raise ValueError(f"feature {key!r} has the negative length {array.min()}")
        moments = {key: LengthMoments.of(array) for key, array in known.items()}
        self._memory = CapacityMemory(moments, checked_capacities(capacities))

    def from_lists(
        self,
        data: Mapping[str, Any],
        weights: Mapping[str, Any] | None = None,
        **options: Unpack[PackOptions],
    ) -> KeyedJaggedArray:
        """Make a batch as `KeyedJaggedArray.from_lists` does, in remembered capacities."""
        return self._packed(KeyedJaggedArray.from_lists, data, weights, options)

    def from_dense(
        self,
        data: Mapping[str, Any],
        weights: Mapping[str, Any] | None = None,
        **options: Unpack[PackOptions],
    ) -> KeyedJaggedArray:
        """Make a batch as `KeyedJaggedArray.from_dense` does, in remembered capacities."""
        return self._packed(KeyedJaggedArray.from_dense, data, weights, options)

    def from_arrow(
        self, data: Any, weights: Any | None = None, **options: Unpack[PackOptions]
    ) -> KeyedJaggedArray:
        """Make a batch as `KeyedJaggedArray.from_arrow` does, in remembered capacities."""
        return self._packed(KeyedJaggedArray.from_arrow, data, weights, options)

    def from_lengths(
        self,
        keys: Sequence[str],
        values: Any,
        lengths: Any,
        weights: Any | None = None,
        strides: Sequence[int] | None = None,
        **options: Unpack[PackOptions],
    ) -> KeyedJaggedArray:
        """Make a batch as `KeyedJaggedArray.from_lengths` does, in remembered capacities."""
        arrays = (keys, values, lengths, weights, strides)
        return self._packed(KeyedJaggedArray.from_lengths, *arrays, options)

    def from_offsets(
        self,
        keys: Sequence[str],
        values: Any,
        offsets: Any,
        weights: Any | None = None,
        strides: Sequence[int] | None = None,
        **options: Unpack[PackOptions],
    ) -> KeyedJaggedArray:
        """Make a batch as `KeyedJaggedArray.from_offsets` does, in remembered capacities."""
        arrays = (keys, values, offsets, weights, strides)
        return self._packed(KeyedJaggedArray.from_offsets, *arrays, options)

    def _packed(self, pack: Any, *arguments: Any) -> KeyedJaggedArray:
        """Call a constructor of `KeyedJaggedArray`; the last argument is its options."""
        *data, options = arguments
        if given := [name for name in _CHOSEN if options.get(name) is not None]:
            raise TypeError(
                f"a Packer chooses the {given[0]}: give Packer(capacities=) the smallest ones, or "
                "pack with KeyedJaggedArray's constructors"
            )
        # The memory takes the place of the capacities: `pack` asks it once it has counted the ids.
        batch: KeyedJaggedArray = pack(*data, **{**options, "capacities": self._memory})
        return batch._with(memory=self._memory)

    def fit(self, batch: Any) -> Any:
        """Change a host batch that was packed elsewhere to remembered capacities.

        The first batch of each kind keeps its capacities, and so do batches of another packer.

        Args:
            batch: Any pytree. Only its `KeyedJaggedArray`s on the host change.

        Example:
            >>> packer = Packer()
            >>> batches = [KeyedJaggedArray.from_lists({"item": [[1] * n, []]}) for n in (5, 9, 2)]
            >>> [packer.fit(batch).capacities for batch in batches]
            [(8,), (48,), (8,)]
        """
        return jax.tree.map(self._fitted, batch, is_leaf=_is_ragged)

    def _fitted(self, leaf: Any) -> Any:
        # A batch over a mesh is excluded: its devices already have their capacities.
        is_packed = _is_ragged(leaf) and leaf.memory is None and len(leaf.keys) > 0
        if not is_packed or not isinstance(leaf.lengths, np.ndarray) or leaf.lengths.ndim != 1:
            return leaf
        return fitted(leaf, self._memory, first=leaf.capacities)

    def to_dict(self) -> dict[str, Any]:
        """Return the packer's memory as data for JSON, for a later run with the same capacities.

        Example:
            >>> packer = Packer()
            >>> batch = packer.from_lists({"item": [[1, 2], [3, 4]]})
            >>> packer.to_dict()["sizes"]
            [{'keys': ['item'], 'samples': 2, 'devices': 1, 'capacities': [[8]]}]
            >>> Packer.from_dict(packer.to_dict()).from_lists({"item": [[1] * 8, []]}).capacities
            (8,)
        """
        return self._memory.to_dict()

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Packer:
        """Return a packer with the memory that `to_dict` saved.

        Raises:
            ValueError: ``saved`` is not what `to_dict` returns.
        """
        return cls._with(CapacityMemory.from_dict(saved))

    @classmethod
    def of_moments(cls, moments: Mapping[str, LengthMoments]) -> Packer:
        """Return a packer that knows the moments of some features' lengths."""
        return cls._with(CapacityMemory(moments, {}))

    @classmethod
    def _with(cls, memory: CapacityMemory) -> Packer:
        packer = cls()
        packer._memory = memory
        return packer


def fitted(
    batch: KeyedJaggedArray,
    memory: CapacityMemory,
    lengths: Sequence[np.ndarray] | None = None,
    first: Sequence[int] | None = None,
) -> KeyedJaggedArray:
    """Change a host batch to the capacities that a memory chooses for it.

    Args:
        batch: The batch.
        memory: The memory, which the batch then carries.
        lengths: Bag lengths of each key, without those of padding samples; None: the batch's.
        first: Capacities if the memory knows no batch of this kind; None: computed.
    """
    if lengths is None:
        lengths = np.split(np.asarray(batch.lengths), np.cumsum(batch.strides)[:-1])
    inverse = None if batch.inverse_indices is None else np.asarray(batch.inverse_indices)
    if inverse is not None and first is not None:
        first = (*first, *known_capacities(batch))
    wanted, of_samples = memory.of_batch(
        batch.keys, lengths, inverse, samples=batch.batch_size, first=first
    )
    if wanted == batch.capacities:
        return batch._with(sample_capacities=of_samples, memory=memory)
    weights = batch.weights
    return batch._with(
        values=refit(batch.values, batch.capacities, wanted),
        weights=None if weights is None else refit(weights, batch.capacities, wanted),
        capacities=wanted,
        sample_capacities=of_samples,
        memory=memory,
    )


def _is_ragged(leaf: Any) -> bool:
    return isinstance(leaf, KeyedJaggedArray)
