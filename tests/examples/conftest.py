"""Examples are scripts that import their neighbours by name."""

from __future__ import annotations

import importlib
import pathlib
import sys
import types
from collections.abc import Callable, Iterator

import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], types.ModuleType]]:
    """Imports an example by its name."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield importlib.import_module
    for path in EXAMPLES.glob("*.py"):
        sys.modules.pop(path.stem, None)
