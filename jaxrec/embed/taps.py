"""How the gradient of looked-up embeddings leaves a differentiated model.

A collection adds a *tap*, an array of zeros, to the embeddings that it looks up. The gradient with
respect to the tap is the gradient with respect to the embeddings, and it exists without any table
being differentiated. Taps must have the embeddings' shapes, so the model is first traced
abstractly, with a `TapProbe` in each collection that records them. Everything that leaves the
differentiated function leaves it as an `nnx.Variable`, so that Flax carries it out of `nnx.remat`
and the like. A whole table that the loss reads gets a tap of the table's shape.
"""

from __future__ import annotations

import abc
import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax._src import core as jax_core
from jax.extend.core import get_opaque_trace_state
from jaxtyping import Array, Bool, Float

from jaxrec.embed.lookup import Activations, Routes, lookup, route
from jaxrec.embed.sealed import Sealed
from jaxrec.embed.tables import Tables, TableStore, read_table
from jaxrec.embed.update import RowGradients, update_rows
from jaxrec.ragged import KeyedJaggedArray

# Bytes of the largest dense gradient of a table that a loss reads whole.
MAX_DENSE_GRADIENT_BYTES = 1 << 30

_LOST = (
    "a loss looks embeddings up inside jax.lax.scan, jax.lax.cond, jax.vmap, jax.checkpoint, "
    "jax.jit or nnx.scan, or on a copy of its model, and the gradient of that lookup cannot leave "
    "it. Look the ids up outside and pass the embeddings in; use nnx.remat and nnx.jit in place of "
    "jax.checkpoint and jax.jit. For micro-batches, scan over jaxrec.value_and_grad itself and "
    "give the stacked gradients to jaxrec.mean_gradients"
)


class Tap(nnx.Variable):
    """Zeros added to the activations of one call of a collection, or to a table that is read."""


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
        """Return the embeddings of the next call, in place of `jaxrec.embed.lookup`."""

    def read(self, name: str, rows: Float[Array, "rows dim"]) -> Float[Array, "rows dim"]:
        """Return a table that is read whole, given its rows."""
        return rows


@dataclasses.dataclass(eq=False)
class TapProbe(Probe):
    """Records the shapes of the embeddings call by call, and the tables that are read whole."""

    activations: list[Any] = dataclasses.field(default_factory=list)
    tables: dict[str, Any] = dataclasses.field(default_factory=dict)

    def look_up(self, tables, features, **options):
        activations, _ = lookup(tables, features, **options)
        self.activations.append(jax.eval_shape(lambda: activations))
        return activations

    def read(self, name, rows):
        self.tables[name] = jax.ShapeDtypeStruct(rows.shape, rows.dtype)
        return rows


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
        table_taps: A `Tap` for each table that the loss reads whole, by name.
        ahead: A `FoundAhead` for each call, where it is to be used by the calls that are
            differentiated.
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
        self.ahead: nnx.List[FoundAhead] = nnx.List([])
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
        self.tables.set_value(update_rows(tables, opened, step, is_applied))

    def look_up(self, features: KeyedJaggedArray, **options: Any) -> Activations:
        """`jaxrec.embed.lookup`, with the call's tap added if there is one."""
        tables = self.tables.get_value()
        self._check_trace(features)
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

    def read_table(self, name: str) -> Float[Array, "rows dim"]:
        """Return a copy of a table, with its tap added if there is one.

        Raises:
            KeyError: There is no table of that name.
            TypeError: A loss reads it, and it is too large or lies over a mesh.
        """
        tables = self.tables.get_value()
        if _differentiation.get() is None:
            return read_table(tables, name)
        self._check_trace(None)
        _check_dense_gradient(tables, name)
        rows = read_table(tables, name)
        if self.probe is not None:
            return self.probe.read(name, rows)
        return rows + self.table_taps[name].get_value() if name in self.table_taps else rows

    def _take_ahead(self) -> Ahead:
        """Return what was found ahead for the next call, which no other call gets."""
        for variable in self.ahead:
            found: Ahead | None = variable.get_value()
            if found is not None:
                variable.set_value(None)
                return found
        return Ahead(None)

    def _check_trace(self, features: KeyedJaggedArray | None) -> None:
        """Raise where the gradient of a lookup would be lost."""
        differentiation = _differentiation.get()
        if differentiation is not None:
            is_tapped = self.probe is not None or len(self.taps) or len(self.table_taps)
            if is_tapped and not differentiation.enter(self.tables):
                raise lost_gradient()
        elif not self.deterministic and self.is_trainable and _is_differentiated(features):
            raise TypeError(
                "a model with embedding tables is differentiated by nnx.value_and_grad, nnx.grad "
                "or jax.grad, which leave its tables untrained; use jaxrec.value_and_grad and "
                "jaxrec.Optimizer. Where the tables are to stay as they are, call model.eval() "
                "first or give them trainable=False"
            )


