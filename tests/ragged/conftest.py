"""Hypothesis takes its time here: an example may compile, and speed is nobody's promise."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
