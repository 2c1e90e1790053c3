"""DCN-v2: a cross network, and a deep network over its output."""

from __future__ import annotations

from flax import nnx

from jaxrec.nn import DCNv2
from jaxrec.train.models.rows import RowModel


class DCNv2Kind(RowModel):
    """`jaxrec.nn.DCNv2`, for rows of ids and numbers; tables may differ in width."""

    name = "dcn_v2"
    has_one_width = False

    def make(self, num_steps: int, rngs: nnx.Rngs) -> DCNv2:
        options = self.config.model
        return DCNv2(
            self.collection(self.tables(), num_steps, rngs),
            num_dense=self.num_dense,
            cross_layers=options.cross_layers,
            deep_layer_sizes=options.top_layer_sizes,
            dtype=self.dtype,
            logit_dtype="float32",
            rngs=rngs,
        )
