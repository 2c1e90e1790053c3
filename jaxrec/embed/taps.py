"""Taps: how the gradient of looked-up embeddings leaves a differentiated model.

A collection adds a *tap*, an array of zeros, to the embeddings that it looks up. The gradient with
respect to the tap is the gradient with respect to the embeddings, and it exists without any table
being differentiated. Taps must have the embeddings' shapes, so the model is first traced
abstractly, with a `TapProbe` in each collection that records them. Everything that leaves the
differentiated function leaves it as an `nnx.Variable`, so that Flax carries it out of `nnx.remat`
and the like. A whole table that the loss reads gets a tap of the table's shape.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from jaxrec.embed.differentiation import current_differentiation, require_jaxrec_gradient
from jaxrec.embed.row_gradients import Activations, Routes, RowGradients
from jaxrec.embed.sealed import Sealed
from jaxrec.embed.store import TableStore
from jaxrec.ragged import KeyedJaggedArray


class Tap(nnx.Variable):
    """Zeros added to the activations of one call of a collection, or to a table that is read."""


class TapResiduals(nnx.Variable):
    """The residuals of one call of a collection; None until it is called."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ahead:
    """Results of a call of a collection that were computed before the step it is part of.

    Attributes:
        routes: Result of `TableStore.route`; None: the step computes it.
        activations: The embeddings; None: the step looks them up.
    """

    routes: Routes | None
    activations: Activations | None = None


class AheadVariable(nnx.Variable):
    """The `Ahead` of one call of a collection; None once it is used."""


class Probe(abc.ABC):
    """Takes the place of a collection's lookups while a model is evaluated for its calls."""

    @abc.abstractmethod
    def lookup(self, tables: TableStore, features: KeyedJaggedArray, **options: Any) -> Activations:
        """Return the embeddings of the next call, in place of `TableStore.lookup`."""

    def read(self, name: str, rows: Float[Array, "rows dim"]) -> Float[Array, "rows dim"]:
        """Return a table that is read whole, given its rows."""
        return rows


class TappedModule(nnx.Module):
    """A module that looks embeddings up and lets their gradient out.

    Attributes:
        tables: A variable with the `TableStore` that it looks up in.
        taps: A `Tap` for each call, while the model is differentiated.
        residuals: A `TapResiduals` for each call, while the model is differentiated.
        table_taps: A `Tap` for each table that the loss reads whole, by name.
        ahead: An `AheadVariable` for each differentiated call whose results exist already.
        probe: A `Probe`, while the model is evaluated for its calls.
        deterministic: Whether the module is in evaluation mode: `nnx.Module.eval` and ``train``
            set it. A module in training mode refuses to be differentiated by anything but
            `jaxrec.value_and_grad`, since its tables would not be trained.
        is_trainable: Whether any of its tables is trained.
        debug: Whether compiled lookups check the ids of each batch on the host.
    """

    tables: nnx.Variable

    def __init__(self) -> None:
        self.taps: nnx.List[Tap] = nnx.List([])
        self.residuals: nnx.List[TapResiduals] = nnx.List([])
        self.table_taps: nnx.Dict[Tap] = nnx.Dict({})
        self.ahead: nnx.List[AheadVariable] = nnx.List([])
        self.probe: Probe | None = None
        self.deterministic = False
        self.is_trainable = True
        self.debug = False

    def apply_gradients(
        self,
        gradients: Sequence[Mapping[str, Sealed[RowGradients] | Any]],
        step: Any,
        is_applied: Bool[Array, ""] | None = None,
    ) -> None:
        """Update the rows of any number of lookups, each once; `jaxrec.Optimizer` calls this.

        Args:
            gradients: For each lookup the gradients of each group's rows, as in
                ``Gradients.tables[path]``.
            step: Number of updates made before, 0 at the first.
            is_applied: False leaves every row and its state as it is; None: True.
        """
        opened = [{name: each.open() for name, each in call.items()} for call in gradients]
        tables = self.tables.get_value()
        self.tables.set_value(tables.update(opened, step, is_applied))

    def lookup(self, features: KeyedJaggedArray, **options: Any) -> Activations:
        """`TableStore.lookup`, with the call's tap added if there is one."""
        tables: TableStore = self.tables.get_value()
        self._require_gradient()
        if current_differentiation() is None and not self.deterministic and self.is_trainable:
            require_jaxrec_gradient(features)
        if self.probe is not None:
            return self.probe.lookup(tables, features, **options)
        for tap, slot in zip(self.taps, self.residuals, strict=True):
            if slot.get_value() is not None:
                continue
            ahead = self._take_ahead()
            activations, residuals = tables.lookup(features, routes=ahead.routes, **options)
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
        return tables.lookup(features, **options)[0]

    def read_table(self, name: str) -> Float[Array, "rows dim"]:
        """Return a copy of a table, with its tap added if there is one.

        Raises:
            KeyError: There is no table of that name.
            TypeError: A loss reads it, and it is too large or lies over a mesh.
        """
        tables: TableStore = self.tables.get_value()
        if current_differentiation() is None:
            return tables.read(name)
        self._require_gradient()
        tables.check_dense_gradient(name)
        rows = tables.read(name)
        if self.probe is not None:
            return self.probe.read(name, rows)
        return rows + self.table_taps[name].get_value() if name in self.table_taps else rows

    def _require_gradient(self) -> None:
        """Raise where this module is differentiated and a lookup's gradient cannot leave it."""
        differentiation = current_differentiation()
        is_tapped = self.probe is not None or len(self.taps) or len(self.table_taps)
        if differentiation is not None and is_tapped:
            differentiation.require_gradient(self.tables)

    def _take_ahead(self) -> Ahead:
        """Return what was computed ahead for the next call, and give it to no other call."""
        for variable in self.ahead:
            ahead: Ahead | None = variable.get_value()
            if ahead is not None:
                variable.set_value(None)
                return ahead
        return Ahead(None)


