"""Taps: zeros added to looked-up embeddings, whose gradient is the gradient of the embeddings.

`jaxrec.embed.training_step` tells the whole story; this file has steps 1 and 2 of it. A lookup
whose gradient would be lost is an error: `Differentiation` finds lookups in transformations that
carry no variables out, `require_jaxrec_gradient` finds lookups that `jax.grad` differentiates.
"""

# Variables of a tapped module
#
# A lookup inside a differentiated function has to hand its residuals to code outside of it. A
# Python attribute would keep a tracer that is dead outside. An `nnx.Variable` works: Flax carries
# the values of variables out of `nnx.value_and_grad`, `nnx.remat` and `nnx.jit`. So taps,
# residuals, and results that were computed ahead are variables of the module, and are there only
# while it is differentiated.
#
#     taps       zeros, added to the output of a call    in: its gradient is asked for
#     residuals  None, then what the update needs        out
#     ahead      routes or embeddings computed before    in: taken by the first call that comes
#     is_read    True, once the next step's rows came      in: no derivative or update comes before

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
from jaxrec.embed.stash import Stash, stash_residuals
from jaxrec.embed.store import TableStore
from jaxrec.ragged import KeyedJaggedArray


class Tap(nnx.Variable):
    """Zeros added to the activations of one call of a collection, or to a table read whole."""


class TapResiduals(nnx.Variable):
    """The residuals of one call of a collection; None until it is called."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ahead:
    """Results of a collection's call that were computed before its training step; None: missing."""

    routes: Routes | None
    activations: Activations | None = None


class AheadVariable(nnx.Variable):
    """The `Ahead` of one call of a collection; None once a call has taken it."""


class Probe(abc.ABC):
    """Object that answers a collection's lookups in place of its store, and records them."""

    @abc.abstractmethod
    def lookup(self, tables: TableStore, features: KeyedJaggedArray, **options: Any) -> Activations:
        """Return the embeddings of the next call, in place of `TableStore.lookup`."""

    def read(self, name: str, rows: Float[Array, "rows dim"]) -> Float[Array, "rows dim"]:
        """Return the rows of a table that the loss reads whole."""
        return rows


