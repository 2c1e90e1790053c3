"""MaskNet: columns times masks that the row itself computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from flax import nnx

from jaxrec.embed import EmbeddingBagConfig
from jaxrec.nn import MaskNet
from jaxrec.train.models.rows import RowModel

# Columns of a block's output, and hidden columns of a mask's network.
BLOCK_SIZE, MASK_HIDDEN_SIZE = 64, 128


class MaskNetKind(RowModel):
    """`jaxrec.nn.MaskNet` with parallel blocks, for rows of ids and numbers."""

    name = "masknet"

    def tables_of(self, columns: Sequence[str]) -> list[EmbeddingBagConfig]:
        # A layer norm follows each row, so that only the ratio of an update to the row's norm
        # counts. From rows near 0 the first sample of an id would turn its row around; these have
        # norms about 1.
        return [
            dataclasses.replace(x, initializer=nnx.initializers.normal(x.embedding_dim**-0.5))
            for x in super().tables_of(columns)
        ]

    def make(self, num_steps: int, rngs: nnx.Rngs) -> MaskNet:
        options = self.config.model
        embeddings = self.collection(self.tables(), num_steps, rngs)
        return MaskNet(
            embeddings,
            bottom_layer_sizes=self.bottom_layer_sizes(embeddings),
            block_sizes=(BLOCK_SIZE,) * options.cross_layers,
            mask_hidden_size=MASK_HIDDEN_SIZE,
            structure="parallel",
            top_layer_sizes=(*options.top_layer_sizes, 1),
            **self.model_options(rngs),
        )
