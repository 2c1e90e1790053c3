"""The options that say which rows of a run are held out."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from jaxrec.arguments import ConfigError
from jaxrec.data.last_of_each import LastOfEach
from jaxrec.data.later_rows import LaterRows
from jaxrec.data.split import DEFAULT_FRACTION, LastRows, RandomRows, Split, ValuesOf

# Values of `hold_out` besides fractions.
RANDOM, LAST = "random", "last"


@runtime_checkable
class HoldOutOptions(Protocol):
    """The options of a run's data that say which rows are held out; see `DataConfig`."""

    @property
    def hold_out(self) -> str | None: ...
    @property
    def hold_out_by(self) -> str | None: ...
    @property
    def hold_out_from(self) -> str | None: ...
    @property
    def user(self) -> str | None: ...
    @property
    def time(self) -> str | None: ...


def split_of(options: HoldOutOptions, seed: int = 0) -> Split:
    """Return the split that options name; ``seed`` is that of random choices.

    Raises:
        ConfigError: A text is no split, or two of them exclude each other.

    Example:
        >>> from jaxrec.train.config import DataConfig
        >>> split_of(DataConfig(hold_out="random:0.2"))
        RandomRows(fraction=0.2, seed=0)
        >>> split_of(DataConfig(hold_out_from="ts=2024-03-01"))
        LaterRows(name='ts', start='2024-03-01')
    """
    hold_out, by, start = options.hold_out, options.hold_out_by, options.hold_out_from
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
    if text == LAST:
        if by is not None:
            raise ConfigError(
                "--hold-out last holds out rows of each user; leave --hold-out-by out"
            )
        if options.user is None:
            raise ConfigError(
                "--hold-out last holds out the last row of each user; name their column with "
                "--user, and that of times with --time"
            )
        return LastOfEach(options.user, options.time)
    # The fraction of "random" may be left out.
    kind, _, number = (f"{text}:{DEFAULT_FRACTION}" if text == RANDOM else text).rpartition(":")
    try:
        fraction = float(number if kind in ("", RANDOM) else kind)
    except ValueError:
        raise ConfigError(
            "--hold-out takes a fraction, random, random: and a fraction such as random:0.1, or "
            f"last, got {text!r}"
        ) from None
    if not 0 < fraction < 1:
        raise ConfigError(f"the fraction of --hold-out must be between 0 and 1, got {fraction}")
    if by is not None:
        return ValuesOf(by, fraction, seed)
    return RandomRows(fraction, seed) if kind else LastRows(fraction)
