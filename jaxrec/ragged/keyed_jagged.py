"""Many ragged columns as one padded array: the batch of a recommender model."""

from __future__ import annotations

import dataclasses

import jax
from jaxtyping import Array, Int32, Num

from jaxrec.ragged.jagged import JaggedArray, complete_cumsum


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyedJaggedArray:
    """A batch of named ragged columns, TorchRec's KeyedJaggedTensor with static capacities.

    Key-major: first all of the first key, then all of the second. Each key has its own segment of
    ``values``, filled from its front and padded at its end, so that selecting, permuting and
    splitting keys are static slices.

    Attributes:
        values: ``[sum(capacities)]`` ids (int32 on a device), the keys' segments in order.
        lengths: ``[sum(strides)]`` int32, ids of each bag; ``[keys * batch]`` where all keys have
            the same number of bags.
        weights: ``[sum(capacities)]`` a weight for each id, or None.
        inverse_indices: ``[keys, batch]`` int32 or None. With it, sample ``b`` of the batch has bag
            ``inverse_indices[k, b]`` of key ``k`` (TorchRec's variable batch per feature).
        keys: Names of the columns.
        capacities: Length of each key's segment of ``values``.
        strides: Number of bags of each key.
    """

    values: Num[Array, " capacity"]
    lengths: Int32[Array, " bags"]
    weights: Num[Array, " capacity"] | None = None
    inverse_indices: Int32[Array, "keys batch"] | None = None
    keys: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})
    capacities: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})
    strides: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})

    @property
    def batch_size(self) -> int:
        """Samples in the batch."""
        if self.inverse_indices is not None:
            return self.inverse_indices.shape[1]
        return max(self.strides, default=0)

    @property
    def offsets(self) -> Int32[Array, " bags+1"]:
        """The running sum of ``lengths``, from 0: where bags start once padding is left out."""
        return complete_cumsum(self.lengths)

    def __getitem__(self, key: str) -> JaggedArray:
        """The column of ``key``; a static slice."""
        index = self.keys.index(key)
        start, bag = sum(self.capacities[:index]), sum(self.strides[:index])
        ids = slice(start, start + self.capacities[index])
        return JaggedArray(
            self.values[ids],
            self.lengths[bag : bag + self.strides[index]],
            None if self.weights is None else self.weights[ids],
        )
