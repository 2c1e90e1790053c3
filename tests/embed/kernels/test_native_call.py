"""Calls of the native library by programs that somebody edited: errors, never a crash."""

from __future__ import annotations

import re

import jax
import pytest

from jaxrec.embed.kernels import cpu
from tests.embed.kernels.native_faults import CALLS, FAULTS

pytestmark = [
    pytest.mark.jax_version,
    pytest.mark.every_case,
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="the library runs on CPUs alone"),
]


@pytest.fixture(scope="module")
def errors(forks):
    """The error of each call, which a process of its own makes; another one after a crash."""
    if (reason := cpu.missing()) is not None:
        pytest.skip(reason)
    names = [*CALLS, *FAULTS]
    found = {}
    while left := [name for name in names if name not in found]:
        fork = forks.start("tests.embed.kernels.native_faults:run", left)
        for name in left:
            try:
                found[name] = fork.connection.recv()
            except EOFError:
                found[name] = f"the process ended with {fork.wait(60)}: {fork.errors}"
                break
    return found


@pytest.mark.parametrize("call", CALLS)
def test_calls_that_fit(errors, call):
    assert errors[call] is None


@pytest.mark.parametrize("fault", FAULTS)
def test_calls_that_do_not_fit(errors, fault):
    target, words, _ = FAULTS[fault]
    start = rf"INVALID_ARGUMENT: jaxrec_{target} cannot run: "
    assert errors[fault] is not None, "there is no error"
    assert re.search(rf"{start}(?s:.*)({words})", errors[fault]), errors[fault]
    assert "another version of jaxrec" in errors[fault]
