"""The batches that an exported model takes, the sizes it is compiled for, and its outputs' names.

A program has static shapes, so a model is exported for a ladder of batch sizes. Each size has
a capacity for the ids of each feature. The nesting of inputs and outputs is plain data, which a
file can hold.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import msgspec
import numpy as np


class Structure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node of nested dicts, lists and tuples: its kind, a dict's keys, and the nodes in it."""

    kind: Literal["leaf", "dict", "list", "tuple"] = "leaf"
    keys: tuple[str, ...] = ()
    parts: tuple[Structure, ...] = ()

    @property
    def num_leaves(self) -> int:
        """Number of leaves inside of this node."""
        return 1 if self.kind == "leaf" else sum(part.num_leaves for part in self.parts)


class ArrayInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="array"):
    """An array with a leading batch axis.

    ``name`` is its path in the batch, such as ``batch[0]``; ``shape`` leaves the batch axis out.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


class Feature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A key of a `KeyedJaggedArray`.

    Ids are below ``num_ids``, which is None if no table reads the feature. Every sample must have
    ``fixed`` ids; None: any number.
    """

    name: str
    num_ids: int | None = None
    fixed: int | None = None


class RaggedInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="ragged"):
    """A `KeyedJaggedArray` with the keys that the program reads.

    ``name`` is its path in the batch, such as ``batch[1]``.
    """

    name: str
    features: tuple[Feature, ...]
    is_weighted: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the features."""
        return tuple(feature.name for feature in self.features)


Input: TypeAlias = ArrayInput | RaggedInput


class ArrayOutput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An output, an array with a leading batch axis.

    Attributes:
        name: Path of the output, such as ``output['score']``.
        dtype: Type of the elements.
        shape: Shape of one sample's part.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


class BatchSize(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number of samples that the model is compiled for, with capacities for their ids.

    ``capacities[i][j]`` is for feature ``j`` of the ``i``-th ragged input of `BatchSpec.inputs`.
    """

    samples: int
    capacities: tuple[tuple[int, ...], ...]


class BatchSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The batches that an exported model takes.

    ``inputs`` are in the order of the structure's leaves, ``sizes`` ascend.
    """

    structure: Structure
    inputs: tuple[ArrayInput | RaggedInput, ...]
    sizes: tuple[BatchSize, ...]

    @property
    def ragged(self) -> tuple[RaggedInput, ...]:
        """The ragged inputs, in order."""
        return tuple(each for each in self.inputs if isinstance(each, RaggedInput))

    def shapes(self, size: BatchSize) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes of the program's arguments for a batch of one size.

        An `ArrayInput` is one array. A `RaggedInput` is two or three: int32 ``values`` and
        ``lengths``, and float32 ``weights`` if it is weighted.
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


def flatten(value: Any, name: str) -> tuple[Structure, list[tuple[str, Any]]]:
    """Return the structure of a nested value, and pairs of each leaf's name and the leaf.

    Dicts with string keys, lists and tuples are nodes, and any other object is a leaf. A leaf's
    name is its path after ``name``: ``name[0]['a']``. Other keys and named tuples raise a
    TypeError.
    """
    kind: Literal["dict", "list", "tuple"]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{name} is a dict with the key {key!r}; its keys must be strings")
        kind, keys = "dict", tuple(value)
        children = [(f"{name}[{key!r}]", part) for key, part in value.items()]
    elif isinstance(value, list | tuple):
        # Not `jax.tree`: it sorts the keys of dicts, and takes any registered class, which a file
        # cannot name.
        if hasattr(value, "_fields"):
            raise TypeError(
                f"{name} is a {type(value).__name__}; give a plain tuple or a dict of its fields"
            )
        kind, keys = "list" if isinstance(value, list) else "tuple", ()
        children = [(f"{name}[{index}]", part) for index, part in enumerate(value)]
    else:
        return Structure(), [(name, value)]
    parts, leaves = [], []
    for child, part in children:
        structure, inside = flatten(part, child)
        parts.append(structure)
        leaves += inside
    return Structure(kind, keys, tuple(parts)), leaves


def leaves_of(structure: Structure, value: Any, name: str) -> list[Any]:
    """Return the leaves of a value that has a known structure; errors name the wrong part."""
    # A list may stand for a tuple and the reverse, and keys may be in any order: clients read
    # values from JSON.
    if structure.kind == "leaf":
        return [value]
    if structure.kind == "dict":
        if not isinstance(value, dict):
            raise TypeError(f"{name} must be a dict, got {type(value).__name__}")
        if missing := [key for key in structure.keys if key not in value]:
            raise KeyError(f"{name} lacks {', '.join(map(repr, missing))}")
        if unknown := [key for key in value if key not in structure.keys]:
            raise ValueError(
                f"{name} has {', '.join(map(repr, unknown))}, but its keys are "
                f"{', '.join(map(repr, structure.keys))}"
            )
        children = [(f"{name}[{key!r}]", value[key]) for key in structure.keys]
    else:
        if not isinstance(value, list | tuple):
            raise TypeError(f"{name} must be a {structure.kind}, got {type(value).__name__}")
        if len(value) != len(structure.parts):
            raise ValueError(f"{name} must have {len(structure.parts)} elements, got {len(value)}")
        children = [(f"{name}[{index}]", part) for index, part in enumerate(value)]
    return [
        leaf
        for part, (child, inside) in zip(structure.parts, children, strict=True)
        for leaf in leaves_of(part, inside, child)
    ]


def unflatten(structure: Structure, leaves: Iterable[Any]) -> Any:
    """Nest leaves by a structure: the reverse of `flatten`."""
    # One iterator, from which the parts take their leaves in turn.
    leaves = iter(leaves)
    if structure.kind == "leaf":
        return next(leaves)
    parts = [unflatten(part, leaves) for part in structure.parts]
    if structure.kind == "dict":
        return dict(zip(structure.keys, parts, strict=True))
    return parts if structure.kind == "list" else tuple(parts)


# Column of the scores of a model with one output.
SCORE = "score"


def output_columns(outputs: Any) -> dict[str, np.ndarray]:
    """Return a model's outputs, nested as the model returns them, as a dict by column name."""
    _, leaves = flatten(outputs, "")
    return {column_name(name): leaf for name, leaf in leaves}


def column_name(output: str) -> str:
    """Return the column name of an output's path: ``a.0`` for ``output['a'][0]``."""
    parts = re.findall(r"\['(.*?)'\]|\[(\d+)\]", output)
    return ".".join(key or index for key, index in parts) or SCORE
