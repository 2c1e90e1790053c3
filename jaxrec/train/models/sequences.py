"""SASRec and BERT4Rec: the next item of a sequence, from the items before it."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Generator, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pyarrow as pa
import pyarrow.compute as pc
from flax import nnx
from jaxtyping import Array, Bool, Float, Int
from rich.console import Console

from jaxrec import optim
from jaxrec.arguments import ConfigError
from jaxrec.data import (
    CategoricalColumn,
    DataError,
    Schema,
    Shard,
    TableEncoder,
    learn_encoder,
)
from jaxrec.data.encode import joined
from jaxrec.data.encoder import bags_of
from jaxrec.embed import EmbeddingCollection, EmbeddingConfig
from jaxrec.nn import BERT4Rec, SASRec, last_states, sampled_softmax_loss
from jaxrec.optim import RowOptimizer
from jaxrec.ragged import KeyedJaggedArray, Packer
from jaxrec.ragged.capacity import LengthMoments
from jaxrec.train.config import DataConfig, TrainConfig
from jaxrec.train.datasets import Dataset
from jaxrec.train.features import convert_files, is_parquet, saved_encoder
from jaxrec.train.hold_out import LAST
from jaxrec.train.models.interactions import item_column, split_sequences
from jaxrec.train.models.kind import HeldOutBatches
from jaxrec.train.models.ranking import RankingModel, full_ranks, rank_values
from jaxrec.train.row_memory import check_model

FEATURES = ("history", "targets", "negatives")

# Number of negatives of a batch. With fewer items, each of them is one: a softmax over all items.
NEGATIVES = 1024

# Takes the place of the logarithm of a padding's probability, so that it adds nothing to a softmax.
_NEVER = 1e4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class SequenceBatch:
    """A batch of sequences.

    Attributes:
        features: ``history``; in training ``targets``, an item for each of the history, and
            ``negatives``, which all sequences share.
        wanted: ``[batch]`` int32, the item after the history; 0 in training.
        weights: ``[batch]`` float32, 1; 0 for padding, whose bags are empty.
    """

    features: KeyedJaggedArray
    wanted: Int[Array | np.ndarray, " batch"]
    weights: Float[Array | np.ndarray, " batch"]


@dataclasses.dataclass(frozen=True, eq=False)
class SequenceDataset:
    """Sequences of the row indices of items, in batches.

    Attributes:
        rows: Each sequence's items.
        wanted: The item after each sequence; None: the rows are to train on.
        kind: Makes the histories.
        seed: Seed of the order, the masks and the negatives; None: the order of the rows.
    """

    rows: list[np.ndarray]
    wanted: Int[np.ndarray, " rows"] | None
    kind: SequenceKind
    seed: int | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def num_batches(self, batch_size: int) -> int:
        return -(-len(self.rows) // batch_size)

    @functools.cached_property
    def _packer(self) -> Packer:
        longest = self.kind.config.model.max_length
        lengths = np.minimum([len(row) for row in self.rows], longest)
        moments = dict.fromkeys(("history", "targets"), LengthMoments.of(lengths))
        return Packer.of_moments(moments)

    def batches(
        self, batch_size: int, first: int = 0, epoch: int = 0
    ) -> Generator[SequenceBatch, None, None]:
        order = np.arange(len(self.rows))
        if self.seed is not None:
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.rows))
        for number in range(first, self.num_batches(batch_size)):
            places = order[number * batch_size : (number + 1) * batch_size]
            # Each batch seeds a generator, so that a resumed run makes the batches that follow.
            rng = np.random.default_rng([self.seed or 0, epoch, number])
            yield self._batch(places, batch_size, rng)

    def _batch(
        self, places: np.ndarray, batch_size: int, rng: np.random.Generator
    ) -> SequenceBatch:
        rows = [self.rows[place] for place in places]
        none: list[np.ndarray] = [np.zeros(0, np.int32)] * batch_size
        missing = none[len(rows) :]
        if self.wanted is None:
            pairs = [self.kind.sample(row, rng) for row in rows]
            parts = [
                [history for history, _ in pairs] + missing,
                [targets for _, targets in pairs] + missing,
                np.array_split(self.kind.negatives(rng), batch_size),
            ]
            wanted = np.zeros(batch_size, np.int32)
        else:
            parts = [[self.kind.question(row) for row in rows] + missing, none, none]
            wanted = np.pad(self.wanted[places], (0, len(missing)))
        flat = [each for part in parts for each in part]
        features = self._packer.from_lengths(
            FEATURES, np.concatenate(flat), np.array([len(each) for each in flat], np.int32)
        )
        weights = np.zeros(batch_size, np.float32)
        weights[: len(rows)] = 1
        return SequenceBatch(features, wanted.astype(np.int32), weights)


class SequenceKind(RankingModel):
    """A model of sequences of items. Implementors make the model and its histories.

    By default the last item of each sequence is held out. Held-out last items are ranked among all
    items; sequences of one item are left out.
    """

    needs_label = False
    defaults: ClassVar[Mapping[str, Any]] = {
        "data.batch_size": 64,
        "data.epochs": 100,
        "model.embedding_dim": 64,
        "optimizer.learning_rate": 0.002,
        "optimizer.table_learning_rate": 0.002,
        "patience": 10,
    }

    @classmethod
    def check(cls, config: TrainConfig, schema: Schema) -> None:
        super().check(config, schema)
        item_column(config.data)
        check_model(config.data.memory, cls.name)
        if config.vocabulary.is_dynamic:
            raise ConfigError(
                f"model.name {cls.name} ranks all items of a vocabulary that is learned before "
                "training; leave --vocabulary dynamic out"
            )

    @classmethod
    def learn(cls, config: TrainConfig, console: Console) -> TableEncoder:
        encoder = None if config.resume is None else saved_encoder(config.resume)
        if encoder is not None:
            return encoder
        data = config.data
        names = ("schema", "label", "weight", "exclude", "dense", "categorical")
        unread = [name for name in names if getattr(data, name)]
        unread += ["label-kind"] if data.label_kind != "auto" else []
        if unread:
            raise ConfigError(
                f"model.name {cls.name} reads sequences of items alone; leave data.{unread[0]} out"
            )
        item = item_column(data)
        convert_files(data, console)
        training = split_sequences(data, config.seed).training
        lengths = pc.list_value_length(training).to_numpy()
        _check_training(int((lengths > 1).sum()), data)
        schema = Schema(None, {}, {item: CategoricalColumn(min_count=1)})
        encoder = learn_encoder(schema, [pa.table({item: training})])
        console.print(
            f"{len(training):,} sequences of {len(encoder.vocabularies[item]):,} items; mean "
            f"length {lengths.mean():.1f}, longest {lengths.max():,}, of which the last "
            f"{config.model.max_length} are read"
        )
        return encoder

    @property
    def item(self) -> str:
        """Name of the column of items."""
        return next(iter(self.encoder.schema.categorical))

    @property
    def num_items(self) -> int:
        """Number of rows of items: that of unknown items, 0, and those of the vocabulary."""
        return self.encoder.table_rows[self.item]

    @abc.abstractmethod
    def sample(self, row: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return a training history of a sequence, and the item that each of its states predicts;
        0 for states that predict none."""

    @abc.abstractmethod
    def question(self, row: np.ndarray) -> np.ndarray:
        """Return the history whose last state predicts the item after a sequence."""

    def negatives(self, rng: np.random.Generator) -> np.ndarray:
        """Return the negatives of a batch: all items, or different ones drawn uniformly."""
        if self.num_items <= NEGATIVES:
            return np.arange(1, self.num_items, dtype=np.int32)
        drawn = rng.choice(self.num_items - 1, NEGATIVES, replace=False)
        return (1 + drawn).astype(np.int32)

    @property
    def hold_out(self) -> str:
        data = self.config.data
        if data.eval_path is None and (not data.hold_out_options or data.hold_out == LAST):
            return "the last item of each sequence"
        return super().hold_out

    def datasets(self, shard: Shard) -> tuple[Dataset, Dataset]:
        data = self.config.data
        if not is_parquet(data.path):
            raise ConfigError(
                f"model.name {self.name} reads files of columns; give them with --data"
            )
        if shard.count > 1:
            raise ConfigError(f"model.name {self.name} trains in one process, not {shard.count}")
        split = split_sequences(data, self.config.seed)
        rows = [row for row in self._rows(split.training) if len(row) > 1]
        _check_training(len(rows), data)
        wanted = np.array([row[-1] for row in self._rows(_lists_of_one(split.last))], np.int32)
        return (
            SequenceDataset(rows, None, self, self.config.seed),
            SequenceDataset(self._rows(split.before), wanted, self),
        )

    def _rows(self, sequences: pa.Array) -> list[np.ndarray]:
        """Return the row indices of each sequence's items."""
        encoded = self.encoder.encode(pa.table({self.item: sequences}))
        values, lengths = bags_of(joined(encoded[self.item]))
        return np.split(values, np.cumsum(lengths)[:-1])

    def tables(self) -> list[EmbeddingConfig]:
        return [
            EmbeddingConfig(
                self.item,
                self.num_items + 1,  # the last row is the mask of BERT4Rec
                self.config.model.embedding_dim,
                feature_names=FEATURES,
                initializer=nnx.initializers.normal(0.02),
                dtype=self.config.model.table_dtype,
            )
        ]

    def row_optimizer(self, num_steps: int) -> RowOptimizer:
        rate = optax.linear_schedule(self.config.optimizer.table_learning_rate, 0.0, num_steps)
        return optim.adam(rate)

    def make(self, num_steps: int, rngs: nnx.Rngs) -> SASRec | BERT4Rec:
        items = EmbeddingCollection(
            self.tables(), optimizer=self.row_optimizer(num_steps), rngs=rngs
        )
        return self._model(items, {"max_length": self.config.model.max_length, "rngs": rngs})

    @abc.abstractmethod
    def _model(self, items: EmbeddingCollection, options: Mapping[str, Any]) -> SASRec | BERT4Rec:
        """Make the model of a collection of items."""

    def loss(self, model: Any, batch: Any) -> tuple[Float[Array, ""], Mapping[str, Array]]:
        embedded = model(batch.features)
        targets, negatives = batch.features["targets"], batch.features["negatives"]
        # Without the axis over devices that a batch has on a mesh: all states meet all negatives.
        states, positives, others = (
            jnp.asarray(embedded[name].values).reshape(-1, self.config.model.embedding_dim)
            for name in ("history", "targets", "negatives")
        )
        target_ids, other_ids = (jnp.asarray(x.values).reshape(-1) for x in (targets, negatives))
        losses = sampled_softmax_loss(
            states,
            positives,
            others,
            positive_log_q=jnp.zeros(target_ids.shape),
            negative_log_q=jnp.where(_is_real(negatives).reshape(-1), 0.0, _NEVER),
            positive_ids=target_ids,
            negative_ids=other_ids,
        )
        counts = _is_real(targets).reshape(-1) & (target_ids > 0)
        total = counts.sum().astype(jnp.float32)
        loss = jnp.where(counts, losses, 0).sum()
        samples = jnp.asarray(batch.weights).sum()
        return loss / jnp.maximum(total, 1), {"sums": jnp.stack([samples, loss, total])}

    def _query(self, model: Any, batch: Any) -> tuple[Float[Array, ""], Mapping[str, Array]]:
        states = last_states(model(batch.features)["history"])
        outputs = {"vectors": states.reshape(-1, states.shape[-1]), "wanted": batch.wanted}
        return jnp.zeros(()), outputs | {"weights": batch.weights}

    def evaluate(self, held_out: HeldOutBatches) -> dict[str, float]:
        """Rank the last item of each held-out sequence among all items of the vocabulary.

        An item that the vocabulary does not have counts as not found.
        """
        parts = [*held_out.outputs(self._query)]
        queries = {name: np.concatenate([x[name] for x in parts]) for name in parts[0]}
        model: Any = held_out.model
        items = np.asarray(model.items.table(self.item), np.float32)[1 : self.num_items]
        is_real = queries["weights"] > 0
        ranks = full_ranks(
            queries["vectors"][is_real].astype(np.float32), items, queries["wanted"][is_real] - 1
        )
        return rank_values(ranks, np.ones(len(ranks)))


