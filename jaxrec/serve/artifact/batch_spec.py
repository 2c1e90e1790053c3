"""The batches that an exported model takes, and the sizes that it is compiled for.

A program has static shapes, so that a model is exported for a ladder of batch sizes. Each size has
a capacity for the ids of each feature.
"""

from __future__ import annotations

from typing import TypeAlias

import jax
import jax.numpy as jnp
import msgspec

from jaxrec.serve.artifact.structure import Structure


class ArrayInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="array"):
    """An array with a leading batch axis.

    Attributes:
        name: Its place in the batch, such as ``batch[0]``.
        dtype: Its type in the program.
        shape: Shape of one sample.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


class Feature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A key of a `KeyedJaggedArray`.

    Attributes:
        name: The key.
        num_ids: Ids are from 0 to ``num_ids - 1``; None: no table reads the feature.
        fixed: Number of ids that each sample must have; None: any number.
    """

    name: str
    num_ids: int | None = None
    fixed: int | None = None


class RaggedInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="ragged"):
    """A `KeyedJaggedArray`.

    Attributes:
        name: Its place in the batch, such as ``batch[1]``.
        features: The keys that the program reads.
        is_weighted: Whether it has weights.
    """

    name: str
    features: tuple[Feature, ...]
    is_weighted: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the features."""
        return tuple(feature.name for feature in self.features)


Input: TypeAlias = ArrayInput | RaggedInput


class BatchSize(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A size of batches that the model is compiled for.

    Attributes:
        samples: Number of samples.
        capacities: For each `RaggedInput`, in order, the capacity of each of its features.
    """

    samples: int
    capacities: tuple[tuple[int, ...], ...]


class BatchSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The batches that an exported model takes.

    Attributes:
        structure: Nesting of the inputs in the tuple of positional arguments.
        inputs: The arrays and the ragged batches, in the order of the structure's leaves.
        sizes: The sizes that the model is compiled for, ascending.
    """

    structure: Structure
    inputs: tuple[ArrayInput | RaggedInput, ...]
    sizes: tuple[BatchSize, ...]

    @property
    def ragged(self) -> tuple[RaggedInput, ...]:
        """The ragged inputs, in order."""
        return tuple(each for each in self.inputs if isinstance(each, RaggedInput))

    def shapes(self, size: BatchSize) -> list[jax.ShapeDtypeStruct]:
        """Return the arrays of a batch of one size, as the program takes them.

        An `ArrayInput` is one array. A `RaggedInput` is two or three: ``values`` and ``lengths`` of
        int32, and ``weights`` of float32 where it is weighted.
        """
        shapes, capacities = [], iter(size.capacities)
        for each in self.inputs:
            if isinstance(each, ArrayInput):
                shapes.append(jax.ShapeDtypeStruct((size.samples, *each.shape), each.dtype))
                continue
            capacity = sum(next(capacities))
            shapes.append(jax.ShapeDtypeStruct((capacity,), jnp.int32))
            shapes.append(jax.ShapeDtypeStruct((len(each.keys) * size.samples,), jnp.int32))
            if each.is_weighted:
                shapes.append(jax.ShapeDtypeStruct((capacity,), jnp.float32))
        return shapes
