"""RankMixer: tokens of features that exchange parts."""

from __future__ import annotations

from flax import nnx

from jaxrec.nn import RankMixer
from jaxrec.train.models.rows import RowModel

# Number of tokens, columns of each, and hidden columns of each token's network.
NUM_TOKENS, DIM, HIDDEN_DIM = 8, 64, 128


class RankMixerKind(RowModel):
    """`jaxrec.nn.RankMixer`, for rows of ids and numbers; tables may differ in width."""

    name = "rankmixer"
    has_one_width = False

    def make(self, num_steps: int, rngs: nnx.Rngs) -> RankMixer:
        options = self.config.model
        return RankMixer(
            self.collection(self.tables(), num_steps, rngs),
            num_layers=options.cross_layers,
            num_tokens=NUM_TOKENS,
            dim=DIM,
            hidden_dim=HIDDEN_DIM,
            top_layer_sizes=(*options.top_layer_sizes, 1),
            **self.model_options(rngs),
        )
