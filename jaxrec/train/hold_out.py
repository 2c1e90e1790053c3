"""The options that say which rows of a run are held out."""

from __future__ import annotations

from jaxrec.arguments import ConfigError
from jaxrec.data.later_rows import LaterRows
from jaxrec.data.split import DEFAULT_FRACTION, LastRows, RandomRows, Split, ValuesOf


def split_of(
    hold_out: str | None = None,
    by: str | None = None,
    start: str | None = None,
    *,
    seed: int = 0,
) -> Split:
    """Return the split that options name.

    Args:
        hold_out: A fraction, "random", or "random:" and a fraction; None: a tenth.
        by: Column of which some values are held out.
        start: Column and first value that is held out, such as "ts=2024-03-01".
        seed: Seed of random choices.

    Raises:
        ConfigError: A text is none of these, or two of them exclude each other.

    Example:
        >>> split_of("random:0.2")
        RandomRows(fraction=0.2, seed=0)
        >>> split_of(start="ts=2024-03-01")
        LaterRows(name='ts', start='2024-03-01')
    """
    if start is not None:
        if hold_out is not None or by is not None:
            raise ConfigError(
                "--hold-out-from says which rows are held out; leave "
                f"{'--hold-out' if by is None else '--hold-out-by'} out"
            )
        name, equals, value = start.rpartition("=")
        if not (name and equals and value):
            raise ConfigError(
                f"--hold-out-from takes NAME=VALUE, such as ts=2024-03-01, got {start!r}"
            )
        return LaterRows(name, value)
    text = hold_out or f"{DEFAULT_FRACTION}"
    # The fraction of "random" may be left out.
    kind, _, number = (f"random:{DEFAULT_FRACTION}" if text == "random" else text).rpartition(":")
    try:
        fraction = float(number if kind in ("", "random") else kind)
    except ValueError:
        raise ConfigError(
            f"--hold-out takes a fraction, random, or random: and a fraction, such as random:0.1, "
            f"got {text!r}"
        ) from None
    if not 0 < fraction < 1:
        raise ConfigError(f"the fraction of --hold-out must be between 0 and 1, got {fraction}")
    if by is not None:
        return ValuesOf(by, fraction, seed)
    return RandomRows(fraction, seed) if kind else LastRows(fraction)
