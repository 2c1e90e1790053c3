"""One ragged column as a padded array."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class JaggedArray:
    """A ragged column: the rows' elements one after the other, then padding.

    TorchRec's JaggedTensor with a static capacity. Row ``b`` owns
    ``values[offsets[b]:offsets[b + 1]]``; what lies past ``offsets[-1]`` is padding of no meaning.

    Attributes:
        values: ``[capacity, ...]``, ids or whatever else the rows consist of.
        lengths: ``[batch]`` int32, elements of each row.
        weights: ``[capacity]``, a weight for each element, or None.
    """

    values: Shaped[Array, "capacity *element"]
    lengths: Int32[Array, " batch"]
    weights: Shaped[Array, "capacity *weight"] | None = None

    @property
    def capacity(self) -> int:
        return self.values.shape[0]

    @property
    def batch_size(self) -> int:
        return self.lengths.shape[0]

    @property
    def offsets(self) -> Int32[Array, " batch+1"]:
        """Where each row starts in ``values``, and where the last one ends."""
        return complete_cumsum(self.lengths)


def complete_cumsum(lengths: Int32[Array, " n"]) -> Int32[Array, " n+1"]:
    """``[0, l0, l0 + l1, ...]``: the offsets of segments of the given lengths."""
    return jnp.concatenate([jnp.zeros(1, lengths.dtype), jnp.cumsum(lengths, dtype=lengths.dtype)])
