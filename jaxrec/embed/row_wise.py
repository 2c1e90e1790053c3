"""Whether an initializer draws each row by itself."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxrec.embed.row_keys import draw_with


@functools.lru_cache(maxsize=256)
def check_row_wise(initializer: Callable, dim: int) -> None:
    """Compare rows that an initializer draws together with rows that it draws alone.

    Raises:
        ValueError: Rows drawn alone have another shape or size or differ less, as those of
            initializers by fan-in and of functions that ignore the key do; or rows drawn together
            depend on their place.
    """
    few = max(64, 512 // dim)
    many = 32 * few

    def draw(words: jax.Array, rows: int) -> jax.Array:
        return draw_with(initializer, words, (rows, dim))

    with jax.ensure_compile_time_eval():
        keys = jnp.asarray(np.arange(2 * few, dtype=np.uint32).reshape(few, 2))
        alone = jax.vmap(functools.partial(draw, rows=1))(keys)
        draws = [draw(keys[0], many), draw(keys[1], many), alone]
        if any(isinstance(values, jax.core.Tracer) for values in draws):
            return  # it draws on something that is being traced
        for values, shape in zip(draws, [(many, dim), (many, dim), (few, 1, dim)], strict=True):
            if np.shape(values) != shape:
                raise ValueError(
                    f"initializer {initializer} was called with shape {shape[-2:]} and returned "
                    f"values of shape {np.shape(values)[-2:]}; it must return the shape that it is "
                    "given, since rows are drawn one by one. Set given values by load_table"
                )
        parts = [np.asarray(x[: 4 * few], np.float64).reshape(-1, dim) for x in draws]
    what = _difference(*parts)
    if what:
        raise ValueError(
            f"initializer {initializer} draws values that depend on the number of rows or on other "
            f"rows ({what}), as initializers by fan-in do, but tables are drawn row by row. Give "
            "the scale yourself, as in jax.nn.initializers.normal(stddev=rows ** -0.5), or a name "
            "such as 'xavier_normal'; set given values by load_table"
        )


def _difference(first: np.ndarray, second: np.ndarray, alone: np.ndarray) -> str:
    """Return how rows drawn alone differ from two tables drawn together, or how these are alike."""
    without_columns = [x - np.median(x, axis=0) for x in (first, second, alone)]
    for what, together, by_itself in (
        ("typical value", first, alone),
        ("typical difference of rows", without_columns[0], without_columns[2]),
    ):
        typical = [_typical(together), _typical(by_itself)]
        if not np.max(typical) <= 1.5 * np.min(typical):  # or NaN
            return (
                f"{what} {typical[0]:.2g} of rows drawn together, {typical[1]:.2g} of rows drawn "
                "alone"
            )
    a, b = without_columns[:2]
    norms = np.linalg.norm(a) * np.linalg.norm(b)
    if norms > 0 and (a * b).sum() > 0.5 * norms:
        return "rows of the same number are alike with any key"
    return ""


def _typical(values: np.ndarray) -> float:
    """Return a size of values that is finite for Cauchy's distribution, too."""
    return float(np.sqrt(np.abs(values)).mean() ** 2)
