"""Named blocks of columns of one dense array: what pooled lookups give."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
from jaxtyping import Array, Float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyedArray:
    """Dense blocks side by side, TorchRec's KeyedTensor.

    Attributes:
        values: ``[batch, sum(dims)]``, the keys' blocks in order.
        keys: Names of the blocks.
        dims: Columns of each block.
    """

    values: Float[Array, "batch columns"]
    keys: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})
    dims: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})

    def __getitem__(self, key: str) -> Float[Array, "batch dim"]:
        """The block of ``key``; a static slice."""
        index = self.keys.index(key)
        start = sum(self.dims[:index])
        return self.values[:, start : start + self.dims[index]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys)
