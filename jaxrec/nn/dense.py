"""Checks of the dense features of a batch."""

from __future__ import annotations

from typing import Any

import numpy as np


def check_dense(dense: Any, num_dense: int, samples: int) -> None:
    """Check the dense features of a batch.

    Args:
        dense: ``[batch, num_dense]``, or None.
        num_dense: Dense features that the model was made for.
        samples: Samples of the batch of ids beside them.

    Raises:
        ValueError: They have another shape, or are missing.
    """
    shape: tuple[int, ...] = (samples, 0) if dense is None else tuple(np.shape(dense))
    if len(shape) != 2:
        raise ValueError(
            f"dense features are [batch, num_dense], here [{samples}, {num_dense}]; got an array "
            f"of shape {shape}"
        )
    if shape[1] != num_dense:
        raise ValueError(
            f"the model has {num_dense} dense features, but the batch has {shape[1]}; num_dense= "
            "of the model says how many columns they have"
        )
    if shape[0] != samples:
        raise ValueError(
            f"there are dense features of {shape[0]} samples, but ids of {samples}; a batch has "
            "both of the same samples"
        )
