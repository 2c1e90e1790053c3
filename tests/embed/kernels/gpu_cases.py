"""Batches over which the kernels for GPUs are held to the reference: small, to be interpreted."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from jaxrec.embed.kernels import BagLayout, registry, use_kernels


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"jaxrec.embed.kernels.{name}")


def _runs_here(name: str) -> bool:
    try:
        return _module(name).refuse("row_lookup", {}) is None
    except ImportError:  # JAX has deprecated Triton's backend.
        return False


# Pallas' backends that this version of JAX has, the newest first.
BACKENDS = tuple(filter(_runs_here, ("mosaic", "triton")))


@dataclasses.dataclass(frozen=True)
class Batch:
    """A group of tables and a batch of bags.

    Attributes:
        dim: Width of a row.
        lengths: Lengths of the bags of each feature.
        slack: Padding after each feature's ids.
        weighted: Whether ids have weights.
        dtype: Type of the table.
        hot: Share of the ids that are the first row's.
        outside: Whether some ids are outside their table.
        interleave: Whether the bags of the features alternate.
    """

    dim: int
    lengths: tuple[tuple[int, ...], ...]
    slack: int = 3
    weighted: bool = False
    dtype: str = "float32"
    hot: float = 0.0
    outside: bool = False
    interleave: bool = True

    @property
    def layout(self) -> BagLayout:
        strides = tuple(map(len, self.lengths))
        capacities = tuple(sum(lengths) + self.slack for lengths in self.lengths)
        rows = tuple(7 + 3 * i for i in range(len(self.lengths)))
        return BagLayout(
            id_starts=_starts(capacities),
            capacities=capacities,
            length_starts=_starts(strides),
            strides=strides,
            row_offsets=_starts(rows),
            row_counts=rows,
            means=tuple(i % 2 == 1 for i in range(len(self.lengths))),
            interleave=self.interleave,
        )

    def arrays(self) -> tuple[Array, Array, Array, Array | None]:
        """Table, ids, lengths and weights; what lies at padding must not matter."""
        rng = np.random.default_rng(0)
        layout = self.layout
        ids = [
            np.where(rng.random(capacity) < self.hot, 0, rng.integers(0, rows, capacity))
            for capacity, rows in zip(layout.capacities, layout.row_counts, strict=True)
        ]
        for feature, capacity in zip(ids, layout.capacities, strict=True):
            feature[capacity - self.slack :] = [-1, 2**31 - 1, 0][: self.slack]
            if self.outside:
                feature[0], feature[-self.slack - 1] = -(2**31), len(feature) + 100
        table = rng.standard_normal((sum(layout.row_counts), self.dim))
        weights = rng.standard_normal(layout.num_positions).astype(np.float32)
        for start, capacity in zip(layout.id_starts, layout.capacities, strict=True):
            weights[start + capacity - self.slack : start + capacity] = np.nan
        return (
            jnp.asarray(table, self.dtype),
            jnp.asarray(np.concatenate(ids), jnp.int32),
            jnp.asarray(np.concatenate(self.lengths), jnp.int32),
            jnp.asarray(weights) if self.weighted else None,
        )


def _starts(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(np.cumsum((0, *sizes[:-1])).tolist())


def backend(name: str) -> ModuleType:
    """The kernels for GPUs by one of Pallas' backends; skips the test if JAX does not have it."""
    if name not in BACKENDS:
        pytest.skip(f"JAX {jax.__version__} does not have what the {name} kernels need")
    return _module(name)


def name_of(gpu: ModuleType) -> str:
    """The name of the backend with these kernels, as `use_kernels` takes it."""
    return gpu.__name__.rpartition(".")[2]


@contextlib.contextmanager
def gpu_kernels(name: str) -> Iterator[None]:
    """Runs the primitives by a backend's kernels: on a GPU if tests run there, else interpreted."""
    module = backend(name)
    if jax.default_backend() == "gpu":
        with use_kernels(name, "reference"):
            yield
        return
    tile = importlib.import_module(f"{module.__name__}.tile").Tile
    launch = tile.launch
    on_cpus = tuple(
        dataclasses.replace(each, platforms=(*each.platforms, "cpu")) if each.name == name else each
        for each in registry.IMPLEMENTATIONS
    )

    def interpreted(*arguments: Any, interpret: bool, **options: Any) -> Any:
        return launch(*arguments, interpret=True, **options)

    with pytest.MonkeyPatch.context() as patch, use_kernels(name, "reference"):
        patch.setattr(registry, "IMPLEMENTATIONS", on_cpus)
        patch.setattr(tile, "launch", interpreted)
        yield


def compiled_fast(function: Callable, **options: Any) -> Callable:
    """``jax.jit`` without LLVM's optimizations: nobody runs kernels that are interpreted."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0}, **options)


def lowered_for_cuda(function: Callable, *arguments: Any) -> str:
    """The program of a function for an NVIDIA GPU, which need not be there."""
    with _cuda_device():
        traced = jax.jit(function).trace(*arguments)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def kernels_in(program: str, *names: str) -> list[str]:
    """Those of the kernels that a lowered program has."""
    return [name for name in names if f'"{name}"' in program or f"{name}_mosaic_gpu" in program]


def _cuda_device() -> contextlib.AbstractContextManager:
    """Since JAX 0.11 a Triton kernel is lowered for a certain device, which need not exist."""
    if jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("device",), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)
