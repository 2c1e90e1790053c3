"""Detection of lookups whose gradient would be lost."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx
from jax._src import core as jax_core
from jax.extend.core import get_opaque_trace_state

from jaxrec.ragged import KeyedJaggedArray

_LOST = (
    "a loss looks embeddings up inside jax.lax.scan, jax.lax.cond, jax.vmap, jax.checkpoint, "
    "jax.jit or nnx.scan, or on a copy of its model, and the gradient of that lookup cannot leave "
    "it. Look the ids up outside and pass the embeddings in; use nnx.remat and nnx.jit in place of "
    "jax.checkpoint and jax.jit. For micro-batches, scan over jaxrec.value_and_grad itself and "
    "give the stacked gradients to jaxrec.mean_gradients"
)


@dataclasses.dataclass(eq=False)
class Differentiation:
    """One evaluation by `jaxrec.value_and_grad`.

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
        """Record a lookup; raise where its gradient cannot leave the trace.

        Args:
            variable: A variable of the module that looks up.
        """
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
    """Raise where something else than `jaxrec.value_and_grad` differentiates a lookup.

    Args:
        features: The batch; the gradient of its weights alone is allowed. None: the rows are read
            without a batch.

    Raises:
        TypeError: `nnx.grad`, `jax.grad` or the like is at work.
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
