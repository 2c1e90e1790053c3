"""Wukong: layers of factorization machines."""

from __future__ import annotations

from typing import ClassVar

from flax import nnx

from jaxrec.nn import Wukong
from jaxrec.train.models.rows import RowModel


class WukongKind(RowModel):
    """`jaxrec.nn.Wukong`, for rows of ids and numbers.

    Attributes:
        width: Number of vectors that a layer's factorization machine makes, the same number for its
            linear compression, and the rank of the machine.
    """

    name = "wukong"
    width: ClassVar[int] = 8

    def make(self, num_steps: int, rngs: nnx.Rngs) -> Wukong:
        options = self.config.model
        embeddings = self.collection(self.tables(), num_steps, rngs)
        return Wukong(
            embeddings,
            bottom_layer_sizes=self.bottom_layer_sizes(embeddings),
            num_layers=options.cross_layers,
            num_fm=self.width,
            num_linear=self.width,
            rank=self.width,
            fm_hidden_sizes=options.top_layer_sizes[:1],
            top_layer_sizes=(*options.top_layer_sizes, 1),
            **self.model_options(rngs),
        )
