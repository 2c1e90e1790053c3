"""DLRM: pairwise dot products of embeddings and of the dense features' vector."""

from __future__ import annotations

from flax import nnx

from jaxrec.arguments import ConfigError
from jaxrec.data import Schema
from jaxrec.nn import DLRM
from jaxrec.train.config import TrainConfig
from jaxrec.train.models.rows import RowModel


class DLRMKind(RowModel):
    """`jaxrec.nn.DLRM`, for rows with ids and numbers."""

    name = "dlrm"

    @classmethod
    def check(cls, config: TrainConfig, schema: Schema) -> None:
        super().check(config, schema)
        if not schema.dense:
            raise ConfigError(
                "model.name dlrm needs a dense column, and there is none; take --model.name dcn_v2 "
                "or --model.name deepfm, or name columns of numbers with --dense"
            )

    def make(self, num_steps: int, rngs: nnx.Rngs) -> DLRM:
        options = self.config.model
        embeddings = self.collection(self.tables(), num_steps, rngs)
        return DLRM(
            embeddings,
            bottom_layer_sizes=self.bottom_layer_sizes(embeddings),
            top_layer_sizes=(*options.top_layer_sizes, 1),
            **self.model_options(rngs),
        )
