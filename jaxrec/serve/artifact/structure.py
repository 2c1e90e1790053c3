"""Nesting of the arrays of a batch or a result, as plain data that a file can hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec


class Structure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Nesting of leaves in dicts, lists and tuples.

    Attributes:
        kind: What this node is.
        keys: Keys of a dict, in order.
        parts: The nodes inside of a dict, a list or a tuple.
    """

    kind: Literal["leaf", "dict", "list", "tuple"] = "leaf"
    keys: tuple[str, ...] = ()
    parts: tuple[Structure, ...] = ()

    @property
    def num_leaves(self) -> int:
        """Number of leaves inside of this node."""
        return 1 if self.kind == "leaf" else sum(part.num_leaves for part in self.parts)


def flatten(value: Any, name: str) -> tuple[Structure, list[tuple[str, Any]]]:
    """Return the structure of a value, and its leaves with their names.

    Args:
        value: Dicts with string keys, lists and tuples of leaves; any other object is a leaf.
        name: Name of the value, with which the names of its leaves begin.

    Raises:
        TypeError: A key of a dict is not a string, or a tuple is a named one.
    """
    kind: Literal["dict", "list", "tuple"]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{name} is a dict with the key {key!r}; its keys must be strings")
        kind, keys = "dict", tuple(value)
        children = [(f"{name}[{key!r}]", part) for key, part in value.items()]
    elif isinstance(value, list | tuple):
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
    """Return the leaves of a value that has a known structure.

    A list may stand for a tuple and the reverse. The keys of a dict may be in any order.

    Raises:
        TypeError: The value is nested in another way.
        KeyError: A dict lacks a key.
        ValueError: A dict has a key too many, or a list or a tuple has another length.
    """
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


def unflatten(structure: Structure, leaves: Sequence[Any]) -> Any:
    """Return the value of a structure with the given leaves."""
    return _take(structure, iter(leaves))


def _take(structure: Structure, leaves: Iterator[Any]) -> Any:
    if structure.kind == "leaf":
        return next(leaves)
    parts = [_take(part, leaves) for part in structure.parts]
    if structure.kind == "dict":
        return dict(zip(structure.keys, parts, strict=True))
    return parts if structure.kind == "list" else tuple(parts)
