"""Two towers: vectors of users and of items, whose dot product finds the item of a row."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxrec.arguments import ConfigError
from jaxrec.data import ClickBatch, Schema, Shard, TableEncoder, Vocabulary
from jaxrec.data.encoder import EncodedGroups
from jaxrec.data.patterns import covered
from jaxrec.embed import EmbeddingBagCollection
from jaxrec.embed.config import TableConfig
from jaxrec.mesh.agree import of_all_processes
from jaxrec.nn import MLP, in_batch_softmax_loss
from jaxrec.nn.click_model import num_columns, with_dense
from jaxrec.ragged import KeyedJaggedArray
from jaxrec.train.config import TrainConfig
from jaxrec.train.datasets import Dataset, ParquetDataset, split_datasets
from jaxrec.train.explanation import as_results, column_importance, sample_size
from jaxrec.train.features import files_of
from jaxrec.train.models.kind import HeldOutBatches
from jaxrec.train.models.ranking import RankingModel, full_ranks, rank_values
from jaxrec.train.models.rows import check_categorical
from jaxrec.train.row_memory import check_groups, pair_bytes
from jaxrec.train.row_sample import RowSample

TEMPERATURE = 0.1

# Batches are large, so that an epoch of a small file has few steps, too few for the rows of users:
# they end near popularity. A larger file is read fewer times, for as many samples in all.
_MAX_EPOCHS, _MAX_SAMPLES = 20, 2_000_000

# Takes the place of the logarithm of a padding's share of the data, so that no query meets it.
_NEVER = 1e4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ItemBatch(ClickBatch):
    """A batch of rows, and the row indices of each one's item and user.

    Padding has the item 0 and the user -1. Without a column of users, all users are -1.
    """

    items: Int[Array | np.ndarray, " batch"]
    users: Int[Array | np.ndarray, " batch"]


class Tower(nnx.Module):
    """Tables and layers that compute vectors of length 1 from some columns of a batch.

    ``places`` are the places of the tower's numbers among the dense features.
    """

    def __init__(
        self,
        embeddings: EmbeddingBagCollection,
        places: Sequence[int],
        layer_sizes: Sequence[int],
        *,
        dtype: str | None,
        rngs: nnx.Rngs,
    ):
        self.embeddings = embeddings
        self.places = tuple(places)
        self.dtype = dtype
        columns = num_columns(embeddings) + len(places)
        self.layers = MLP(columns, layer_sizes, activation_on_last=False, dtype=dtype, rngs=rngs)

    def __call__(self, dense: Any, features: KeyedJaggedArray) -> Float[Array, "batch dim"]:
        """Return the vectors of a batch, ``[batch, dim]`` float32."""
        pooled = jnp.asarray(self.embeddings(features).values)
        numbers = jnp.asarray(dense)[:, list(self.places)] if self.places else None
        inputs = with_dense(pooled, numbers, len(self.places), self.dtype)
        vectors = self.layers(inputs).astype(jnp.float32)
        # The square root of 0 has no gradient.
        squares = (vectors * vectors).sum(axis=1, keepdims=True)
        return vectors * jax.lax.rsqrt(jnp.maximum(squares, 1e-12))


class Towers(nnx.Module):
    """A tower for queries and one for items."""

    def __init__(self, query: Tower, candidate: Tower):
        self.query = query
        self.candidate = candidate


@dataclasses.dataclass(frozen=True, eq=False)
class Catalog:
    """One encoded row of each item, and the pairs of a user and an item that users took.

    ``pairs`` are sorted, without repeats: ``user * table_rows + item``, with the row indices of
    both and the number of rows of the table of items.
    """

    items: pa.Table
    pairs: Int[np.ndarray, " pairs"]
    table_rows: int

    def items_of(self, users: Int[np.ndarray, " users"]) -> list[np.ndarray]:
        """Return the row indices of each user's items."""
        first = users.astype(np.int64) * self.table_rows
        starts, ends = np.searchsorted(self.pairs, [first, first + self.table_rows])
        return [
            self.pairs[start:end] % self.table_rows for start, end in zip(starts, ends, strict=True)
        ]


