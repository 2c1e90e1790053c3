"""64-bit ids as two 32-bit words, the one form in which they may go to a device."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Int64, UInt32

from jaxrec.ragged.arrays import AnyArray
from jaxrec.ragged.columns import integers


def split_int64(ids: Any) -> UInt32[np.ndarray, "*shape 2"]:
    """Split each id into its high and its low word.

    JAX cuts 64-bit integers to 32 bits silently unless ``jax_enable_x64`` is set; two words of 32
    bits arrive whole either way.

    Args:
        ids: ``[...]`` int64 or uint64, on the host.

    Returns:
        ``[..., 2]`` uint32: high word, low word.

    Raises:
        TypeError: The ids are not integers.
        ValueError: One does not fit 64 bits.

    Example:
        >>> import numpy as np
        >>> split_int64(np.array([2**32 + 5]))
        array([[1, 5]], dtype=uint32)
    """
    ids = integers("ids", "id", ids)
    if ids.dtype == object:
        raise ValueError(f"id {max(ids.flat, key=abs)} does not fit 64 bits")
    bits = ids.astype(np.int64).view(np.uint64) if ids.dtype.kind == "i" else ids.astype(np.uint64)
    return np.stack([bits >> np.uint64(32), bits & np.uint64(2**32 - 1)], -1).astype(np.uint32)


def join_int64(words: UInt32[AnyArray, "*shape 2"]) -> Int64[np.ndarray, "*shape"]:
    """Join the words of `split_int64`, on the host, to int64 ids (uint64 ids keep their bits).

    Example:
        >>> import numpy as np
        >>> join_int64(split_int64(np.array([-7, 2**40])))
        array([           -7, 1099511627776])
    """
    words = np.asarray(words).astype(np.uint64)
    return np.asarray((words[..., 0] << np.uint64(32)) | words[..., 1]).view(np.int64)
