"""Versions of a model in a folder: full ones, and the changes since the version before."""
