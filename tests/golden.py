"""Golden data: inputs and outputs recorded from TorchRec and FBGEMM.

``tests/golden/<area>/manifest.json`` says in words what every array of that area's cases means, and
within which tolerance it holds; each case is one ``.npz`` beside it.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np

_ROOT = pathlib.Path(__file__).parent / "golden"


def cases(area: str) -> list[tuple[str, dict[str, Any]]]:
    """Name and manifest entry of each case of an area, in the manifest's order.

    An entry has ``semantics`` (in words), ``meta`` (shapes, hyperparameters), ``inputs`` and
    ``outputs`` (names of the arrays) and ``tolerance`` (``{"rtol": ..., "atol": ...}``).

    Example:
        @pytest.mark.parametrize(("name", "case"), golden.cases("optim"), ids=golden.names("optim"))
        def test_golden(name, case):
            arrays = golden.load("optim", name)
            ...
            np.testing.assert_allclose(out, arrays["out_1"], **case["tolerance"])
    """
    manifest = json.loads((_ROOT / area / "manifest.json").read_text())
    return [(case["name"], case) for case in manifest["cases"]]


def names(area: str) -> list[str]:
    """Names of an area's cases, in the order of `cases`: the ids of a parametrised test."""
    return [name for name, _ in cases(area)]


def load(area: str, name: str) -> dict[str, np.ndarray]:
    """The arrays of a case, inputs and outputs, by name."""
    with np.load(_ROOT / area / f"{name}.npz", allow_pickle=False) as arrays:
        return dict(arrays)
