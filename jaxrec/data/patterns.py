"""Columns by pattern: which of a table's columns and features the options of a user name."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping

from jaxrec.data.schema import SchemaError

_WILDCARDS = "*?["


def matching(pattern: str, features: Mapping[str, str]) -> list[str]:
    """Return the features that a pattern names, in their order.

    A pattern that is the name of a column, or of a feature, names it alone: a column of times
    stands for its parts. Otherwise ``*``, ``?`` and ``[ab]`` match as in file names, with capitals
    and small letters apart; and the name of a struct stands for all of its fields.

    Args:
        pattern: The pattern.
        features: The column that each feature comes from, by the feature's name.

    Example:
        >>> features = {"ts.age": "ts", "ts.hour": "ts", "user.age": "user.age", "x": "x"}
        >>> [matching(pattern, features) for pattern in ("ts", "*.age", "user", "x", "y")]
        [['ts.age', 'ts.hour'], ['ts.age', 'user.age'], ['user.age'], ['x'], []]
    """
    if exact := [name for name, column in features.items() if pattern in (name, column)]:
        return exact
    return [
        name
        for name, column in features.items()
        if fnmatch.fnmatchcase(name, pattern)
        or fnmatch.fnmatchcase(column, pattern)
        or name.startswith(f"{pattern}.")
    ]


def covered(patterns: Iterable[str], names: Iterable[str]) -> set[str]:
    """Return the columns that some of the patterns name."""
    columns = {name: name for name in names}
    return {name for pattern in patterns for name in matching(pattern, columns)}


def named_by(patterns: Iterable[str], features: Mapping[str, str]) -> dict[str, str]:
    """Return the first pattern that names a feature, by the feature's name.

    Raises:
        SchemaError: A pattern names none.
    """
    named: dict[str, str] = {}
    for pattern in patterns:
        names = matching(pattern, features)
        if not names:
            is_name = not any(each in pattern for each in _WILDCARDS)
            problem = (
                f"there is no column {pattern!r}" if is_name else f"no column matches {pattern!r}"
            )
            columns = ", ".join(dict.fromkeys(features.values()))
            raise SchemaError(f"{problem}; the columns are {columns}")
        for name in names:
            named.setdefault(name, pattern)
    return named
