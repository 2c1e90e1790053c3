"""Combinations of capacities that a collection was traced with."""

from __future__ import annotations

import warnings

import jax

from jaxrec.ragged import KeyedJaggedArray

# Number of combinations at which a loop is told. A `jaxrec.Packer` makes two or three.
_MANY = 5


class TracedCapacities:
    """The combinations of capacities that a collection was traced with; warns once of many.

    It belongs to a collection, and to the copies of it that Flax makes in each trace. All are
    equal, so that models with equal collections share compiled programs.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[object, ...], set[tuple[int, ...]]] = {}
        self._has_warned = False

    def add(self, name: str, features: KeyedJaggedArray) -> None:
        """Record the capacities of a traced batch for the collection called ``name``."""
        if self._has_warned or not isinstance(features.lengths, jax.core.Tracer):
            return
        kind = (features.keys, features.strides, features.lengths.shape)
        seen = self._seen.setdefault(kind, set())
        seen.add(features.capacities)
        if len(seen) < _MANY:
            return
        self._has_warned = True
        changed = [
            key
            for key, capacities in zip(features.keys, zip(*seen, strict=True), strict=True)
            if len(set(capacities)) > 1
        ]
        names = ", ".join(map(repr, changed[:3])) + (", ..." if len(changed) > 3 else "")
        warnings.warn(
            f"{name} was compiled for {_MANY} combinations of capacities of the same features "
            f"({len(changed)} of {len(features.keys)} differ: {names}), and each new one compiles "
            "the step anew. Pack all batches with one packer = jaxrec.Packer(), which remembers "
            "capacities: packer.from_lists(...) in place of KeyedJaggedArray.from_lists(...), and "
            "packer.fit(batch) for batches that were packed elsewhere",
            stacklevel=4,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TracedCapacities)

    def __hash__(self) -> int:
        return hash(TracedCapacities)
