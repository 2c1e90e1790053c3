"""The choice of implementations, and the warning where the native library is missing."""

from __future__ import annotations

import inspect
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import pytest

from jaxrec import optim
from jaxrec.embed import kernels
from jaxrec.embed.kernels import cpu, mosaic, reference, registry, sparse_core, triton
from tests.embed.kernels.gpu_cases import backend

ROWS = jnp.array([3, 1, 3], jnp.int32)


@pytest.fixture
def no_library(monkeypatch):
    """A checkout in which nothing was built."""
    monkeypatch.setattr(cpu, "_load", lambda: "the native library was not built")
    monkeypatch.delenv("JAXREC_KERNELS", raising=False)
    registry._warn_if_missing.cache_clear()
    yield
    registry._warn_if_missing.cache_clear()


@pytest.mark.usefixtures("no_library")
def test_it_is_said_once():
    with pytest.warns(RuntimeWarning, match="twenty times slower: the native library was not"):
        assert kernels.build_runs(ROWS, num_rows=4).unique.tolist() == [1, 3, 4]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernels.build_runs(ROWS, num_rows=4)


@pytest.mark.usefixtures("no_library")
@pytest.mark.parametrize("how", ["variable", "context"])
def test_who_asks_for_the_reference_gets_it_without_a_word(monkeypatch, how):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if how == "variable":
            monkeypatch.setenv("JAXREC_KERNELS", "reference")
            kernels.build_runs(ROWS, num_rows=4)
        else:
            with kernels.use_kernels("reference"):
                kernels.build_runs(ROWS, num_rows=4)


LAYOUT = kernels.BagLayout((0,), (4,), (0,), (2,), (0,), (3,), (False,))
BATCH = (
    jax.ShapeDtypeStruct((3, 64), jnp.float32),
    jax.ShapeDtypeStruct((4,), jnp.int32),
    jax.ShapeDtypeStruct((2,), jnp.int32),
    None,
    LAYOUT,
    "float32",
)


class Own(optim.sgd):
    is_elementwise = False


def test_a_description_says_who_runs_a_call_and_why():
    lookups = kernels.Lookups(BATCH[1], BATCH[1], None)
    gradients, step = jax.ShapeDtypeStruct((2, 64), jnp.float32), jnp.int32(0)
    with kernels.use_kernels("triton", "reference"):
        choice = kernels.describe("fused_update", BATCH[0], {}, lookups, gradients, Own(), step)
    assert str(choice).splitlines() == [
        "fused_update:",
        "  reference on cpu, cuda, rocm, tpu",
        "  not triton: Own has neither is_elementwise nor sums_rows",
    ]


def test_unknown_names():
    with pytest.raises(ValueError, match="there is no primitive 'pool'; there are new_rows"):
        kernels.describe("pool")
    with (
        pytest.raises(ValueError, match="is named 'tpu'; there are 'cpu', 'triton', 'mosaic'"),
        kernels.use_kernels("tpu"),
    ):
        pass


def test_a_call_that_no_implementation_takes():
    with (
        kernels.use_kernels("triton"),
        pytest.raises(ValueError, match="takes this build_runs: triton: it has no build_runs"),
    ):
        kernels.build_runs(ROWS, num_rows=4)


@pytest.mark.parametrize(
    "module", [cpu, triton, mosaic, sparse_core], ids=lambda module: module.__name__
)
def test_implementations_have_the_parameters_of_the_reference(module):
    """Hints may be missing, and GPU kernels add options with defaults, such as ``interpret``."""
    functions = [name for name in registry.PRIMITIVES if hasattr(module, name)]
    assert functions
    for name in functions:
        wanted = inspect.signature(getattr(reference, name)).parameters
        given = inspect.signature(getattr(module, name)).parameters
        hints = registry.PRIMITIVES[name].hints
        options = [name for name, x in given.items() if x.kind is x.KEYWORD_ONLY]
        assert all(given[name].default is not inspect.Parameter.empty for name in options)
        names = [x for x in given if x not in options]
        assert names == [x for x in wanted if x not in hints]
        assert all(given[x].default == wanted[x].default for x in given if x in wanted)


@pytest.fixture
def passed_trials(monkeypatch) -> list[str]:
    """A card on which every kernel passes its trial, and the names of those that were tried."""
    tried: list[str] = []

    def trials(implementation: registry.Implementation) -> types.SimpleNamespace:
        return types.SimpleNamespace(failure=lambda form: tried.append(implementation.name))

    monkeypatch.setattr(registry, "_trials", trials)
    monkeypatch.delenv("JAXREC_KERNELS", raising=False)
    return tried


@pytest.mark.jax_version
def test_the_second_backend_is_not_tried_in_vain(passed_trials):
    choice = kernels.describe("pooled_lookup", *BATCH)
    assert choice.chosen["cuda"] == "triton"
    assert choice.refused["mosaic"] == "triton runs the call"
    assert passed_trials == ["triton"]


def test_mosaic_runs_where_it_is_named_first():
    backend("mosaic")
    with kernels.use_kernels("mosaic", "triton", "reference"):
        assert kernels.describe("pooled_lookup", *BATCH).chosen["cuda"] == "mosaic"


@pytest.mark.jax_version
def test_mosaic_runs_where_jax_has_no_triton(monkeypatch, passed_trials):
    """JAX has deprecated the Triton backend of Pallas."""
    backend("mosaic")
    for name in [name for name in sys.modules if name.startswith(triton.__name__)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("jax.experimental.pallas.triton")
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    choice = kernels.describe("pooled_lookup", *BATCH)
    assert choice.chosen["cuda"] == "mosaic"
    assert choice.refused["triton"].startswith(f"JAX {jax.__version__} has no such backend: ")
    assert passed_trials == ["mosaic"]


@pytest.mark.jax_version
def test_mosaic_says_that_jax_is_too_old(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 1))
    reason = mosaic.refuse("row_lookup", {})
    assert reason is not None
    assert reason.startswith("it needs JAX 0.11.2 or later, and this is ")
