"""How often the tests check the annotations of a function."""

from __future__ import annotations

import jaxtyping
import pytest

from tests import typecheck


def closure(result):
    @typecheck._check_first_calls
    def function() -> int:
        return result

    return function


def test_closures_share_the_calls_that_are_checked(monkeypatch):
    monkeypatch.setattr(typecheck, "_most_calls", 2)
    assert closure(3)() == 3
    with pytest.raises(jaxtyping.TypeCheckError):
        closure("three")()
    assert closure("three")() == "three"
