"""Models that rank a row's item by a history of items: DIN, TransAct, LONGER and OneTrans."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import TypedDict

from flax import nnx

from jaxrec.arguments import ConfigError
from jaxrec.data import Schema
from jaxrec.embed import EmbeddingBagCollection, EmbeddingCollection, EmbeddingConfig
from jaxrec.embed.config import TableConfig
from jaxrec.nn import DIN, LONGER, OneTrans, TransAct
from jaxrec.train.config import TrainConfig
from jaxrec.train.models.rows import RowModel, check_categorical

# Neighbours that LONGER merges, and columns of the tokens of LONGER and OneTrans.
MERGE, TOKEN_DIM = 4, 32


class HistoryOptions(TypedDict):
    """Options that all models of histories share."""

    profile: EmbeddingBagCollection | None
    num_dense: int
    top_layer_sizes: Sequence[int]
    dtype: str | None
    rngs: nnx.Rngs


class HistoryKind(RowModel):
    """A model for rows with an item and a list of earlier items of the same table.

    Implementors give ``name`` and `make_ranker`.
    """

    has_one_width = False

    @classmethod
    def check(cls, config: TrainConfig, schema: Schema) -> None:
        super().check(config, schema)
        history, item = config.data.history, config.data.item
        if not history or len(history) != len(item):
            raise ConfigError(
                f"model.name {cls.name} reads columns of lists, the items that a user had before, "
                "and for each a column of the row's item; name them, such as --history clicked "
                f"--item item (got --history {' '.join(history)} and --item {' '.join(item)})"
            )
        for before, now in zip(history, item, strict=True):
            check_categorical((before, now), schema, "--history and --item")
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

    @property
    def max_length(self) -> int:
        """Number of items of a history that are read: those of the longest one, if it has fewer."""
        longest = max(int(self.encoder.lengths[name].lengths.max()) for name in self._pairs)
        return max(1, min(self.config.model.max_length, longest))

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

    def make(self, num_steps: int, rngs: nnx.Rngs) -> nnx.Module:
        for name in self._pairs:
            if name not in self.encoder.lengths:
                raise ConfigError(f"column {name!r} of --history has no lists; give one that has")
        items = EmbeddingCollection(
            self._item_tables(), optimizer=self.row_optimizer(num_steps), rngs=rngs
        )
        profile = self.tables_of(self._profile())
        options: HistoryOptions = {
            "profile": self.collection(profile, num_steps, rngs) if profile else None,
            "num_dense": self.num_dense,
            "top_layer_sizes": (*self.config.model.top_layer_sizes, 1),
            "dtype": self.dtype,
            "rngs": rngs,
        }
        return self.make_ranker(items, self._pairs, options)

    @abc.abstractmethod
    def make_ranker(
        self, items: EmbeddingCollection, pairs: Mapping[str, str], options: HistoryOptions
    ) -> nnx.Module:
        """Make the model.

        ``items`` are its tables, and ``pairs`` map each history feature to its item's feature.
        """


class DINKind(HistoryKind):
    """`jaxrec.nn.DIN`, which weighs each item of a history by its relevance to the row's item."""

    name = "din"

    def make_ranker(
        self, items: EmbeddingCollection, pairs: Mapping[str, str], options: HistoryOptions
    ) -> DIN:
        # The paper's Dice would measure padding, too.
        return DIN(items, pairs, activation=nnx.relu, **options)


class TransActKind(HistoryKind):
    """`jaxrec.nn.TransAct`, a transformer over the last items, each joined with the row's item."""

    name = "transact"

    def make_ranker(
        self, items: EmbeddingCollection, pairs: Mapping[str, str], options: HistoryOptions
    ) -> TransAct:
        length = self.max_length
        return TransAct(items, pairs, max_length=length, num_newest=min(10, length), **options)


class LONGERKind(HistoryKind):
    """`jaxrec.nn.LONGER`, which merges neighbours of long histories."""

    name = "longer"

    def make_ranker(
        self, items: EmbeddingCollection, pairs: Mapping[str, str], options: HistoryOptions
    ) -> LONGER:
        groups = -(-self.max_length // MERGE)
        return LONGER(
            items,
            pairs,
            max_length=groups * MERGE,
            merge=MERGE,
            dim=TOKEN_DIM,
            hidden_dim=2 * TOKEN_DIM,
            num_queries=min(8, groups),
            **options,
        )


class OneTransKind(HistoryKind):
    """`jaxrec.nn.OneTrans`, one transformer over the history and all other columns."""

    name = "onetrans"

    def make_ranker(
        self, items: EmbeddingCollection, pairs: Mapping[str, str], options: HistoryOptions
    ) -> OneTrans:
        return OneTrans(
            items,
            pairs,
            max_length=self.max_length,
            dim=TOKEN_DIM,
            hidden_dim=2 * TOKEN_DIM,
            **options,
        )
