"""Copies of an array in the text of a compiled program."""

from __future__ import annotations

import re
from collections.abc import Sequence

import jax


def find_copies(
    compiled: jax.stages.Compiled,
    shape: Sequence[int],
    operations: Sequence[str] = ("copy", "convert"),
) -> list[str]:
    """Return the instructions that make an array of a shape by some operations.

    The shape is that of one device's part. A table in 16 bits is copied by converting all of it.
    `tests/test_copies.py` holds programs with copies.
    """
    dims = ",".join(map(str, shape))
    return re.findall(rf"= \w+\[{dims}\]\S* (?:{'|'.join(operations)})\(.*", compiled.as_text())