class SASRecKind(SequenceKind):
    """`jaxrec.nn.SASRec`: each state predicts the item that follows."""

    name = "sasrec"

    def sample(self, row: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        row = _window(row, self.config.model.max_length + 1, rng)
        return row[:-1], row[1:]

    def question(self, row: np.ndarray) -> np.ndarray:
        return row[-self.config.model.max_length :]

    def _model(self, items: EmbeddingCollection, options: Mapping[str, Any]) -> SASRec:
        return SASRec(items, **options)


class BERT4RecKind(SequenceKind):
    """`jaxrec.nn.BERT4Rec`: states at masks predict the items that the masks replace."""

    name = "bert4rec"

    # Share of a sequence's items that are masked.
    _mask_rate = 0.3

    def sample(self, row: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        row = _window(row, self.config.model.max_length, rng)
        is_masked = rng.random(len(row)) < self._mask_rate
        # At least one, more often the last: that is the mask of `question`.
        is_masked[-1 if rng.random() < 0.5 else rng.integers(len(row))] = True
        history = np.where(is_masked, np.int32(self.num_items), row)
        return history, np.where(is_masked, row, np.int32(0))

    def question(self, row: np.ndarray) -> np.ndarray:
        kept = row[len(row) - min(len(row), self.config.model.max_length - 1) :]
        return np.append(kept, np.int32(self.num_items))

    def _model(self, items: EmbeddingCollection, options: Mapping[str, Any]) -> BERT4Rec:
        return BERT4Rec(items, **options)


def _check_training(count: int, data: DataConfig) -> None:
    """Raise a DataError if there are no sequences to train on."""
    if count == 0:
        besides = "" if data.eval_path else " to train on besides those that are held out"
        raise DataError(f"{data.path}: no sequence has two items{besides}")


def _window(row: np.ndarray, length: int, rng: np.random.Generator) -> np.ndarray:
    """Return a random stretch of a sequence, which is the whole sequence if it is short."""
    start = rng.integers(max(1, len(row) - length + 1))
    return row[start : start + length]


def _is_real(column: Any) -> Bool[Array, "*devices capacity"]:
    """Return which values of a ragged column are not padding."""
    shape = column.values.shape
    count = jnp.asarray(column.lengths).sum(axis=-1, keepdims=True)
    places = jnp.broadcast_to(jnp.arange(shape[-1]), shape)
    return places < jnp.broadcast_to(count, shape)


def _lists_of_one(values: pa.Array) -> pa.Array:
    offsets = pa.array(np.arange(len(values) + 1, dtype=np.int64))
    return pa.LargeListArray.from_arrays(offsets, values)
