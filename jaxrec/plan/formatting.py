"""Bytes, seconds and lists of numbers for people to read."""

from __future__ import annotations

from collections.abc import Sequence


def format_bytes(bytes: float) -> str:
    """Format bytes."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if bytes >= scale:
            digits = ".3g" if bytes >= 100 * scale else ".2f"
            return f"{bytes / scale:{digits}} {unit}"
    return f"{bytes:.0f} bytes"


def format_seconds(seconds: float) -> str:
    """Format seconds."""
    if seconds == 0:
        return "0"
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            value = seconds / scale
            return f"{value:.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"
    return f"{seconds * 1e6:.3g} us"


def format_numbers(numbers: Sequence[int], total: int) -> str:
    """Format numbers below ``total`` as ranges; "all" if none is missing."""
    if len(numbers) == total and total > 1:
        return "all"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