@dataclasses.dataclass(frozen=True, eq=False)
class ItemDataset:
    """Rows of Parquet files, in batches that have the row indices of each row's item and user."""

    rows: ParquetDataset
    item: str
    user: str | None

    def __len__(self) -> int:
        return len(self.rows)

    def num_batches(self, batch_size: int) -> int:
        return self.rows.num_batches(batch_size)

    def batches(
        self, batch_size: int, first: int = 0, epoch: int = 0
    ) -> Generator[ItemBatch, None, None]:
        for batch in self.rows.batches(batch_size, first, epoch):
            yield self.with_items(batch)

    def with_items(self, batch: ClickBatch) -> ItemBatch:
        """Add the row indices of each sample's item and user to a host batch."""
        items = _single_ids(batch, self.item, 0)
        users = np.full_like(items, -1)
        if self.user is not None:
            users = _single_ids(batch, self.user, -1)
        fields = {x.name: getattr(batch, x.name) for x in dataclasses.fields(batch)}
        return ItemBatch(**fields, items=items, users=users)

    def catalog(self, asked: ItemDataset) -> Catalog:
        """Return the items of all processes' rows, and those that each user of ``asked`` took."""
        seen: set[int] = set()
        parts: list[pa.Table] = []
        pairs: list[np.ndarray] = []
        table_rows = self.rows.encoder.table_rows[self.item]
        is_asked = None if self.user is None else asked._positive_users()
        for table in self._tables():
            ids = np.asarray(table[self.item])
            values, places = np.unique(ids, return_index=True)
            is_new = [value not in seen for value in values.tolist()]
            seen.update(values.tolist())
            parts.append(table.take(pa.array(places[is_new])))
            if is_asked is not None:
                users, items = self._positives(table)
                own = (users * table_rows + items)[is_asked[users]]
                pairs.append(np.unique(own))
        return Catalog(pa.concat_tables(parts), _distinct(pairs), table_rows)

    def _tables(self) -> Iterator[pa.Table]:
        """Yield the encoded rows of all processes."""
        groups = EncodedGroups(self.rows.groups, self.rows.encoder)
        return map(groups.read, range(len(groups.sizes)))

    def _positives(
        self, table: pa.Table
    ) -> tuple[Int[np.ndarray, " pairs"], Int[np.ndarray, " pairs"]]:
        """Return the users and the items of encoded rows that known users took.

        Other rows have a label 0, as items that were shown and not clicked, or weigh nothing.
        """
        assert self.user is not None
        encoder = self.rows.encoder
        # The labels come first, then the weight.
        counted = table.columns[: len(encoder.schema.labels) + 1]
        users = np.asarray(table[self.user].fill_null(-1), np.int64)
        is_positive = np.all([column.to_numpy() > 0 for column in counted], axis=0)
        # All unknown users have the same row.
        is_positive &= users >= _num_unknown(encoder, self.user)
        return users[is_positive], np.asarray(table[self.item], np.int64)[is_positive]

    def _positive_users(self) -> Bool[np.ndarray, " rows"]:
        """Return which rows of the table of users are of users who took an item."""
        assert self.user is not None
        is_user = np.zeros(self.rows.encoder.table_rows[self.user], bool)
        for table in self._tables():
            is_user[self._positives(table)[0]] = True
        return is_user


def _distinct(parts: list[np.ndarray]) -> Int[np.ndarray, " pairs"]:
    """Return the sorted, distinct numbers of arrays; the list is emptied on the way.

    `pair_bytes` counts the memory of this function. `np.unique` alone would copy the numbers twice
    more.
    """
    pairs = np.empty(sum(map(len, parts)), np.int64)
    end = len(pairs)
    while parts:
        part = parts.pop()
        pairs[end - len(part) : end] = part
        end -= len(part)
    pairs.sort()
    is_first = np.append(True, pairs[1:] != pairs[:-1])[: len(pairs)]
    return pairs if is_first.all() else pairs[is_first]


