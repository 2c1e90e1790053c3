"""Arrays among the modules of a compiled step."""

from __future__ import annotations

from typing import Any

from flax import nnx


class Held(nnx.Module):
    """A pytree of arrays that a step changes, such as the state of metrics.

    Example:
        >>> import jax.numpy as jnp
        >>> held = Held({"count": jnp.zeros(())})
        >>> held.set({"count": jnp.ones(())})
        >>> held.get()["count"].item()
        1.0
    """

    def __init__(self, value: Any):
        self.value = nnx.Variable(value)

    def get(self) -> Any:
        """The pytree."""
        return self.value.get_value()

    def set(self, value: Any) -> None:
        """Puts another of the same form in its place."""
        self.value.set_value(value)
