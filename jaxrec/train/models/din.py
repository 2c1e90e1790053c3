"""DIN: weighs the items of a history by their relevance to the item of the row."""

from __future__ import annotations

from collections.abc import Mapping

from flax import nnx

from jaxrec.arguments import ConfigError
from jaxrec.data import Schema
from jaxrec.embed import EmbeddingCollection, EmbeddingConfig
from jaxrec.embed.config import TableConfig
from jaxrec.nn import DIN
from jaxrec.train.config import TrainConfig
from jaxrec.train.models.rows import RowModel


class DINKind(RowModel):
    """`jaxrec.nn.DIN`, for rows with an item and a list of earlier items of the same table."""

    name = "din"
    has_one_width = False

    @classmethod
    def check(cls, config: TrainConfig, schema: Schema) -> None:
        super().check(config, schema)
        history, item = config.data.history, config.data.item
        if not history or len(history) != len(item):
            raise ConfigError(
                "model.name din reads columns of lists, the items that a user had before, and for "
                "each a column of the row's item; name them, such as --history clicked --item item "
                f"(got --history {' '.join(history)} and --item {' '.join(item)})"
            )
        for before, now in zip(history, item, strict=True):
            for name in (before, now):
                if name not in schema.categorical:
                    raise ConfigError(
                        f"column {name!r} is not categorical; --history and --item name "
                        f"categorical columns: {', '.join(schema.categorical)}"
                    )
            if schema.categorical[before].table != now:
                raise ConfigError(
                    f"the columns {before!r} and {now!r} have tables of their own; give "
                    f"{before!r} the option table: {now} in the schema"
                )

    @property
    def _pairs(self) -> Mapping[str, str]:
        """From each history to its item."""
        data = self.config.data
        return dict(zip(data.history, data.item, strict=True))

    def _item_tables(self) -> list[EmbeddingConfig]:
        tables = self.tables_of([*self._pairs.values(), *self._pairs])
        return [
            EmbeddingConfig(
                table.name,
                table.num_embeddings,
                table.embedding_dim,
                feature_names=table.feature_names,
                dtype=table.dtype,
                initializer=table.initializer,
            )
            for table in tables
        ]

    def _profile(self) -> list[str]:
        """Return the names of the columns that are neither items nor histories."""
        others = {*self._pairs, *self._pairs.values()}
        return [name for name in self.encoder.schema.categorical if name not in others]

    def tables(self) -> list[TableConfig]:  # type: ignore[override]
        return [*self._item_tables(), *self.tables_of(self._profile())]

    def make(self, num_steps: int, rngs: nnx.Rngs) -> DIN:
        for name in self._pairs:
            if name not in self.encoder.lengths:
                raise ConfigError(f"column {name!r} of --history has no lists; give one that has")
        items = EmbeddingCollection(
            self._item_tables(), optimizer=self.row_optimizer(num_steps), rngs=rngs
        )
        profile = self.tables_of(self._profile())
        return DIN(
            items,
            self._pairs,
            profile=self.collection(profile, num_steps, rngs) if profile else None,
            num_dense=self.num_dense,
            top_layer_sizes=(*self.config.model.top_layer_sizes, 1),
            # The paper's Dice would measure padding, too.
            activation=nnx.relu,
            dtype=self.dtype,
            rngs=rngs,
        )
