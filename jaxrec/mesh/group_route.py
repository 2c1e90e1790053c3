"""The route of a group's lookups in one batch, and the lines that were fetched along it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Float

from jaxrec.embed.kernels import Lookups
from jaxrec.mesh.exchange.lines import Lines


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GroupRoute:
    """Flat lookups of one group in this device's batch, without weights, and their route.

    Attributes:
        lookups: The lookups.
        route: Result of `Exchange.route` for them.
        fetched: Lines that came ahead; None: the lookup fetches them.
    """

    lookups: Lookups
    route: Any
    fetched: Fetched | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fetched:
    """Lines of a group's lookups, which came ahead of their step.

    Attributes:
        lines: Result of `Exchange.fetch`.
        demand: Share of the lines that the last update made stale, the largest of all devices; None
            for frozen tables.
    """

    lines: Lines
    demand: Float[Array, ""] | None
