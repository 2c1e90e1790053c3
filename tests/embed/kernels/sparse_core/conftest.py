"""Chips for which the kernels are traced; they need not exist."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import jax
import pytest

V6E, V5E = "TPU v6 lite", "TPU v5 lite"


@pytest.fixture
def on_chip() -> Callable[[str], contextlib.AbstractContextManager]:
    """Traces programs for a kind of chip."""
    if jax.__version_info__ < (0, 12, 0):
        pytest.skip(f"JAX {jax.__version__} does not have what the kernels for SparseCores need")

    def on(kind: str) -> contextlib.AbstractContextManager:
        device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=1, platform="tpu")
        mesh = jax.sharding.AbstractMesh((1,), ("device",), abstract_device=device)
        return jax.sharding.use_abstract_mesh(mesh)

    return on
