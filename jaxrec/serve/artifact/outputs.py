"""The outputs of a model as columns with names."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pyarrow as pa

from jaxrec.serve.artifact.structure import flatten

# Column of the scores of a model with one output.
SCORE = "score"


def output_columns(outputs: Any) -> dict[str, np.ndarray]:
    """Return outputs by the names of their columns."""
    _, leaves = flatten(outputs, "")
    return {column_name(name): leaf for name, leaf in leaves}


def column_name(output: str) -> str:
    """Return the column of an output, given its place, such as ``output['a'][0]``."""
    parts = re.findall(r"\['(.*?)'\]|\[(\d+)\]", output)
    return ".".join(key or index for key, index in parts) or SCORE


def arrow_column(array: np.ndarray) -> pa.Array:
    """Return an output as a column of numbers, or of lists of them."""
    if array.dtype.kind == "V":  # bfloat16 and the like
        array = array.astype(np.float32)
    flat = pa.array(np.ascontiguousarray(array).reshape(-1))
    for size in reversed(array.shape[1:]):
        flat = pa.FixedSizeListArray.from_arrays(flat, size)
    return flat
