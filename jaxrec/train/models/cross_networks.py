"""Models of a cross network and a deep network: DCN-v2 and GDCN."""

from __future__ import annotations

from typing import ClassVar

from flax import nnx

from jaxrec.nn import GDCN, DCNv2
from jaxrec.train.models.rows import RowModel


class DCNv2Kind(RowModel):
    """`jaxrec.nn.DCNv2`, for rows of ids and numbers; tables may differ in width."""

    name = "dcn_v2"
    has_one_width = False
    model: ClassVar[type[DCNv2 | GDCN]] = DCNv2

    def make(self, num_steps: int, rngs: nnx.Rngs) -> nnx.Module:
        options = self.config.model
        return self.model(
            self.collection(self.tables(), num_steps, rngs),
            cross_layers=options.cross_layers,
            deep_layer_sizes=options.top_layer_sizes,
            **self.model_options(rngs),
        )


class GDCNKind(DCNv2Kind):
    """`jaxrec.nn.GDCN`, for rows of ids and numbers; tables may differ in width."""

    name = "gdcn"
    model = GDCN