def tapped_modules(model: nnx.Module) -> dict[str, TappedModule]:
    """Return the tapped modules of a model by path, such as ``"ranker/embeddings"``.

    Modules that are shared occur once.
    """
    return {
        "/".join(map(str, path)): module
        for path, module in nnx.iter_modules(model)
        if isinstance(module, TappedModule)
    }


@dataclasses.dataclass(eq=False)
class TapProbe(Probe):
    """Records the shapes of the embeddings call by call, and the tables that are read whole."""

    activations: list[Any] = dataclasses.field(default_factory=list)
    tables: dict[str, Any] = dataclasses.field(default_factory=dict)

    def lookup(self, tables, features, **options):
        activations, _ = tables.lookup(features, **options)
        self.activations.append(jax.eval_shape(lambda: activations))
        return activations

    def read(self, name, rows):
        self.tables[name] = jax.ShapeDtypeStruct(rows.shape, rows.dtype)
        return rows


def probe_calls(loss: Callable[..., Any], model: nnx.Module, args: tuple) -> dict[str, TapProbe]:
    """Return for each collection the shapes that one evaluation of ``loss`` looks up and reads."""
    probes = {path: TapProbe() for path in tapped_modules(model)}

    def evaluate(model: nnx.Module, args: tuple) -> None:
        for path, module in tapped_modules(model).items():
            module.probe = probes[path]
        loss(model, *args)

    nnx.eval_shape(evaluate, model, args)
    return probes


def attach(model: nnx.Module, probes: Mapping[str, TapProbe]) -> None:
    """Give every collection a tap for each of its calls and for each table that is read."""
    for path, module in tapped_modules(model).items():
        probe = probes[path]
        module.taps = nnx.List(
            [Tap(jax.tree.map(zeros_like, shape)) for shape in probe.activations]
        )
        module.residuals = nnx.List([TapResiduals(None) for _ in probe.activations])
        taps = {name: Tap(zeros_like(shape)) for name, shape in probe.tables.items()}
        module.table_taps = nnx.Dict(taps)


def detach(model: nnx.Module) -> None:
    """Remove taps and residuals."""
    for module in tapped_modules(model).values():
        module.taps = nnx.List([])
        module.residuals = nnx.List([])
        module.table_taps = nnx.Dict({})


def zeros_like(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Return zeros of a shape, type and sharding."""
    zeros = jnp.zeros(shape.shape, shape.dtype)
    if shape.sharding is None or all(axis is None for axis in shape.sharding.spec):
        return zeros
    # Over an explicit mesh a tap must lie as the embeddings do, or its gradient is gathered.
    return jax.sharding.reshard(zeros, shape.sharding)
