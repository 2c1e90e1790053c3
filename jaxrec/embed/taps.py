"""How the gradient of looked-up embeddings leaves a differentiated model.

A collection adds a *tap*, an array of zeros, to what it looks up. The gradient with respect to the
tap is the gradient with respect to the embeddings, and it exists without any table being
differentiated. Taps must have the embeddings' shapes, so the model is first traced abstractly, with
a `TapProbe` in each collection that notes them. Everything that leaves the differentiated function
leaves it as an `nnx.Variable`, so that Flax carries it out of `nnx.remat` and the like.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from jaxrec.embed.lookup import Activations, Routes, lookup, route
from jaxrec.embed.tables import TableStore
from jaxrec.embed.update import RowGradients, update_rows
from jaxrec.ragged import KeyedJaggedArray


class Tap(nnx.Variable):
    """Zeros added to the activations of one call of a collection."""


class FoundAhead(nnx.Variable):
    """What was found ahead for one call of a collection, an `Ahead`; None once it is used."""


class TapResiduals(nnx.Variable):
    """The residuals of one call of a collection; None until it is called."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ahead:
    """What can be found of a call of a collection before the step that it is part of.

    Attributes:
        routes: What `route` finds; None: that is left to the step, too.
        activations: What was looked up; None: that is left to the step.
    """

    routes: Routes | None
    activations: Activations | None = None


class Probe(abc.ABC):
    """Takes the place of a collection's lookups while a model is evaluated for its calls."""

    @abc.abstractmethod
    def look_up(
        self, tables: TableStore, features: KeyedJaggedArray, **options: Any
    ) -> Activations:
        """What the next call gives, in place of `jaxrec.embed.lookup`."""


@dataclasses.dataclass(eq=False)
class TapProbe(Probe):
    """Notes the shapes of what is looked up, call by call."""

    activations: list[Any] = dataclasses.field(default_factory=list)

    def look_up(self, tables, features, **options):
        activations, _ = lookup(tables, features, **options)
        self.activations.append(jax.eval_shape(lambda: activations))
        return activations


@dataclasses.dataclass(eq=False)
class LookupProbe(Probe):
    """Keeps what is looked up."""

    found: list[Ahead] = dataclasses.field(default_factory=list)

    def look_up(self, tables, features, **options):
        activations, residuals = lookup(tables, features, **options)
        self.found.append(Ahead(residuals.routes, activations))
        return activations


@dataclasses.dataclass(eq=False)
class RouteProbe(Probe):
    """Keeps the routes; nothing is looked up, and calls give zeros."""

    found: list[Ahead] = dataclasses.field(default_factory=list)

    def look_up(self, tables, features, **options):
        self.found.append(Ahead(route(tables, features)))
        like = jax.eval_shape(lambda: lookup(tables, features, **options)[0])
        return jax.tree.map(_zeros, like)


class TappedModule(nnx.Module):
    """A module that looks embeddings up and lets their gradient out.

    Attributes:
        tables: A variable with the `TableStore` that it looks up in.
        taps: A `Tap` for each call, while the model is differentiated.
        residuals: A `TapResiduals` for each call, while the model is differentiated.
        ahead: A `FoundAhead` for each call, where it is to be used by the calls that are
            differentiated.
        probe: A `Probe`, while the model is evaluated for its calls.
    """

    tables: nnx.Variable

    def __init__(self) -> None:
        self.taps: nnx.List[Tap] = nnx.List([])
        self.residuals: nnx.List[TapResiduals] = nnx.List([])
        self.ahead: nnx.List[FoundAhead] = nnx.List([])
        self.probe: Probe | None = None

    def apply_gradients(
        self, gradients: Sequence[dict[str, RowGradients]], step: Int[Array, ""] | int
    ) -> None:
        """Updates the rows of any number of lookups, each once; `jaxrec.Optimizer` calls this.

        Args:
            gradients: For each lookup the gradients of each group's rows.
            step: Number of updates made before, 0 at the first.
        """
        self.tables.set_value(update_rows(self.tables.get_value(), gradients, step))

    def look_up(self, features: KeyedJaggedArray, **options: Any) -> Activations:
        """`jaxrec.embed.lookup`, with the call's tap added if there is one."""
        tables = self.tables.get_value()
        if self.probe is not None:
            return self.probe.look_up(tables, features, **options)
        for tap, slot in zip(self.taps, self.residuals, strict=True):
            if slot.get_value() is not None:
                continue
            ahead = self._take_ahead()
            activations, residuals = lookup(tables, features, routes=ahead.routes, **options)
            slot.set_value(residuals)
            if ahead.activations is not None:
                activations = ahead.activations
            return jax.tree.map(jnp.add, activations, tap.get_value())
        if len(self.taps):
            raise RuntimeError(
                f"a collection was called {len(self.taps) + 1} times in a loss function that "
                f"called it {len(self.taps)} times when it was first traced; whether it is called "
                "must not depend on anything but the function's arguments"
            )
        return lookup(tables, features, **options)[0]

    def _take_ahead(self) -> Ahead:
        """What was found ahead for the next call, which no other call gets."""
        for variable in self.ahead:
            found: Ahead | None = variable.get_value()
            if found is not None:
                variable.set_value(None)
                return found
        return Ahead(None)