@dataclasses.dataclass(eq=False)
class Differentiation:
    """One evaluation by `jaxrec.value_and_grad`.

    Attributes:
        trace: The state of JAX's tracing where the loss begins.
        is_nested: Whether a lookup took place inside another transformation.
    """

    trace: Any = None
    is_nested: bool = False

    def begin(self) -> None:
        """Record that the loss begins here."""
        self.trace = _trace_state()

    def enter(self, variable: nnx.Variable) -> bool:
        """Record a lookup; return whether its module can be changed here."""
        self.is_nested |= self.trace != _trace_state()
        return can_change(variable)

    @contextlib.contextmanager
    def explain(self) -> Iterator[None]:
        """Raise errors of a loss with lookups in other transformations with the remedy."""
        try:
            yield
        except Exception as error:
            if self.is_nested and _LOST not in str(error):
                raise lost_gradient() from error
            raise


def lost_gradient() -> RuntimeError:
    """Return the error of a loss with a lookup whose gradient cannot leave it."""
    return RuntimeError(_LOST)


_differentiation: contextvars.ContextVar[Differentiation | None] = contextvars.ContextVar(
    "jaxrec_differentiation", default=None
)


@contextlib.contextmanager
def differentiating() -> Iterator[Differentiation]:
    """While this lasts, lookups are differentiated by `jaxrec.value_and_grad`."""
    differentiation = Differentiation()
    token = _differentiation.set(differentiation)
    try:
        with differentiation.explain():
            yield differentiation
    finally:
        _differentiation.reset(token)


def _trace_state() -> Any:
    return get_opaque_trace_state(convention="nnx")


def can_change(variable: nnx.Variable) -> bool:
    """Whether JAX's present trace is that of a variable."""
    return variable._can_update


def _is_differentiated(features: KeyedJaggedArray | None) -> bool:
    """Whether JAX is differentiating the code that runs now, and not the batch's weights alone."""
    # JAX does not export its current trace. Without it this check finds nothing.
    trace = getattr(getattr(jax_core, "trace_ctx", None), "trace", None)
    if type(trace).__name__ not in ("JVPTrace", "LinearizeTrace"):
        return False
    return all(getattr(leaf, "_trace", None) is not trace for leaf in jax.tree.leaves(features))


def _check_dense_gradient(tables: TableStore, name: str) -> None:
    if not isinstance(tables, Tables):
        raise TypeError(
            f"a loss reads the whole table {name!r}, which lies over a mesh: its gradient would be "
            "as large as the table on every device. Look its rows up through a feature, or read it "
            "outside of the loss if it is not to be trained by this term"
        )
    group, index = tables.layout.find(name)
    size = math.prod((group.tables[index].num_embeddings, group.dim)) * 4
    if size > MAX_DENSE_GRADIENT_BYTES:
        raise TypeError(
            f"a loss reads the whole table {name!r}, whose gradient takes {size:,} bytes, more "
            f"than {MAX_DENSE_GRADIENT_BYTES:,}. Look up the rows that the loss needs through a "
            "feature (sampled negatives, the rows of the batch), or read the table outside of the "
            "loss if it is not to be trained by this term"
        )


def tapped_modules(model: nnx.Module) -> dict[str, TappedModule]:
    """The tapped modules of a model by path, such as ``"ranker/embeddings"``; shared ones once."""
    return {
        "/".join(map(str, path)): module
        for path, module in nnx.iter_modules(model)
        if isinstance(module, TappedModule)
    }


def probe_calls(loss: Callable[..., Any], model: nnx.Module, args: tuple) -> dict[str, TapProbe]:
    """Return for each collection the shapes that one evaluation of ``loss`` looks up and reads."""
    probes = {path: TapProbe() for path in tapped_modules(model)}

    def evaluate(model: nnx.Module, args: tuple) -> None:
        for path, module in tapped_modules(model).items():
            module.probe = probes[path]
        loss(model, *args)

    nnx.eval_shape(evaluate, model, args)
    return probes


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


def attach(model: nnx.Module, probes: Mapping[str, TapProbe]) -> None:
    """Give every collection a tap for each of its calls and for each table that is read."""
    for path, module in tapped_modules(model).items():
        probe = probes[path]
        module.taps = nnx.List([Tap(jax.tree.map(_zeros, shape)) for shape in probe.activations])
        module.residuals = nnx.List([TapResiduals(None) for _ in probe.activations])
        taps = {name: Tap(_zeros(shape)) for name, shape in probe.tables.items()}
        module.table_taps = nnx.Dict(taps)


def detach(model: nnx.Module) -> None:
    """Remove taps and residuals."""
    for module in tapped_modules(model).values():
        module.taps = nnx.List([])
        module.residuals = nnx.List([])
        module.table_taps = nnx.Dict({})


def _zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    zeros = jnp.zeros(like.shape, like.dtype)
    if like.sharding is None or all(axis is None for axis in like.sharding.spec):
        return zeros
    # Over an explicit mesh a tap must lie as the embeddings do, or its gradient is gathered.
    return jax.sharding.reshard(zeros, like.sharding)
