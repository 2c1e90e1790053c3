"""Wide & deep: a linear model of ids, and a deep network over embeddings."""

from __future__ import annotations

from flax import nnx

from jaxrec.embed import EmbeddingBagConfig
from jaxrec.nn import WideDeep
from jaxrec.train.models.rows import RowModel


class WideDeepKind(RowModel):
    """`jaxrec.nn.WideDeep`, for rows of ids and numbers; tables may differ in width.

    The wide part has a weight for each id, trained by the run's row optimizer. The data
    must hold crosses of columns as columns of their own.
    """

    name = "wide_deep"
    has_one_width = False

    def tables(self) -> list[EmbeddingBagConfig]:
        return [*super().tables(), *self.linear_tables()]

    def make(self, num_steps: int, rngs: nnx.Rngs) -> WideDeep:
        deep, wide = super().tables(), self.linear_tables()
        return WideDeep(
            self.collection(wide, num_steps, rngs),
            self.collection(deep, num_steps, rngs),
            num_dense=self.num_dense,
            deep_layer_sizes=(*self.config.model.top_layer_sizes, 1),
            dtype=self.dtype,
            rngs=rngs,
        )
