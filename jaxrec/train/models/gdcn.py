"""GDCN: a gated cross network beside a deep network."""

from __future__ import annotations

from flax import nnx

from jaxrec.nn import GDCN
from jaxrec.train.models.rows import RowModel


class GDCNKind(RowModel):
    """`jaxrec.nn.GDCN`, for rows of ids and numbers; tables may differ in width."""

    name = "gdcn"
    has_one_width = False

    def make(self, num_steps: int, rngs: nnx.Rngs) -> GDCN:
        options = self.config.model
        return GDCN(
            self.collection(self.tables(), num_steps, rngs),
            num_dense=self.num_dense,
            cross_layers=options.cross_layers,
            deep_layer_sizes=options.top_layer_sizes,
            dtype=self.dtype,
            logit_dtype="float32",
            rngs=rngs,
        )