def tapped_modules(model: nnx.Module) -> dict[str, TappedModule]:
    """The tapped modules of a model by path, such as ``"ranker/embeddings"``; shared ones once."""
    return {
        "/".join(map(str, path)): module
        for path, module in nnx.iter_modules(model)
        if isinstance(module, TappedModule)
    }


def probe_activations(
    loss: Callable[..., Any], model: nnx.Module, args: tuple
) -> dict[str, list[Any]]:
    """The shapes that each collection looks up in one evaluation of ``loss``, call by call."""
    probes = {path: TapProbe() for path in tapped_modules(model)}

    def evaluate(model: nnx.Module, args: tuple) -> None:
        for path, module in tapped_modules(model).items():
            module.probe = probes[path]
        loss(model, *args)

    nnx.eval_shape(evaluate, model, args)
    return {path: probe.activations for path, probe in probes.items()}


def look_up_ahead(
    evaluate: Callable[[nnx.Module], Any], model: nnx.Module
) -> dict[str, list[Ahead]]:
    """What each collection looks up in one evaluation, call by call; the model stays as it is.

    Of what is computed besides, XLA keeps nothing.
    """
    return _find_ahead(evaluate, model, LookupProbe)


def route_ahead(evaluate: Callable[[nnx.Module], Any], model: nnx.Module) -> dict[str, list[Ahead]]:
    """The routes of each collection's calls in one evaluation; the model stays as it is.

    They follow from the batch alone: what looked-up embeddings are made into is not computed.
    """
    return _find_ahead(evaluate, model, RouteProbe)


def _find_ahead(
    evaluate: Callable[[nnx.Module], Any],
    model: nnx.Module,
    probe: type[LookupProbe] | type[RouteProbe],
) -> dict[str, list[Ahead]]:
    copy = nnx.merge(*nnx.split(model))
    probes = {path: probe() for path in tapped_modules(copy)}
    for path, module in tapped_modules(copy).items():
        module.probe = probes[path]
    evaluate(copy)
    return {path: each.found for path, each in probes.items()}


@contextlib.contextmanager
def use_ahead(model: nnx.Module, found: Mapping[str, Sequence[Ahead]]) -> Iterator[None]:
    """While it lasts, differentiated calls use what was found ahead, in the same order."""
    for path, module in tapped_modules(model).items():
        module.ahead = nnx.List([FoundAhead(call) for call in found[path]])
    try:
        yield
    finally:
        for module in tapped_modules(model).values():
            module.ahead = nnx.List([])


def attach(model: nnx.Module, shapes: dict[str, list[Any]]) -> None:
    """Gives every collection a tap for each of its calls."""
    for path, module in tapped_modules(model).items():
        module.taps = nnx.List([Tap(jax.tree.map(_zeros, shape)) for shape in shapes[path]])
        module.residuals = nnx.List([TapResiduals(None) for _ in shapes[path]])


def detach(model: nnx.Module) -> None:
    """Removes taps and residuals."""
    for module in tapped_modules(model).values():
        module.taps = nnx.List([])
        module.residuals = nnx.List([])


def _zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    zeros = jnp.zeros(like.shape, like.dtype)
    if like.sharding is None or all(axis is None for axis in like.sharding.spec):
        return zeros
    # Over an explicit mesh a tap must lie as the embeddings do, or its gradient is gathered.
    return jax.sharding.reshard(zeros, like.sharding)
