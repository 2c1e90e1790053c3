"""Taps: how the gradient of looked-up embeddings leaves a differentiated model.

`jaxrec.embed.training_step` tells what they are for. Everything that leaves the differentiated
function leaves it as an `nnx.Variable`, so that Flax carries it out of `nnx.remat` and the like.
Lookups whose gradient cannot leave are errors: `Differentiation` finds those in transformations
that carry nothing out, `require_jaxrec_gradient` those that something else differentiates.
"""

from __future__ import annotations

import abc
import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax._src import core as jax_core
from jax.extend.core import get_opaque_trace_state
from jaxtyping import Array, Bool, Float

from jaxrec.embed.gradients import SealedCalls
from jaxrec.embed.row_gradients import Activations, Routes
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
        gradients: SealedCalls,
        step: Any,
        is_applied: Bool[Array, ""] | None = None,
    ) -> None:
        """Update the rows of any number of lookups, each once; `jaxrec.Optimizer` calls this.

        Args:
            gradients: Those of each lookup, as in ``Gradients.tables[path]``.
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
        # The first tap whose residuals are missing is that of this call: calls come in the order in
        # which they were probed.
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
        """Return a copy of a table, with its tap added if there is one."""
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


@contextlib.contextmanager
def tapped(model: nnx.Module, probes: Mapping[str, TapProbe]) -> Iterator[None]:
    """Give collections a tap for each of their calls and tables that are read, while this lasts."""
    for path, module in tapped_modules(model).items():
        probe = probes[path]
        module.taps = nnx.List([Tap(jax.tree.map(zeros_like, each)) for each in probe.activations])
        module.residuals = nnx.List([TapResiduals(None) for _ in probe.activations])
        module.table_taps = nnx.Dict({k: Tap(zeros_like(v)) for k, v in probe.tables.items()})
    try:
        yield
    finally:
        for module in tapped_modules(model).values():
            module.taps, module.residuals = nnx.List([]), nnx.List([])
            module.table_taps = nnx.Dict({})


def zeros_like(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Return zeros of a shape, type and sharding."""
    zeros = jnp.zeros(shape.shape, shape.dtype)
    if shape.sharding is None or all(axis is None for axis in shape.sharding.spec):
        return zeros
    # Over an explicit mesh a tap must lie as the embeddings do, or its gradient is gathered.
    return jax.sharding.reshard(zeros, shape.sharding)


# Lookups whose gradient would be lost
#
# Nothing would fail: a lookup in `jax.lax.scan` finds rows, the loss falls by the dense parameters,
# and the tables never learn. A module's variables can be written only in the trace that they belong
# to, so that a lookup that cannot leave its residuals there is an error with the remedy. Some
# transformations fail on their own before it comes to that, with errors of JAX or Flax about leaked
# tracers. `is_nested` remembers that a lookup took place inside, and the remedy replaces them.

_LOST = (
    "a loss looks embeddings up inside jax.lax.scan, jax.lax.cond, jax.vmap, jax.checkpoint, "
    "jax.jit or nnx.scan, or on a copy of its model, and the gradient of that lookup cannot leave "
    "it. Look the ids up outside and pass the embeddings in; use nnx.remat and nnx.jit in place of "
    "jax.checkpoint and jax.jit. For micro-batches, scan over jaxrec.value_and_grad itself and "
    "give the stacked gradients to jaxrec.mean_gradients"
)


@dataclasses.dataclass(eq=False)
class Differentiation:
    """One evaluation by `jaxrec.value_and_grad`, which knows whether lookups can report to it.

    Attributes:
        trace: State of JAX's tracing where the loss begins.
        is_nested: Whether a lookup took place inside another transformation.
    """

    trace: Any = None
    is_nested: bool = False

    def begin(self) -> None:
        """Record that the loss begins here."""
        self.trace = _trace_state()

    def require_gradient(self, variable: nnx.Variable) -> None:
        """Record a lookup; raise where its gradient cannot leave the module's variables."""
        self.is_nested |= self.trace != _trace_state()
        if not can_change(variable):
            raise lost_gradient()


# A context variable, since a loss may also read collections that are not part of its model.
_current: contextvars.ContextVar[Differentiation | None] = contextvars.ContextVar(
    "jaxrec_differentiation", default=None
)


def current_differentiation() -> Differentiation | None:
    """Return the evaluation by `jaxrec.value_and_grad` that is under way, if one is."""
    return _current.get()


@contextlib.contextmanager
def differentiating() -> Iterator[Differentiation]:
    """Let `jaxrec.value_and_grad` differentiate lookups, while this lasts.

    Errors of a loss with lookups in other transformations are raised with the remedy.
    """
    differentiation = Differentiation()
    token = _current.set(differentiation)
    try:
        yield differentiation
    except Exception as error:
        if differentiation.is_nested and _LOST not in str(error):
            raise lost_gradient() from error
        raise
    finally:
        _current.reset(token)


def lost_gradient() -> RuntimeError:
    """Return the error of a loss with a lookup whose gradient cannot leave it."""
    return RuntimeError(_LOST)


def can_change(variable: nnx.Variable) -> bool:
    """Return whether JAX's current trace is that of a variable."""
    return variable._can_update


def require_jaxrec_gradient(features: KeyedJaggedArray | None) -> None:
    """Raise a TypeError where something else than `jaxrec.value_and_grad` differentiates a lookup.

    The gradient of the batch's weights alone is allowed.
    """
    # JAX does not export its current trace. Without it this check is skipped.
    trace = getattr(getattr(jax_core, "trace_ctx", None), "trace", None)
    if type(trace).__name__ not in ("JVPTrace", "LinearizeTrace"):
        return
    if all(getattr(leaf, "_trace", None) is not trace for leaf in jax.tree.leaves(features)):
        raise TypeError(
            "a model with embedding tables is differentiated by nnx.value_and_grad, nnx.grad or "
            "jax.grad, which leave its tables untrained; use jaxrec.value_and_grad and "
            "jaxrec.Optimizer. Where the tables are to stay as they are, call model.eval() first "
            "or give them trainable=False"
        )


def _trace_state() -> Any:
    return get_opaque_trace_state(convention="nnx")
