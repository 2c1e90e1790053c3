"""`KeyedArray`, one dense array with named blocks of columns: the result of pooled lookups."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import jax
from jaxtyping import Float

from jaxrec.ragged import printing
from jaxrec.ragged.arrays import AnyArray, namespace


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class KeyedArray:
    """A dense array of named blocks side by side, TorchRec's KeyedTensor.

    Attributes:
        values: ``[batch, sum(dims)]``, the keys' blocks in order.
        keys: Names of the blocks.
        dims: Columns of each block.

    Example:
        >>> import jax.numpy as jnp
        >>> pooled = KeyedArray.from_arrays({"a": jnp.ones((2, 1)), "b": jnp.zeros((2, 3))})
        >>> pooled
        KeyedArray(values=float32[2, 4], dims={'a': 1, 'b': 3})
        >>> pooled["b"].shape
        (2, 3)
    """

    values: Float[AnyArray, "batch columns"]
    keys: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})
    dims: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Float[AnyArray, "batch _"]]) -> KeyedArray:
        """Make a keyed array of blocks by name, each ``[batch, dim]``.

        Raises:
            ValueError: ``arrays`` is empty, or the blocks are not ``[batch, dim]`` of one batch
                size.
        """
        shapes = {key: array.shape for key, array in arrays.items()}
        if not shapes:
            raise ValueError("a KeyedArray has at least one block")
        if {len(shape) for shape in shapes.values()} != {2} or len(
            {shape[0] for shape in shapes.values()}
        ) != 1:
            raise ValueError(f"blocks must be [batch, dim] of one batch size, not {shapes}")
        blocks = list(arrays.values())
        values = namespace(*blocks).concatenate(blocks, axis=1)
        return cls(values, tuple(arrays), tuple(shape[1] for shape in shapes.values()))

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return self.values.shape[0]

    @property
    def offset_per_key(self) -> tuple[int, ...]:
        """First column of each key, then the total width: ``(0, 64, 128)``. Static."""
        return tuple(itertools.accumulate(self.dims, initial=0))

    def __getitem__(self, key: str) -> Float[AnyArray, "batch dim"]:
        """Return the block of ``key``; a static slice.

        Raises:
            KeyError: There is no such key.
        """
        if key not in self.keys:
            raise KeyError(f"no key {key!r} among {list(self.keys)}")
        index = self.keys.index(key)
        start = sum(self.dims[:index])
        return self.values[:, start : start + self.dims[index]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys)

    def to_dict(self) -> dict[str, Float[AnyArray, "batch _"]]:
        """Return all blocks by name."""
        return {key: self[key] for key in self.keys}

    @staticmethod
    def regroup(
        arrays: Sequence[KeyedArray], groups: Sequence[Sequence[str]]
    ) -> list[Float[AnyArray, "batch _"]]:
        """Concatenate the blocks of each group of keys, from any of the arrays.

        Args:
            arrays: Keyed arrays of the same batch, with different keys.
            groups: Keys of each result, in order; a key may be in several groups or in none.

        Returns:
            For each group ``[batch, sum of its keys' dims]``.

        Raises:
            KeyError: A key is in none of the arrays.
            ValueError: A key is in two of the arrays, or a group is empty.

        Example:
            >>> import jax.numpy as jnp
            >>> one = KeyedArray.from_arrays({"a": jnp.ones((2, 1)), "b": jnp.zeros((2, 3))})
            >>> two = KeyedArray.from_arrays({"c": jnp.ones((2, 2))})
            >>> [g.shape for g in KeyedArray.regroup([one, two], [["c", "a"], ["b"]])]
            [(2, 3), (2, 3)]
        """
        blocks: dict[str, Float[AnyArray, "batch _"]] = {}
        for array in arrays:
            if shared := sorted(blocks.keys() & set(array.keys)):
                raise ValueError(f"keys {shared} are in more than one of the arrays")
            blocks |= array.to_dict()
        if empty := [index for index, group in enumerate(groups) if not group]:
            raise ValueError(f"groups {empty} have no keys")
        if missing := sorted({key for group in groups for key in group} - blocks.keys()):
            raise KeyError(f"no keys {missing} among {list(blocks)}")
        return [
            namespace(*(parts := [blocks[key] for key in group])).concatenate(parts, axis=1)
            for group in groups
        ]

    @staticmethod
    def regroup_as_dict(
        arrays: Sequence[KeyedArray], groups: Mapping[str, Sequence[str]]
    ) -> dict[str, Float[AnyArray, "batch _"]]:
        """Compute `regroup` with named groups."""
        regrouped = KeyedArray.regroup(arrays, list(groups.values()))
        return dict(zip(groups, regrouped, strict=True))

    def __repr__(self) -> str:
        return printing.keyed(self)
