"""DeepFM: a factorization machine and a deep network over the same embeddings."""

from __future__ import annotations

from flax import nnx

from jaxrec.embed import EmbeddingBagConfig
from jaxrec.nn import DeepFM
from jaxrec.train.models.rows import RowModel


class DeepFMKind(RowModel):
    """`jaxrec.nn.DeepFM`, for rows of ids and numbers."""

    name = "deepfm"

    def tables(self) -> list[EmbeddingBagConfig]:
        return [*super().tables(), *self.linear_tables()]

    def make(self, num_steps: int, rngs: nnx.Rngs) -> DeepFM:
        wide, linear = super().tables(), self.linear_tables()
        return DeepFM(
            self.collection(wide, num_steps, rngs),
            self.collection(linear, num_steps, rngs),
            deep_layer_sizes=(*self.config.model.top_layer_sizes, 1),
            **self.model_options(rngs),
        )
