"""The ways to place a table that a search considers, and the reasons why it leaves out others."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxrec.plan.options import ShardingOption


@dataclasses.dataclass(frozen=True)
class Considered:
    """Ways to place a table.

    Attributes:
        ways: The ways that are considered, such as ``"column_wise in 2 parts by pooled"``.
        left_out: Sharding types that are left out, all or in part, with the reason.

    Example:
        >>> print(Considered(("table_wise by rows",), ("grid: it takes whole hosts",)))
        considered: table_wise by rows
        left out: grid: it takes whole hosts
    """

    ways: tuple[str, ...]
    left_out: tuple[str, ...]

    @classmethod
    def of(cls, options: Sequence[ShardingOption], reasons: Sequence[str]) -> Considered:
        """Return what the options of a table consider, each way once."""
        ways = dict.fromkeys(map(_way, options))
        return cls(tuple(ways), tuple(dict.fromkeys(reasons)))

    def __str__(self) -> str:
        lines = [f"considered: {', '.join(self.ways) or 'none'}"]
        lines += [f"left out: {reason}" for reason in self.left_out]
        return "\n".join(lines)


def _way(option: ShardingOption) -> str:
    parts = f" in {option.parts} parts" if option.parts > 1 else ""
    parts += " in uneven shares" if option.shares else ""
    how = "" if option.kind.is_replicated else f" by {option.exchange}"
    storage = "" if option.storage == "device" else f", rows in storage {option.storage}"
    return f"{option.sharding_type}{parts}{how}{storage}"
