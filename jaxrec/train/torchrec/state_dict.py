"""The arrays of a file by their names."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Array


@dataclasses.dataclass(frozen=True)
class StateDict:
    """The arrays of a file by their dotted names, read one at a time.

    Attributes:
        path: The file, or the directory of a distributed checkpoint.
        names: Names of the arrays.
        read: Function that reads an array.
        shape: Function that returns the shape of an array, without reading it.
    """

    path: pathlib.Path
    names: Sequence[str]
    read: Callable[[str], Array | np.ndarray]
    shape: Callable[[str], tuple[int, ...]]
