"""Copies of models that share arrays."""

from __future__ import annotations

from typing import TypeVar

import jax
from flax import nnx

from jaxrec.embed.placed_variables import gather_variables

Model = TypeVar("Model", bound=nnx.Module)


def shared_copy(model: Model) -> Model:
    """Return a copy of a model whose variables are its own and share the model's arrays.

    Dense variables that are sharded over a mesh are whole on every device in the copy.
    """
    graph, state = nnx.split(model)
    # `nnx.split` returns the model's own variables; a map over the tree makes new ones.
    copy = nnx.merge(graph, jax.tree.map(lambda leaf: leaf, state))
    gather_variables(copy)
    return copy