class TappedModule(nnx.Module):
    """Base of modules that look embeddings up and pass their gradients to `jaxrec.Optimizer`."""

    tables: nnx.Variable

    def __init__(self) -> None:
        # The six below are empty except while a training step works on the model: a tap and its
        # residuals for each call, and a tap for each table that the loss reads whole.
        self.taps: nnx.List[Tap] = nnx.List([])
        self.residuals: nnx.List[TapResiduals] = nnx.List([])
        self.table_taps: nnx.Dict[Tap] = nnx.Dict({})
        self.ahead: nnx.List[AheadVariable] = nnx.List([])
        self.is_read: nnx.List[AheadVariable] = nnx.List([])
        self.probe: Probe | None = None
        # `nnx.Module.eval` and `train` set attributes of this name. In training mode, `jax.grad` of
        # a lookup is an error, since the tables would not be trained.
        self.deterministic = False
        self.is_trainable = True
        # True: compiled lookups call back to the host, which checks each id.
        self.debug = False
        self.stash: Stash | None = None

    @property
    def reads(self) -> list[Bool[Array, ""]]:
        """Booleans, True once the next step's rows are fetched; empty if none are fetched ahead."""
        return [variable.get_value() for variable in self.is_read]

    def apply_gradients(
        self,
        gradients: SealedCalls,
        step: Any,
        is_applied: Bool[Array, ""] | None = None,
    ) -> None:
        """Update each row once by the gradients of all calls, ``Gradients.tables[path]``."""
        opened = [{name: each.open() for name, each in call.items()} for call in gradients]
        for is_read in self.reads:
            is_applied = is_read if is_applied is None else is_applied & is_read
        tables = self.tables.get_value()
        self.tables.set_value(tables.update(opened, step, is_applied))
        if len(self.is_read):
            # Rows that came ahead of this update are stale now. A later call of the step, if there
            # is one, starts anew.
            for variable in self.ahead:
                variable.set_value(None)

    def lookup(self, features: KeyedJaggedArray, **options: Any) -> Activations:
        """Look up a batch, and add the call's tap if the model is differentiated."""
        tables: TableStore = self.tables.get_value()
        self._require_gradient()
        if current_differentiation() is None and not self.deterministic and self.is_trainable:
            require_jaxrec_gradient(features)
        if self.probe is not None:
            return self.probe.lookup(tables, features, **options)
        # The probe saw the calls in the same order, so this call's tap is the first one whose
        # residuals are still missing.
        for tap, slot in zip(self.taps, self.residuals, strict=True):
            if slot.get_value() is not None:
                continue
            ahead = self._take_ahead()
            activations, residuals = tables.lookup(features, routes=ahead.routes, **options)
            kept = stash_residuals(self.stash, residuals, features, ahead.routes, options)
            slot.set_value(kept)
            # With activations given, the lookup above is for its residuals alone: XLA removes the
            # reading of rows as dead code.
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
        """Return a copy of a table, ``[num_embeddings, dim]``, with its tap if there is one."""
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
        """Raise if the gradient of a lookup could not leave the function that is differentiated."""
        differentiation = current_differentiation()
        # A loss may read a frozen teacher from outside of its model. That module has no taps, and
        # its lookups need no gradient.
        is_tapped = self.probe is not None or len(self.taps) or len(self.table_taps)
        if differentiation is not None and is_tapped:
            differentiation.require_gradient(self.tables)

    def _take_ahead(self) -> Ahead:
        """Return the next call's `Ahead`, and empty its variable for the calls that follow."""
        for variable in self.ahead:
            ahead: Ahead | None = variable.get_value()
            if ahead is not None:
                variable.set_value(None)
                return ahead
        return Ahead(None)


def tapped_modules(model: nnx.Module) -> dict[str, TappedModule]:
    """Return a model's tapped modules by path, such as "ranker/embeddings"; shared ones once."""
    return {
        "/".join(map(str, path)): module
        for path, module in nnx.iter_modules(model)
        if isinstance(module, TappedModule)
    }


@dataclasses.dataclass(eq=False)
class TapProbe(Probe):
    """Probe that notes the shapes of each call's embeddings, and of tables read whole.

    Attributes:
        activations: Shapes of the embeddings, call by call.
        tables: Shape of each table that the loss reads whole, by name.
    """

    activations: list[Any] = dataclasses.field(default_factory=list)
    tables: dict[str, Any] = dataclasses.field(default_factory=dict)

    def lookup(self, tables, features, **options):
        activations, _ = tables.lookup(features, **options)
        # Shapes with shardings: over an explicit mesh the tap must be sharded alike.
        self.activations.append(jax.eval_shape(lambda: activations))
        return activations

    def read(self, name, rows):
        self.tables[name] = jax.ShapeDtypeStruct(rows.shape, rows.dtype)
        return rows


def ahead_reads(model: nnx.Module) -> list[Bool[Array, ""]]:
    """Return the `TappedModule.reads` of a model's collections."""
    return [is_read for module in tapped_modules(model).values() for is_read in module.reads]


def probe_calls(loss: Callable[..., Any], model: nnx.Module, args: tuple) -> dict[str, TapProbe]:
    """Trace the loss for shapes alone; return each collection's calls and whole tables, by path."""
    probes = {path: TapProbe() for path in tapped_modules(model)}

    def evaluate(model: nnx.Module, args: tuple) -> None:
        for path, module in tapped_modules(model).items():
            module.probe = probes[path]
        loss(model, *args)

    # `nnx.eval_shape` works on a copy of the model, so the probes need not be taken away again.
    nnx.eval_shape(evaluate, model, args)
    return probes


