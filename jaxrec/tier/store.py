"""A table store whose rows are given to ids by a `Tier` on the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, DTypeLike

from jaxrec.embed.config import TableConfig
from jaxrec.embed.row_access import TableRows, group_slots
from jaxrec.embed.row_gradients import Activations, Residuals, Routes, RowGradients
from jaxrec.embed.store import TableStore
from jaxrec.embed.wrapping_store import WrappingStore
from jaxrec.optim.hyperparameter import Step
from jaxrec.ragged import KeyedJaggedArray


def with_zeros(store: TableStore, tables: Sequence[str]) -> TableStore:
    """Return a store with the first row of some tables set to zero, its state to the first; traced.

    Args:
        store: The store that has the arrays.
        tables: Names of the tables.
    """
    first = [TableRows(name, np.zeros(1, np.int64)) for name in tables]
    for name, slots in group_slots(store, first).items():
        group = store.groups[name]
        state = {
            key: jnp.broadcast_to(array[0], (*slots.slots.shape, *array.shape[1:]))
            for key, array in group.optimizer.init(1, group.dim).items()
        }
        rows = jnp.zeros((*slots.slots.shape, group.dim), group.dtype)
        store = store.write_rows(name, *store.spread_rows((slots.slots, rows, state)))
    return store


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TierStore(WrappingStore):
    """Tables of which some have an open vocabulary; the arrays are another store's.

    It looks up only batches in which a tier has replaced ids by rows.

    Attributes:
        tier: The `jaxrec.tier.tier.Tier` of the model, its vocabularies on the host.
        features: Features whose ids the tier replaces.
        zero_tables: Tables whose first row stays zero, for ids without a row of their own.
        whole: Configurations of the tables as the user gave them; ``inner`` has fewer rows of
            those with `jaxrec.tier.Cached`.
    """

    tier: Hashable = dataclasses.field(metadata={"static": True})
    features: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    zero_tables: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})
    whole: tuple[TableConfig, ...] = dataclasses.field(default=(), metadata={"static": True})

    @property
    def configs(self) -> tuple[TableConfig, ...]:
        return self.whole

    @property
    def bounds(self) -> dict[str, int]:
        bounds = self.inner.bounds
        return {key: bound for key, bound in bounds.items() if key not in self.features}

    def route(self, features: KeyedJaggedArray) -> Routes:
        self._check(features)
        return self.inner.route(features)

    def lookup(
        self,
        features: KeyedJaggedArray,
        *,
        is_weighted: bool = False,
        dtype: DTypeLike = "float32",
        routes: Routes | None = None,
    ) -> tuple[Activations, Residuals]:
        self._check(features)
        return self.inner.lookup(features, is_weighted=is_weighted, dtype=dtype, routes=routes)

    def update(
        self,
        calls: Sequence[dict[str, RowGradients]],
        step: Step | int,
        is_applied: Bool[Array, ""] | None = None,
    ) -> TierStore:
        updated = self.inner.update(calls, step, is_applied)
        return self.with_inner(with_zeros(updated, self.zero_tables))

    def _check(self, features: KeyedJaggedArray) -> None:
        """Raise a TypeError where ids would be taken for rows."""
        raw = [key for key in self.features if key in features.keys]
        raw = [key for key in raw if key not in features.slot_keys]
        if raw:
            raise TypeError(
                f"the tables of feature {raw[0]!r} have an open vocabulary, and the batch has its "
                "ids, not its rows; iterate over jaxrec.tier.ahead(model, batches) and call the "
                "model with what it yields"
            )
