"""The small named shapes of the benchmarks as arguments of the primitives."""

from __future__ import annotations

import functools
import importlib.util
import pathlib
import sys

import jax.numpy as jnp
import numpy as np

from jaxrec.embed.kernels import BagLayout


def _load_shapes():
    # The benchmarks are no installed package, and the checkout is not on the path.
    path = pathlib.Path(__file__).parents[3] / "benchmarks" / "shapes.py"
    spec = importlib.util.spec_from_file_location("_benchmark_shapes", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


shapes = _load_shapes()
SMALL = {shape.name: shape for shape in shapes.read_shapes(group="small")}


class Case:
    """A batch of a named shape, with a table, a gradient and what the primitives must make of it.

    Attributes:
        table: ``[num_rows, dim]`` of the shape's type.
        ids, lengths, weights, layout: The batch; weights at padding are NaN, ids there arbitrary.
        gradient: ``[num_bags, dim]`` float32.
    """

    def __init__(self, name: str):
        batch = SMALL[name].draw()
        rng = np.random.default_rng(1)
        self.batch = batch
        self.layout = BagLayout(**batch.layout_fields())
        self.num_rows = batch.num_rows
        table = rng.standard_normal((batch.num_rows, batch.shape.D))
        self.table = jnp.asarray(table, batch.shape.dtype)
        self.gradient = jnp.asarray(rng.standard_normal((batch.num_bags, batch.shape.D)), "float32")
        self.ids, self.lengths, self.weights = batch.ids.copy(), batch.lengths, batch.weights
        for start, capacity in zip(self.layout.id_starts, self.layout.capacities, strict=True):
            padding = slice(start + capacity - batch.shape.padding, start + capacity)
            self.ids[padding] = np.resize([-1, 2**31 - 1, -(2**31), 0], batch.shape.padding)
            if self.weights is not None:
                self.weights[padding] = np.nan

    @property
    def arrays(self):
        """What `flatten_bags` takes before the layout."""
        weights = None if self.weights is None else jnp.asarray(self.weights)
        return jnp.asarray(self.ids), jnp.asarray(self.lengths), weights


@functools.cache
def case(name: str) -> Case:
    return Case(name)
