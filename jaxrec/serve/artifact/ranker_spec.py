"""The programs of an exported ranker, and the caches of histories that they make and read.

A program computes for one row, the history or the candidates of one user: caches of users then
need not be copied into a batch. Programs for several sizes of histories spare short histories the
memory and the time of the longest.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import msgspec

from jaxrec.serve.artifact.batch_spec import ArrayOutput, BatchSpec, RaggedInput

Step: TypeAlias = Literal["encode", "append", "score"]

# Lengths, newest and request, the last arrays of a cache: one number each.
NUM_SCALARS = 3

# Largest number of values of a feature in one call.
_MOST = 2**31 - 1


class CacheSize(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number of events that histories are encoded for.

    Attributes:
        events: Largest number of events of a history.
        arrays: Arrays of its cache, each with one more axis of 1 in front: keys of each layer and
            values of each layer ``[tokens, heads, columns]``, then lengths, newest and request.
    """

    events: int
    arrays: tuple[ArrayOutput, ...]

    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes of the cache's arrays, with the axis of 1."""
        return [jax.ShapeDtypeStruct((1, *x.shape), jnp.dtype(x.dtype)) for x in self.arrays]


class RankerProgram(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A step for one platform and size, as `jax.export` writes it.

    Attributes:
        platform: "cpu" or "cuda".
        step: "encode" a history to a cache, "append" new events to a cache, or "score" candidates.
        events: History size of the cache.
        count: Number of candidates, or of new events; 0 for "encode".
        file: File of the program.
        targets: Functions of jaxrec's native library that the program calls.
        stablehlo: File with the program alone, a portable StableHLO artifact.
    """

    platform: str
    step: Step
    events: int
    count: int
    file: str
    targets: tuple[str, ...]
    stablehlo: str


class RankerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes and programs of an exported ranker.

    Attributes:
        context: Features of context, the first ones of the batch's history.
        request_time: Feature of the candidates whose last value a history is encoded for; None:
            histories are encoded without it.
        caches: History sizes, ascending.
        candidate_sizes: Numbers of candidates that programs score, ascending.
        append_sizes: Numbers of new events that programs append, ascending; empty: caches do not
            grow.
        programs: One for each platform, step and size.
    """

    context: tuple[str, ...]
    request_time: str | None
    caches: tuple[CacheSize, ...]
    candidate_sizes: tuple[int, ...]
    append_sizes: tuple[int, ...]
    programs: tuple[RankerProgram, ...] = ()

    @property
    def cache_arrays(self) -> list[ArrayOutput]:
        """Arrays of all caches."""
        return [array for size in self.caches for array in size.arrays]

    def steps(self) -> list[tuple[Step, int, int]]:
        """Return the step, the history size and the count of each program of a platform."""
        steps: list[tuple[Step, int, int]] = []
        for size in self.caches:
            steps.append(("encode", size.events, 0))
            steps += [("append", size.events, count) for count in self.append_sizes]
            steps += [("score", size.events, count) for count in self.candidate_sizes]
        return steps

    def cache_for(self, events: int) -> CacheSize:
        """Return the smallest history size that holds some events; the largest must."""
        return next(size for size in self.caches if events <= size.events)

    def features(self, batch: BatchSpec, step: Step) -> tuple[str, ...]:
        """Return the features that a step reads."""
        history, candidates = batch.ragged
        if step == "score":
            return candidates.keys
        return history.keys if step == "encode" else history.keys[len(self.context) :]

    def capacities(self, batch: BatchSpec, step: Step, events: int, count: int) -> tuple[int, ...]:
        """Return the capacity of each feature that a program reads."""
        num_features = len(self.features(batch, step))
        if step != "encode":
            return (count,) * num_features
        slots = batch.sizes[0].capacities[0][: len(self.context)]
        return (*slots, *[events] * (num_features - len(slots)))

    def arguments(
        self, batch: BatchSpec, step: Step, events: int, count: int
    ) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes of a program's arguments behind the arrays of the manifest."""
        capacities = self.capacities(batch, step, events, count)
        shapes = [] if step == "encode" else self.cache_for(events).shapes()
        shapes.append(jax.ShapeDtypeStruct((sum(capacities),), jnp.int32))
        shapes.append(jax.ShapeDtypeStruct((len(capacities),), jnp.int32))
        if step == "encode" and self.request_time is not None:
            shapes.append(jax.ShapeDtypeStruct((1,), jnp.int32))
        return shapes

    def results(
        self, outputs: Sequence[ArrayOutput], step: Step, events: int, count: int
    ) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes of a program's results."""
        if step != "score":
            return self.cache_for(events).shapes()
        return [jax.ShapeDtypeStruct((count, *x.shape), jnp.dtype(x.dtype)) for x in outputs]

    def check(self, batch: BatchSpec) -> None:
        """Raise a ValueError where entries contradict each other or the batch."""
        self._check_batch(batch)
        sizes = {
            "history sizes": tuple(size.events for size in self.caches),
            "candidate sizes": self.candidate_sizes,
            "append sizes": self.append_sizes,
        }
        for what, given in sizes.items():
            is_good = list(given) == sorted(set(given)) and all(1 <= x <= _MOST for x in given)
            if not is_good or not (given or what == "append sizes"):
                raise ValueError(f"its {what} are {list(given)}; they must ascend from 1 or more")
        capacities = batch.sizes[0].capacities
        of_events = capacities[0][len(self.context) :]
        if set(of_events) != {self.caches[-1].events} or len(set(capacities[1])) != 1:
            raise ValueError(
                f"its batch has the capacities {list(capacities)}, and its largest history size is "
                f"{self.caches[-1].events}"
            )
        self._check_caches()
        steps = set(self.steps())
        for platform in {each.platform for each in self.programs}:
            found = [(p.step, p.events, p.count) for p in self.programs if p.platform == platform]
            if len(found) != len(steps) or set(found) != steps:
                raise ValueError(f"its programs for {platform} are not one for each step and size")

    def _check_batch(self, batch: BatchSpec) -> None:
        """Require a history and candidates, each a ragged input, of one row."""
        inputs = [each for each in batch.inputs if isinstance(each, RaggedInput)]
        if (
            len(inputs) != len(batch.inputs)
            or len(inputs) != 2
            or any(each.is_weighted for each in inputs)
            or [size.samples for size in batch.sizes] != [1]
            or [len(x) for x in batch.sizes[0].capacities] != [len(x.keys) for x in inputs]
        ):
            raise ValueError("its batch is not a history and candidates of one row")
        history, candidates = inputs
        size = len(self.context)
        if history.keys[:size] != self.context or len(history.keys) == size or not candidates.keys:
            raise ValueError(
                f"its history has the features {list(history.keys)}, of which the context "
                f"{list(self.context)} must be the first"
            )
        if self.request_time is not None and self.request_time not in candidates.keys:
            raise ValueError(f"it has no feature {self.request_time!r} of candidates")

    def _check_caches(self) -> None:
        """Require that the caches' arrays differ between sizes in their number of tokens alone."""
        for smaller, larger in itertools.pairwise((self.caches[0], *self.caches)):
            pairs = list(zip(smaller.arrays, larger.arrays, strict=False))
            if len(smaller.arrays) != len(larger.arrays) or any(
                (one.name, one.dtype, one.shape[1:]) != (two.name, two.dtype, two.shape[1:])
                or one.shape[:1] > two.shape[:1]
                for one, two in pairs
            ):
                raise ValueError(
                    f"its caches of {smaller.events} and {larger.events} events have other arrays"
                )
            kinds = [(each.dtype, each.shape) for each in larger.arrays[-NUM_SCALARS:]]
            if kinds != [("int32", ())] * NUM_SCALARS:
                raise ValueError(f"its caches of {larger.events} events end in {kinds}")
