"""Stands in for jaxtyping where it cannot be installed: annotations say nothing, all else works."""

import jax

Array = jax.Array
DTypeLike = object


class _Anything:
    def __class_getitem__(cls, item: object) -> type:
        return jax.Array


def __getattr__(name: str) -> type:
    return _Anything
