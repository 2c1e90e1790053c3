"""Implementations and a clock that tests of `jaxrec tune` foretell."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable

from jaxrec.embed.kernels import reference, registry

PRIMITIVES = ("pooled_lookup", "row_lookup", "fused_update", "sum_rows")


class FakeImplementation(registry.Implementation):
    """The reference under another name, with options that change nothing."""

    @property
    def module(self) -> types.ModuleType:
        return _module()


@functools.cache
def _module() -> types.ModuleType:
    module = types.ModuleType("fake")
    module.refuse = lambda primitive, arguments: None
    module.OPTIONS = {"row_lookup": {"width": (1, 2, 4), "depth": (1, 2)}}

    def row_lookup(table, rows, *, width: int = 1, depth: int | None = None):
        return reference.row_lookup(table, rows)

    def fused_update(*arguments, **keywords):
        rows, state = reference.fused_update(*arguments, **keywords)
        return rows + 1, state

    def pooled_lookup(*arguments, **keywords):
        raise NotImplementedError("no rule for\n  this operation")

    module.row_lookup, module.fused_update = row_lookup, fused_update
    module.pooled_lookup = pooled_lookup
    return module


FAKE = FakeImplementation("fake", ("cpu",))
REFERENCE = registry.IMPLEMENTATIONS[-1]


class FakeClock:
    """A clock that a function of the time moves on, each time that it is read."""

    def __init__(self, tick: Callable[[int], float]):
        self.now, self.reads, self.tick = 0.0, 0, tick

    def __call__(self) -> float:
        self.now += self.tick(self.reads)
        self.reads += 1
        return self.now
