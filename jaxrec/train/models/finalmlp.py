"""FinalMLP: two MLPs over gated columns, and a bilinear form of their outputs."""

from __future__ import annotations

from flax import nnx

from jaxrec.data import Schema
from jaxrec.nn import FinalMLP
from jaxrec.train.config import TrainConfig
from jaxrec.train.models.rows import RowModel, check_categorical


class FinalMLPKind(RowModel):
    """`jaxrec.nn.FinalMLP`, for rows of ids and numbers; tables may differ in width.

    The first gate reads the column of --user, the second those of --item; without them a gate reads
    a learned vector.
    """

    name = "finalmlp"
    has_one_width = False

    @classmethod
    def check(cls, config: TrainConfig, schema: Schema) -> None:
        super().check(config, schema)
        names = (*config.data.users, *config.data.item)
        check_categorical(names, schema, "--user and --item")

    def make(self, num_steps: int, rngs: nnx.Rngs) -> FinalMLP:
        sizes, data = self.config.model.top_layer_sizes, self.config.data
        return FinalMLP(
            self.collection(self.tables(), num_steps, rngs),
            contexts=(data.users, data.item),
            first_layer_sizes=sizes,
            second_layer_sizes=sizes,
            **self.model_options(rngs),
        )
