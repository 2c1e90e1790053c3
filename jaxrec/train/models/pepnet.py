"""PEPNet: gates by the domain, the user and the item of a row."""

from __future__ import annotations

from flax import nnx

from jaxrec.data import Schema
from jaxrec.nn import PEPNet
from jaxrec.train.config import TrainConfig
from jaxrec.train.models.rows import RowModel, check_categorical

DOMAIN_HIDDEN_SIZE = 64


class PEPNetKind(RowModel):
    """`jaxrec.nn.PEPNet`, for rows with one label or several; tables may differ in width.

    The columns of --user and --item are the prior of each task's gates, those of --model.domain the
    domain.
    """

    name = "pepnet"
    has_several_labels = True
    has_one_width = False
    reads_domain = True

    @classmethod
    def check(cls, config: TrainConfig, schema: Schema) -> None:
        super().check(config, schema)
        names = (*config.data.users, *config.data.item, *config.model.domain)
        check_categorical(names, schema, "--user, --item and --model.domain")

    def make(self, num_steps: int, rngs: nnx.Rngs) -> PEPNet:
        options, data = self.config.model, self.config.data
        return PEPNet(
            self.collection(self.tables(), num_steps, rngs),
            domain=options.domain,
            prior=(*data.users, *data.item),
            num_tasks=len(self.tasks),
            hidden_sizes=options.top_layer_sizes,
            domain_hidden_size=DOMAIN_HIDDEN_SIZE,
            **self.model_options(rngs),
        )
