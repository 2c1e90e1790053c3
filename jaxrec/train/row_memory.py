"""Memory that the rows of a run take while they are read, encoded and shuffled: ``--memory``.

The sizes that follow from it are those of row groups, of which a run holds some at a time.
"""

from __future__ import annotations

import re

import pyarrow as pa

from jaxrec.arguments import ConfigError
from jaxrec.data import DataError, ParquetGroups, Schema
from jaxrec.data.formats.base import Format
from jaxrec.data.shuffled import KEPT_WINDOWS

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?B?)", re.IGNORECASE)

# The least that can be given.
SMALLEST = 100 * 10**6

# What a run takes besides its row groups: pages that are unpacked, batches that wait, samples of
# the columns, memory that threads have freed.
FIXED = 80 * 10**6

# The least for other formats than Parquet, of which parts of 16 MiB are parsed.
_SMALLEST_OF_TEXT = 300 * 10**6

# Row groups that are in memory at once while columns are learned: one is read, one waits, one is
# counted, and a column of it is copied.
_LEARNED_GROUPS = 4

# Row groups that threads read and encode at once while a model trains.
_THREADS = 2

# Part of the memory for a row group of a converted file, of which several are in memory later.
_CONVERTED_PART = 24

# Freed memory that the allocator keeps, as a part of the memory in use.
_KEPT = 1.25


def parse_memory(text: str) -> int:
    """Return the bytes of a text such as "2GB" or "500MB"; raise a ConfigError for others.

    Example:
        >>> parse_memory("1.5GB")
        1500000000
    """
    size = _SIZE.fullmatch(text.strip())
    if size is None:
        raise ConfigError(f"--memory {text}: give a size such as 500MB or 2GB")
    unit = size[2].upper()
    number = float(size[1]) * _UNITS[unit if unit.endswith("B") or not unit else f"{unit}B"]
    if number < SMALLEST:
        raise ConfigError(f"--memory {text} is too small; give {SMALLEST // 10**6}MB or more")
    return int(number)


def return_freed_memory(memory: str | None) -> None:
    """Have Arrow return freed memory to the system at once, in the whole process, if it is bounded.

    Otherwise each of Arrow's threads keeps what it freed: beside rows of 50 MB that was another 50
    MB in some runs, and none in others.
    """
    if memory is not None and "jemalloc" in pa.supported_memory_backends():
        pa.set_memory_pool(pa.jemalloc_memory_pool())
        pa.jemalloc_set_decay_ms(0)


def check_model(memory: str | None, model: str) -> None:
    """Raise a ConfigError if ``memory`` is given for a model that reads no rows but sequences."""
    if memory is not None:
        raise ConfigError(
            f"--memory is for models of rows, and model.name {model} reads sequences; leave it out"
        )


def converted_group_bytes(memory: str | None, kind: Format | None) -> int | None:
    """Return the bytes of the row groups that files of a format are converted to.

    None: the default, or Parquet files, which stay as they are.
    """
    if memory is None or kind is None:
        return None
    if (size := parse_memory(memory)) < _SMALLEST_OF_TEXT:
        raise ConfigError(
            f"--memory {memory} is too small to convert {kind.name}; give "
            f"{_megabytes(_SMALLEST_OF_TEXT)} or more, or Parquet files"
        )
    return size // _CONVERTED_PART


def check_groups(
    memory: str | None, groups: ParquetGroups, schema: Schema, besides: int = 0
) -> None:
    """Raise a DataError if the memory is too small for one row group at a time.

    ``besides`` is the number of bytes that a model keeps of the rows, as `pair_bytes`.
    """
    if memory is None or (needed := _needed(groups, schema, 1) + besides) <= parse_memory(memory):
        return
    others = f", and the items of users, up to {_megabytes(besides)}" if besides else ""
    sizes = groups.bytes_of_groups
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    raise DataError(
        f"--memory {memory} is too small: {groups.location(largest)[0]} has a row group of "
        f"{groups.sizes[largest]:,} rows, about {_megabytes(sizes[largest])}, and a run holds "
        f"several{others}; give --memory {_megabytes(needed)}, leave columns out, or write smaller "
        "row groups"
    )


def pair_bytes(rows: int) -> int:
    """Return the most bytes that pairs of user and item of ``rows`` rows take while sorted.

    A pair is a number of 8 bytes. All rows may have different pairs. Sorted ones are copied once,
    beside two booleans for each.
    """
    return (2 * 8 + 2) * rows


def window_within(
    memory: str, groups: ParquetGroups, schema: Schema, most: int, besides: int = 0
) -> int:
    """Return the number of row groups to shuffle together, from 1 to ``most``."""
    limit = parse_memory(memory) - besides
    fitting = (n for n in range(most, 1, -1) if _needed(groups, schema, n) <= limit)
    return next(fitting, 1)


def _needed(groups: ParquetGroups, schema: Schema, window: int) -> int:
    """Estimate the bytes of rows in memory if ``window`` row groups are shuffled together.

    Return the larger one of two numbers: the bytes for learning the columns, and for training.
    """
    stored = max(groups.bytes_of_groups)
    # Each value becomes a number of 4 bytes, or a raw id of 8. A row has a weight besides, parts of
    # its times, and the ends of its lists.
    more = 1 + len(schema.parts) + len(schema.categorical)
    numbers = max(
        values + rows * more
        for values, rows in zip(groups.values_of_groups, groups.sizes, strict=True)
    )
    encoded = numbers * (8 if schema.dynamic else 4)
    # A window is encoded, and copied in another order, before it counts among the kept ones.
    trained = _THREADS * (stored + encoded) + (KEPT_WINDOWS + _THREADS) * window * encoded
    return FIXED + int(_KEPT * max(trained, _LEARNED_GROUPS * stored))


def _megabytes(size: int) -> str:
    return f"{-(-size // 10**6)}MB"
