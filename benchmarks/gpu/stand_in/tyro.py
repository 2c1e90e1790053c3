"""Stands in for tyro where it cannot be installed: commands cannot be parsed, all else works."""

from types import SimpleNamespace


def cli(*_: object, **__: object) -> object:
    raise ModuleNotFoundError("this needs tyro: pip install tyro")


conf = SimpleNamespace(arg=lambda **_: None)