def _num_unknown(encoder: TableEncoder, name: str) -> int:
    """Return the number of a table's first rows that stand for unknown ids."""
    vocabulary = encoder.vocabularies.get(name)
    return vocabulary.num_unknown if isinstance(vocabulary, Vocabulary) else 0


def _single_ids(batch: ClickBatch, name: str, missing: int) -> Int[np.ndarray, " batch"]:
    """Return each sample's row index in a column without lists; ``missing`` for an empty bag."""
    column = batch.features[name]
    lengths = np.asarray(column.lengths)
    ids = np.full(len(lengths), missing, np.int32)
    ids[lengths > 0] = np.asarray(column.values)[: lengths.sum()]
    return ids


class TwoTowerKind(RankingModel):
    """Two towers over the columns of a row: those of --item, and all others."""

    name = "two_tower"
    needs_label = False
    # The other items of a batch are the negatives, of which there must be enough.
    defaults: ClassVar[Mapping[str, Any]] = {
        "data.batch_size": 2048,
        "optimizer.learning_rate": 0.004,
        "optimizer.table_learning_rate": 0.1,
    }

    @classmethod
    def check(cls, config: TrainConfig, schema: Schema) -> None:
        super().check(config, schema)
        item = config.data.item
        if not item:
            raise ConfigError(
                "model.name two_tower has a tower for items; name their columns, the id first, "
                "such as --item item category"
            )
        for name in item:
            if name not in (*schema.dense, *schema.categorical):
                raise ConfigError(
                    f"there is no feature {name!r} for the tower of items; the features are "
                    f"{', '.join([*schema.dense, *schema.categorical])}"
                )
        # A column that --exclude names may order or hold out rows, and be no feature on purpose.
        users = {*config.data.users} - {*covered(config.data.exclude, config.data.users)}
        check_categorical((item[0], *users), schema, "the first column of --item and --user")
        if schema.dynamic:
            raise ConfigError(
                "model.name two_tower ranks all items of a vocabulary that is learned before "
                "training; leave --vocabulary dynamic out"
            )
        if not {*schema.categorical} - {*item}:
            raise ConfigError(
                "all categorical columns are named by --item, and none is left for the tower of "
                "users; name fewer"
            )
        if any(label.kind != "binary" for label in schema.labels.values()):
            raise ConfigError(
                f"model.name two_tower learns from rows whose label is 1, and {schema.label!r} is "
                "a number; make a column of 0 and 1 of it, or leave it out with --exclude"
            )

    @property
    def _item(self) -> str:
        return self.config.data.item[0]

    @property
    def _user(self) -> str | None:
        """Column of users, whose items are not recommended again; None: all items are ranked."""
        user = self.config.data.user
        return user if user in self.encoder.schema.categorical else None

    def _columns(self, *, of_items: bool) -> list[str]:
        """Return the categorical columns of one tower."""
        names = self.encoder.schema.categorical
        return [name for name in names if (name in self.config.data.item) == of_items]

    def tables(self) -> list[TableConfig]:
        return [
            table
            for of_items in (False, True)
            for table in self.tables_of(self._columns(of_items=of_items))
        ]

    def make(self, num_steps: int, rngs: nnx.Rngs) -> Towers:
        for name in (self._item, self._user):
            if name in self.encoder.lengths:
                raise ConfigError(
                    f"column {name!r} has lists; the id of an item or a user is one value"
                )

        def tower(of_items: bool) -> Tower:
            schema = self.encoder.schema
            # A column of vectors has a place for each of its numbers.
            names = [
                n
                for n, width in zip(schema.dense, schema.widths, strict=True)
                for _ in range(width)
            ]
            places = [
                place
                for place, name in enumerate(names)
                if (name in self.config.data.item) == of_items
            ]
            sizes = (*self.config.model.top_layer_sizes, 2 * self.config.model.embedding_dim)
            tables = self.tables_of(self._columns(of_items=of_items))
            return Tower(
                self.collection(tables, num_steps, rngs), places, sizes, dtype=self.dtype, rngs=rngs
            )

        return Towers(tower(False), tower(True))

    def epochs(self, rows: int) -> int:
        return min(max(_MAX_SAMPLES // max(rows, 1), 1), _MAX_EPOCHS)

    def datasets(self, shard: Shard) -> tuple[Dataset, Dataset]:
        training, held_out = split_datasets(self.config, shard, self.encoder)
        if not (isinstance(training, ParquetDataset) and isinstance(held_out, ParquetDataset)):
            raise ConfigError("model.name two_tower reads files of columns; give them with --data")
        names = self._item, self._user
        memory, schema = self.config.data.memory, self.encoder.schema
        if memory is not None and self._user is not None:
            besides = pair_bytes(len(training))
            for rows in (training, held_out):  # checked without the pairs before
                check_groups(memory, files_of(rows.groups), schema, besides)
            training = dataclasses.replace(training, besides=besides)
            held_out = dataclasses.replace(held_out, besides=besides)
        return ItemDataset(training, *names), ItemDataset(held_out, *names)

    @functools.cached_property
    def _log_shares(self) -> Float[np.ndarray, " rows"] | None:
        """Logarithm of each item's share of the training rows; None: unknown."""
        vocabulary = self.encoder.vocabularies.get(self._item)
        if not isinstance(vocabulary, Vocabulary):
            return None
        counts = np.ones(vocabulary.num_embeddings)
        counts[vocabulary.num_unknown :] = vocabulary.counts
        return np.log(counts / counts.sum()).astype(np.float32)

    def _weights(self, batch: ItemBatch) -> Float[Array, " batch"]:
        """Return the weights of the rows whose label is 1, and 0 for others."""
        labels = jnp.asarray(batch.labels).reshape(batch.weights.shape[0], -1)
        return jnp.asarray(batch.weights) * labels.prod(axis=1)

    def loss(self, model: Any, batch: Any) -> tuple[Float[Array, ""], Mapping[str, Array]]:
        weights, items = self._weights(batch), jnp.asarray(batch.items)
        shares = self._log_shares
        log_q = jnp.zeros(len(items)) if shares is None else jnp.asarray(shares)[items]
        losses = in_batch_softmax_loss(
            model.query(batch.dense, batch.features),
            model.candidate(batch.dense, batch.features),
            ids=items,
            log_q=jnp.where(weights > 0, log_q, _NEVER),
            temperature=TEMPERATURE,
        )
        total, loss = weights.sum(), (weights * losses).sum()
        samples = (jnp.asarray(batch.weights) > 0).sum().astype(jnp.float32)
        sums = jnp.stack([samples, loss, total])
        return loss / jnp.where(total > 0, total, 1), {"sums": sums}

    def _query(self, model: Any, batch: Any) -> tuple[Float[Array, ""], Mapping[str, Array]]:
        vectors = model.query(batch.dense, batch.features)
        ids = {"items": batch.items, "users": batch.users}
        return jnp.zeros(()), {"vectors": vectors, **ids, "weights": self._weights(batch)}

    def _candidate(self, model: Any, batch: Any) -> tuple[Float[Array, ""], Mapping[str, Array]]:
        outputs = {"vectors": model.candidate(batch.dense, batch.features), "items": batch.items}
        return jnp.zeros(()), outputs | {"weights": batch.weights}

    def evaluate(self, held_out: HeldOutBatches) -> dict[str, float]:
        """Rank the item of each held-out row whose label is 1 among all items of the training rows.

        An item that the training rows do not have counts as not found. With a column of users,
        the items of the user's training rows of label 1 are left out, as a recommender leaves them
        out: the model has learned that they fit.
        """
        dataset = held_out.dataset
        assert isinstance(dataset, ItemDataset)
        queries = _gathered(held_out.outputs(self._query))
        return self._ranked(queries, self._vectors(held_out, dataset), queries["users"])

    def _vectors(self, held_out: HeldOutBatches, dataset: ItemDataset) -> dict[str, np.ndarray]:
        """Return the vectors of all items, ``[items, dim]``, and their row indices."""
        catalog = self._catalog_batches(dataset, held_out.batch_size)
        return _gathered(held_out.outputs(self._candidate, catalog))

    def _ranked(
        self,
        queries: Mapping[str, np.ndarray],
        items: Mapping[str, np.ndarray],
        users: Int[np.ndarray, " queries"],
    ) -> dict[str, float]:
        """Return the values of the ranks of the items that queries want."""
        places = np.full(self.encoder.table_rows[self._item], -1)
        places[items["items"]] = np.arange(len(items["items"]))

        def left_out(part: slice) -> list[np.ndarray]:
            own = [places[each] for each in self._catalog.items_of(users[part])]
            return [each[each >= 0] for each in own]

        wanted = places[queries["items"]]
        ranks = full_ranks(queries["vectors"], items["vectors"], wanted, left_out)
        return rank_values(ranks, queries["weights"].astype(np.float64))

    def explain(self, held_out: HeldOutBatches, rows: int) -> dict[str, Any]:
        """Return the importance of the columns of the tower of users; items are not shuffled."""
        dataset = held_out.dataset
        assert isinstance(dataset, ItemDataset)
        schema, own = self.encoder.schema, {*self.config.data.item}
        columns = [name for name in (*schema.dense, *schema.categorical) if name not in own]
        sample = dataset.rows.sample(sample_size(rows, len(columns)))
        if not len(sample):
            return {}
        items = self._vectors(held_out, dataset)

        def asked(rows: RowSample) -> dict[str, np.ndarray]:
            batches = map(dataset.with_items, rows.batches(held_out.batch_size))
            return _gathered(held_out.outputs(self._query, batches))

        # A shuffled column of users is another query of the same user.
        users = asked(sample)["users"]

        def evaluate(rows: RowSample) -> dict[str, float]:
            return self._ranked(asked(rows), items, users)

        best = {x.name: x.best for x in self.measures if x.best is not None}
        importance = column_importance(
            sample,
            columns,
            evaluate,
            best,
            value=self.measures[0].name,
            rows=len(sample) * dataset.rows.shard.count,
            seed=self.config.seed,
        )
        return as_results({}, importance)

    @functools.cached_property
    def _catalog(self) -> Catalog:
        training, held_out = self.datasets(Shard())
        assert isinstance(training, ItemDataset)
        assert isinstance(held_out, ItemDataset)
        catalog = training.catalog(held_out)
        # The rows of unknown items stand for no item.
        is_known = np.asarray(catalog.items[self._item]) >= _num_unknown(self.encoder, self._item)
        return dataclasses.replace(catalog, items=catalog.items.filter(pa.array(is_known)))

    def _catalog_batches(self, dataset: ItemDataset, batch_size: int) -> Iterator[ItemBatch]:
        shard, items = dataset.rows.shard, self._catalog.items
        each = batch_size // shard.count
        # Each process computes the vectors of its part of the items, in equally many batches.
        for start in range(0, len(items), batch_size):
            part = items.slice(start + shard.index * each, each)
            yield dataset.with_items(self.encoder.pack(part, each))


def _gathered(batches: Iterator[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return the outputs of all processes' samples whose weight is above 0."""
    parts = [*batches]
    columns = {
        name: of_all_processes(np.concatenate([x[name] for x in parts])) for name in parts[0]
    }
    columns = {name: value.reshape(-1, *value.shape[2:]) for name, value in columns.items()}
    is_real = columns["weights"] > 0
    return {name: value[is_real] for name, value in columns.items()}
