"""Stashing: where the residuals of a lookup are while the dense part runs.

Residuals are routes, row indices, bags and factors, 10 to 25 bytes for each id of a batch. The
update needs them, but they lie on the device from the lookup on. A collection with ``stash=`` keeps
less there:

- ``"host"`` copies them to pinned host memory after the lookup, and back before the update;
- ``"recompute"`` drops them and keeps the batch, which the step holds anyway. Before the update
  they are computed again from its ids, with the exchange of ids between devices. Tables with max
  pooling read their rows again, too.

Both give the numbers of a step without a stash, to the bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

import jax

from jaxrec.embed.row_gradients import Residuals, Routes
from jaxrec.embed.store import TableStore
from jaxrec.ragged import KeyedJaggedArray

Stash: TypeAlias = Literal["host", "recompute"]
"""A policy for the residuals of lookups; None in its place: they stay on the device."""

STASHES: tuple[Stash, ...] = get_args(Stash)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HostResiduals:
    """Residuals of a lookup in pinned host memory."""

    residuals: Residuals

    def restore(self, store: TableStore) -> Residuals:
        """Return the residuals on the device."""
        return jax.device_put(self.residuals, jax.memory.Space.Device)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LookupArguments:
    """Arguments of a lookup whose residuals are computed again; its routes if they came ahead."""

    features: KeyedJaggedArray
    routes: Routes | None
    options: tuple[tuple[str, Any], ...] = dataclasses.field(metadata={"static": True})

    def restore(self, store: TableStore) -> Residuals:
        """Compute the residuals again. XLA removes the reading of rows as dead code."""
        return store.lookup(self.features, routes=self.routes, **dict(self.options))[1]


Stashed: TypeAlias = Residuals | HostResiduals | LookupArguments


def check_stash_name(stash: Any) -> None:
    """Raise a ValueError if a policy is unknown."""
    if stash is not None and stash not in STASHES:
        known = " or ".join(map(repr, STASHES))
        raise ValueError(
            f"stash is {known}, or None to keep residuals on the device, got {stash!r}"
        )


def check_stash(stash: Any, device: Any = None) -> None:
    """Raise a ValueError if a policy is unknown, or if the device's host memory cannot be pinned.

    Args:
        stash: The policy.
        device: A `jax.Device` of the tables; None: the first one of this process.
    """
    check_stash_name(stash)
    if stash == "host":
        device = jax.local_devices()[0] if device is None else device
        kinds = [memory.kind for memory in device.addressable_memories()]
        if "pinned_host" not in kinds:
            raise ValueError(
                f"stash='host' needs memory of kind 'pinned_host', and {device} has "
                f"{', '.join(kinds)}; take stash='recompute'"
            )


def stash_residuals(
    stash: Stash | None,
    residuals: Residuals,
    features: KeyedJaggedArray,
    routes: Routes | None,
    options: Mapping[str, Any],
) -> Stashed:
    """Return what a lookup keeps for its update."""
    if stash == "host":
        return HostResiduals(jax.device_put(residuals, jax.memory.Space.Host))
    if stash == "recompute":
        # Weights may be computed in the loss; their gradient is that of the lookup itself.
        constants = jax.tree.map(jax.lax.stop_gradient, features)
        return LookupArguments(constants, routes, tuple(options.items()))
    return residuals


def restore_residuals(stashed: Stashed, store: TableStore) -> Residuals:
    """Return the residuals that `stash_residuals` kept."""
    return stashed if isinstance(stashed, Residuals) else stashed.restore(store)
