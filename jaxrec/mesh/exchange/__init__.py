"""Exchanges: how ids, rows and gradients of sharded tables travel between devices."""

from __future__ import annotations

from typing import TypeAlias

from jaxrec.mesh.exchange.bags import Bags, PooledByHost
from jaxrec.mesh.exchange.base import DEFAULT_CAPACITY_FACTOR as DEFAULT_CAPACITY_FACTOR
from jaxrec.mesh.exchange.base import Cut as Cut
from jaxrec.mesh.exchange.base import Exchange as Exchange
from jaxrec.mesh.exchange.base import Request as Request
from jaxrec.mesh.exchange.base import Workload as Workload
from jaxrec.mesh.exchange.local import Alone, Replicated
from jaxrec.mesh.exchange.pooled import Pooled
from jaxrec.mesh.exchange.rows import Rows

ROWS, POOLED, POOLED_BY_HOST, BAGS = Rows(), Pooled(), PooledByHost(), Bags()
REPLICATED, ALONE = Replicated(), Alone()

EXCHANGES: dict[str, Exchange] = {
    each.name: each for each in (ROWS, POOLED, POOLED_BY_HOST, BAGS, REPLICATED)
}
"""Exchanges by name. `ALONE` is missing, since placements do not name it."""

ExchangeLike: TypeAlias = str | Exchange
"""An exchange, or its name in `EXCHANGES`."""


def find_exchange(exchange: ExchangeLike) -> Exchange:
    """Return the exchange of a name; an `Exchange` is returned as it is."""
    if isinstance(exchange, Exchange):
        return exchange
    if exchange not in EXCHANGES:
        raise ValueError(
            f"no exchange is named {exchange!r}; there are {', '.join(map(repr, EXCHANGES))}"
        )
    return EXCHANGES[exchange]


def choose_exchange(wanted: ExchangeLike | None, cut: Cut) -> Exchange:
    """Return the exchange that a table uses if its placement names ``wanted``.

    The default is "bags" for pooled tables whose rows are on one device, else "rows". Raises a
    ValueError if the exchange cannot carry the table.
    """
    default = ROWS if _refuse(BAGS, cut) else BAGS
    exchange = default if wanted is None else find_exchange(wanted)
    # "pooled" adds sums over devices. Rows on one device need no such sum ("bags"), and rows on one
    # host need it within the host alone ("pooled_by_host").
    if exchange is POOLED:
        special = (each for each in (BAGS, POOLED_BY_HOST) if not _refuse(each, cut))
        exchange = next(special, exchange)
    if reason := _refuse(exchange, cut):
        raise ValueError(f"exchange {exchange.name!r} is not possible, since {reason}")
    if exchange in (ROWS, POOLED, BAGS) and not _refuse(ALONE, cut):
        return ALONE
    return exchange


def _refuse(exchange: Exchange, cut: Cut) -> str | None:
    """Return why an exchange cannot carry a table; None: it can."""
    if cut.is_large and not (exchange.takes_large_groups or exchange.is_replicated):
        return "it carries no more rows over the mesh than int32 can number"
    if cut.takes_max and not exchange.pools_max:
        return "it adds up the rows of a bag, and the pooling is 'max'"
    return exchange.refuse(cut)
