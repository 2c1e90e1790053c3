"""How the gradient of looked-up embeddings leaves a differentiated model.

A collection adds a *tap*, an array of zeros, to what it looks up. The gradient with respect to the
tap is the gradient with respect to the embeddings, and it exists without any table being
differentiated. Taps must have the embeddings' shapes, so the model is first traced abstractly, with
a `TapProbe` in each collection that notes them. Everything that leaves the differentiated function
leaves it as an `nnx.Variable`, so that Flax carries it out of `nnx.remat` and the like.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from jaxrec.embed.lookup import Activations, Residuals
from jaxrec.embed.update import RowGradients, update_rows


class Tap(nnx.Variable):
    """Zeros added to the activations of one call of a collection."""


class TapResiduals(nnx.Variable):
    """The residuals of one call of a collection; None until it is called."""


@dataclasses.dataclass(eq=False)
class TapProbe:
    """Notes the shapes of what a collection looks up, call by call."""

    activations: list[Any] = dataclasses.field(default_factory=list)


class TappedModule(nnx.Module):
    """A module that looks embeddings up and lets their gradient out.

    Attributes:
        tables: A variable with the `TableStore` that it looks up in.
        taps: A `Tap` for each call, while the model is differentiated.
        residuals: A `TapResiduals` for each call, while the model is differentiated.
        probe: A `TapProbe`, while the shapes of the taps are found out.
    """

    tables: nnx.Variable

    def __init__(self) -> None:
        self.taps: nnx.List[Tap] = nnx.List([])
        self.residuals: nnx.List[TapResiduals] = nnx.List([])
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
            self.probe.activations.append(jax.eval_shape(lambda: activations))
            return activations
        for tap, slot in zip(self.taps, self.residuals, strict=True):
            if slot.get_value() is None:
                slot.set_value(residuals)
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
    return jnp.zeros(like.shape, like.dtype, out_sharding=like.sharding)
