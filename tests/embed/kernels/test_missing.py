"""Without the native library: slow, and said once."""

from __future__ import annotations

import warnings

import jax.numpy as jnp
import pytest

from jaxrec.embed import kernels
from jaxrec.embed.kernels import cpu, dispatch

ROWS = jnp.array([3, 1, 3], jnp.int32)


@pytest.fixture
def no_library(monkeypatch):
    """A checkout in which nothing was built."""
    monkeypatch.setattr(cpu, "_load", lambda: "the native library was not built")
    monkeypatch.delenv("JAXREC_KERNELS", raising=False)
    dispatch._warn_if_missing.cache_clear()
    yield
    dispatch._warn_if_missing.cache_clear()


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
