"""The bound on the length of a row, common to all row optimizers."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float


def limit_norm(rows: Float[Array, "rows dim"], max_norm: float | None) -> Float[Array, "rows dim"]:
    """Scales rows whose Euclidean norm exceeds ``max_norm`` down to it; None: no bound."""
    if max_norm is None:
        return rows
    norms = row_norms(rows)
    # The quotient of a short row is never used, so that a row of zeros does not divide by zero.
    return jnp.where(norms > max_norm, rows * (max_norm / jnp.maximum(norms, max_norm)), rows)


def row_norms(rows: Float[Array, "rows dim"]) -> Float[Array, "rows 1"]:
    """The Euclidean norm of each row, as a column."""
    return jnp.sqrt(jnp.sum(rows * rows, axis=1, keepdims=True))


def trust_ratio(
    numerator: Float[Array, "rows 1"], denominator: Float[Array, "rows 1"]
) -> Float[Array, "rows 1"]:
    """The quotient of two norms, and 1 where either is zero."""
    defined = (numerator > 0) & (denominator > 0)
    return jnp.where(defined, numerator / jnp.where(defined, denominator, 1), 1)
