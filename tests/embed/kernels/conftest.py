"""The implementations that the shared suites of the primitives run by."""

from __future__ import annotations

from types import ModuleType

import jax
import pytest

from jaxrec.embed import kernels
from jaxrec.embed.kernels import cpu
from tests.embed.kernels.gpu_cases import BACKENDS, backend, gpu_kernels

# Each test has a case of the first one, however few cases run. That is Mosaic where JAX has it: the
# oldest JAX lacks it, so that only runs with a newer one test it.
_ORDER = ("mosaic", "reference", "triton", "cpu-avx512", "cpu-avx2", "cpu-portable")
_MISSING = {"mosaic", "triton"}.difference(BACKENDS)
IMPLEMENTATIONS = tuple(name for name in _ORDER if name not in _MISSING)


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    """Runs the test by one implementation; the native library by each of its instruction sets."""
    name, _, instructions = request.param.partition("-")
    if not instructions:
        with gpu_kernels(name) if name in BACKENDS else kernels.use_kernels(name):
            yield name
        return
    if jax.default_backend() != "cpu":
        pytest.skip("the native library runs on CPUs alone")
    if (best := cpu.instruction_set()) is None:
        pytest.skip("the native library was not built")
    if not cpu.select_instruction_set(instructions):
        pytest.skip(f"this machine does not have {instructions}")
    with kernels.use_kernels(name):
        yield name
    cpu.select_instruction_set(best)


@pytest.fixture(params=BACKENDS, scope="session")
def gpu(request) -> ModuleType:
    """The kernels for GPUs, by each of Pallas' backends."""
    return backend(request.param)
