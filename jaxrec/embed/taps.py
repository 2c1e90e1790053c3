"""How the gradient of looked-up embeddings leaves a differentiated model.

A collection adds a *tap*, an array of zeros, to what it looks up. The gradient with respect to the
tap is the gradient with respect to the embeddings, and it exists without any table being
differentiated. Taps must have the embeddings' shapes, so the model is first traced abstractly, with
a `TapProbe` in each collection that notes them. Everything that leaves the differentiated function
leaves it as an `nnx.Variable`, so that Flax carries it out of `nnx.remat` and the like.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from jaxrec.embed.lookup import Activations, Residuals
from jaxrec.embed.update import RowGradients, update_rows


class Tap(nnx.Variable):
    """Zeros added to the activations of one call of a collection."""


class LookedUp(nnx.Variable):
    """The activations of one call of a collection, looked up a step ahead."""


class TapResiduals(nnx.Variable):
    """The residuals of one call of a collection; None until it is called."""


@dataclasses.dataclass(eq=False)
class TapProbe:
    """Notes the shapes of what a collection looks up, call by call."""

    activations: list[Any] = dataclasses.field(default_factory=list)

    def note(self, activations: Activations) -> None:
        """Notes those of the next call."""
        self.activations.append(jax.eval_shape(lambda: activations))


class TapRecorder(TapProbe):
    """Keeps what a collection looks up itself."""

    def note(self, activations: Activations) -> None:
        """Keeps those of the next call."""
        self.activations.append(activations)


class TappedModule(nnx.Module):
    """A module that looks embeddings up and lets their gradient out.

    Attributes:
        tables: A variable with the `TableStore` that it looks up in.
        taps: A `Tap` for each call, while the model is differentiated.
        residuals: A `TapResiduals` for each call, while the model is differentiated.
        looked_up: A `LookedUp` for each call, where they are used in place of lookups.
        probe: A `TapProbe`, while the shapes of the taps are found out.
    """

    tables: nnx.Variable

    def __init__(self) -> None:
        self.taps: nnx.List[Tap] = nnx.List([])
        self.residuals: nnx.List[TapResiduals] = nnx.List([])
        self.looked_up: nnx.List[LookedUp] = nnx.List([])
        self.probe: TapProbe | None = None

    def apply_gradients(
        self, gradients: Sequence[dict[str, RowGradients]], step: Int[Array, ""] | int
    ) -> None:
        """Updates the rows of any number of lookups, each once; `jaxrec.Optimizer` calls this.

        Args:
            gradients: For each lookup the gradients of each group's rows.
            step: Number of updates made before, 0 at the first.
        """
        self.tables.set_value(update_rows(self.tables.get_value(), gradients, step))

    def tap(self, activations: Activations, residuals: Residuals) -> Activations:
        """The activations of a call with the call's tap added, if there is one."""
        if self.probe is not None:
            self.probe.note(activations)
            return activations
        for call, (tap, slot) in enumerate(zip(self.taps, self.residuals, strict=True)):
            if slot.get_value() is None:
                slot.set_value(residuals)
                if len(self.looked_up):
                    activations = self.looked_up[call].get_value()
                return jax.tree.map(jnp.add, activations, tap.get_value())
        if len(self.taps):
            raise RuntimeError(
                f"a collection was called {len(self.taps) + 1} times in a loss function that "
                f"called it {len(self.taps)} times when it was first traced; whether it is called "
                "must not depend on anything but the function's arguments"
            )
        return activations


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


def look_up(evaluate: Callable[[nnx.Module], Any], model: nnx.Module) -> dict[str, list[Any]]:
    """What each collection looks up in one evaluation, call by call; the model stays as it is.

    Of what is computed besides, XLA keeps nothing.
    """
    copy = nnx.merge(*nnx.split(model))
    recorders = {path: TapRecorder() for path in tapped_modules(copy)}
    for path, module in tapped_modules(copy).items():
        module.probe = recorders[path]
    evaluate(copy)
    return {path: recorder.activations for path, recorder in recorders.items()}


@contextlib.contextmanager
def looked_up_ahead(model: nnx.Module, activations: Mapping[str, Sequence[Any]]) -> Iterator[None]:
    """While it lasts, calls of collections use what `look_up` found, in the same order."""
    for path, module in tapped_modules(model).items():
        module.looked_up = nnx.List([LookedUp(call) for call in activations[path]])
    try:
        yield
    finally:
        for module in tapped_modules(model).values():
            module.looked_up = nnx.List([])


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
