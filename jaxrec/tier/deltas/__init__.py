"""Versions of a model in a folder, each after the first as the changes since the one before."""
