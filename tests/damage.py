"""Damage to bytes and to trees of values, for fuzz tests of what reads files."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

INTEGERS = st.one_of(
    st.integers(-3, 20),
    st.sampled_from([1 << n for n in (31, 32, 40, 62, 63, 64, 100)]),
    st.sampled_from([-(1 << n) for n in (31, 32, 63, 64)]),
)
VALUES = st.one_of(
    INTEGERS,
    st.sampled_from([None, True, False, "", "a", "../a", "/", "\0", 0.5, float("nan"), (), [], {}]),
    st.lists(INTEGERS, max_size=3),
)


@st.composite
def damaged(draw: Any, content: bytes) -> bytes:
    """Content with bytes that differ, cut short, longer, or with a part of it moved."""
    place = draw(st.integers(0, max(len(content) - 1, 0)))
    end = draw(st.integers(place, len(content)))
    match draw(st.sampled_from(["flip", "flip", "flip", "cut", "zero", "drop", "twice", "fill"])):
        case "flip":
            changed = bytearray(content)
            for _ in range(draw(st.integers(1, 3))):
                at = draw(st.integers(0, max(len(content) - 1, 0)))
                changed[at : at + 1] = bytes([content[at] ^ draw(st.integers(1, 255))])
            return bytes(changed)
        case "cut":
            return content[:place]
        case "zero":
            return content[:place] + bytes(end - place) + content[end:]
        case "drop":
            return content[:place] + content[end:]
        case "twice":
            return content[:end] + content[place:]
    return content[:place] + b"\xff" * (end - place) + content[end:]


@st.composite
def edited(draw: Any, tree: Any, values: st.SearchStrategy[Any] = VALUES) -> Any:
    """A tree of dictionaries, lists, tuples and dataclasses with some nodes replaced or removed."""
    for _ in range(draw(st.integers(1, 3))):
        paths = list(_paths(tree))
        path = paths[draw(st.integers(0, len(paths) - 1))]
        tree = _replaced(tree, path, draw(st.one_of(st.just(_REMOVED), values)))
    return tree


_REMOVED = object()


def _children(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return list(tree.values())
    if isinstance(tree, list | tuple):
        return list(tree)
    if dataclasses.is_dataclass(tree):
        return [getattr(tree, field.name) for field in dataclasses.fields(tree)]
    return []


def _paths(tree: Any, path: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    yield path
    for position, child in enumerate(_children(tree)):
        yield from _paths(child, (*path, position))


def _replaced(tree: Any, path: tuple[int, ...], value: Any) -> Any:
    """Return a tree whose node at a path is another, or is removed."""
    if not path:
        return None if value is _REMOVED else value
    children = _children(tree)
    new = value if len(path) == 1 else _replaced(children[path[0]], path[1:], value)
    is_kept = [new is not _REMOVED or position != path[0] for position in range(len(children))]
    children[path[0]] = None if new is _REMOVED and dataclasses.is_dataclass(tree) else new
    if dataclasses.is_dataclass(tree):
        return type(tree)(*children)
    if isinstance(tree, dict):
        return dict(itertools.compress(zip(tree, children, strict=True), is_kept))
    return type(tree)(itertools.compress(children, is_kept))