@contextlib.contextmanager
def tapped(model: nnx.Module, probes: Mapping[str, TapProbe]) -> Iterator[None]:
    """Within this context, give each call and each table that is read whole a tap of zeros."""
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
    """Return zeros of the given shape, type and sharding."""
    zeros = jnp.zeros(shape.shape, shape.dtype)
    if shape.sharding is None or all(axis is None for axis in shape.sharding.spec):
        return zeros
    # Over an explicit mesh a tap must be sharded as the embeddings are. JAX gives a gradient the
    # sharding of its input, and would gather the embeddings' gradient on every device.
    return jax.sharding.reshard(zeros, shape.sharding)


# Lookups whose gradient would be lost
#
# A lookup in `jax.lax.scan` would find its rows, the dense parameters would make the loss fall, and
# the tables would never learn, without an error. But a module's variables can be written only in
# the trace that they belong to. So we ask, before each lookup, whether the module's variable can be
# written here, and if not, raise an error that says what to do instead. Some transformations fail
# on their own before that, with an error of JAX or Flax about leaked tracers. `is_nested` remembers
# that there was a lookup inside another trace, and then our error replaces theirs.

_LOST = (
    "a loss looks embeddings up inside jax.lax.scan, jax.lax.cond, jax.vmap, jax.checkpoint, "
    "jax.jit or nnx.scan, or on a copy of its model, and the gradient of that lookup cannot leave "
    "it. Look the ids up outside and pass the embeddings in; use nnx.remat and nnx.jit in place of "
    "jax.checkpoint and jax.jit. For micro-batches, scan over jaxrec.value_and_grad itself and "
    "give the stacked gradients to jaxrec.mean_gradients"
)


@dataclasses.dataclass(eq=False)
class Differentiation:
    """One evaluation of a loss by `jaxrec.value_and_grad`, to which its lookups report."""

    trace: Any = None
    is_nested: bool = False

    def begin(self) -> None:
        """Record the state of JAX's tracing where the loss begins."""
        self.trace = _trace_state()

    def require_gradient(self, variable: nnx.Variable) -> None:
        """Record a lookup; raise if the module's variables cannot be written here."""
        self.is_nested |= self.trace != _trace_state()
        if not can_change(variable):
            raise lost_gradient()


# A context variable, since a loss may also read collections that are not part of its model.
_current: contextvars.ContextVar[Differentiation | None] = contextvars.ContextVar(
    "jaxrec_differentiation", default=None
)


def current_differentiation() -> Differentiation | None:
    """Return the running evaluation by `jaxrec.value_and_grad`; None: there is none."""
    return _current.get()


@contextlib.contextmanager
def differentiating() -> Iterator[Differentiation]:
    """Within this context, lookups are differentiated by `jaxrec.value_and_grad`."""
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
    """Return the error of a lookup whose gradient would be lost."""
    return RuntimeError(_LOST)


def can_change(variable: nnx.Variable) -> bool:
    """Return whether a variable belongs to JAX's current trace, so that it can be written."""
    return variable._can_update


def require_jaxrec_gradient(features: KeyedJaggedArray | None) -> None:
    """Raise a TypeError if `jax.grad` or the like differentiates this lookup."""
    # JAX does not export its current trace. A JAX without this name skips the check.
    trace = getattr(getattr(jax_core, "trace_ctx", None), "trace", None)
    if type(trace).__name__ not in ("JVPTrace", "LinearizeTrace"):
        return
    # A batch whose own leaves are differentiated is a gradient of the batch's weights, which
    # `jax.grad` computes correctly: it is allowed.
    if all(getattr(leaf, "_trace", None) is not trace for leaf in jax.tree.leaves(features)):
        raise TypeError(
            "a model with embedding tables is differentiated by nnx.value_and_grad, nnx.grad or "
            "jax.grad, which leave its tables untrained; use jaxrec.value_and_grad and "
            "jaxrec.Optimizer. Where the tables are to stay as they are, call model.eval() first "
            "or give them trainable=False"
        )


def _trace_state() -> Any:
    return get_opaque_trace_state(convention="nnx")
