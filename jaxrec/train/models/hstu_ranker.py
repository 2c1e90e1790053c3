"""The HSTU ranker: what a user does with each of several candidates, from a history of events."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float
from rich.console import Console

from jaxrec import optim
from jaxrec.arguments import ConfigError
from jaxrec.data import (
    CategoricalColumn,
    RequestLimits,
    Schema,
    SequenceBatches,
    Shard,
    TableEncoder,
)
from jaxrec.data.movielens import has_ratings
from jaxrec.data.sequences.batches import SequenceGroups
from jaxrec.data.split import DEFAULT_FRACTION
from jaxrec.embed import EmbeddingCollection, EmbeddingConfig
from jaxrec.nn import HSTURanker, RankerFeatures, TargetTask
from jaxrec.optim import RowOptimizer
from jaxrec.train.config import TrainConfig
from jaxrec.train.features import convert_files, saved_encoder
from jaxrec.train.models.kind import Dataset, HeldOutBatches
from jaxrec.train.models.labels import ClickTask, LabelTask
from jaxrec.train.models.rows import RowModel
from jaxrec.train.request_columns import (
    TIME,
    Columns,
    known_columns,
    sequence_schema,
    table_schema,
)
from jaxrec.train.requests import RequestData, RequestDataset, batch_shape, split_windows
from jaxrec.train.row_memory import check_model

# Bits of actions that histories embed; an action that a log lacks is a vector that is never read.
BITS = (1, 2, 4)


class HSTURankerKind(RowModel):
    """`jaxrec.nn.HSTURanker`, for rows of requests, of users or of events.

    The sample of metrics is a candidate, and its label is the bit 1 of its actions.
    """

    name = "hstu_ranker"
    needs_label = False
    defaults: ClassVar[Mapping[str, Any]] = {
        "data.batch_size": 128,
        "data.epochs": 1,
        "data.generated_rows": 80_000,
        "data.generated_eval_rows": 8_000,
        "model.embedding_dim": 32,
        "optimizer.learning_rate": 0.005,
        "optimizer.table_learning_rate": 0.005,
    }

    @classmethod
    def check(cls, config: TrainConfig, schema: Schema) -> None:
        super(RowModel, cls).check(config, schema)  # it has no columns of labels
        data = config.data
        check_model(config.data.memory, cls.name)
        is_read = data.schema is None and data.weight is None and data.label_kind == "auto"
        if not is_read or data.exclude or data.dense or data.categorical or data.history:
            raise ConfigError(
                "model.name hstu_ranker finds its columns by their names; leave --schema, "
                "--weight, --label-kind, --exclude, --dense, --categorical and --history out, and "
                "name columns with --user, --item, --time and --label"
            )
        named = data.user or data.item or data.time or data.types
        if named and (data.path is None or has_ratings(data.path)):
            raise ConfigError(
                f"the columns of {data.path or 'the generated log'} are known; leave --user, "
                "--item, --time and --data.types out"
            )
        if config.vocabulary.is_dynamic:
            raise ConfigError(
                "model.name hstu_ranker takes ids modulo --data.table-rows; leave --vocabulary out"
            )

    @classmethod
    def learn(cls, config: TrainConfig, console: Console) -> TableEncoder:
        cls.check(config, Schema(None, {}, {"": CategoricalColumn("ids", 1)}))
        if config.resume is not None and (saved := saved_encoder(config.resume)) is not None:
            return saved
        if config.data.path is not None and not has_ratings(config.data.path):
            convert_files(config.data, console)
        columns = RequestData.open(config, config.data.path).columns
        names = Columns.find(config.data, columns.names)
        schema = table_schema(config, names, columns)
        console.print(f"the columns of ids; --item and --user name others:\n{schema.to_yaml()}")
        return TableEncoder(schema, {}, {}, {})

    @functools.cached_property
    def _names(self) -> Columns:
        # Without a look at the data, which a saved model does not need.
        data = self.config.data
        known = known_columns(data.path)
        ids = [*self.encoder.schema.categorical]
        return known or Columns.find(data, [*ids, data.time or TIME])

    @functools.cached_property
    def _schema(self) -> Schema:
        """Encodings of the columns of ids."""
        if known_columns(self.config.data.path) is not None:
            return table_schema(self.config, self._names, None)
        return self.encoder.schema

    @functools.cached_property
    def tasks(self) -> dict[str, LabelTask]:
        return {"action": ClickTask()}

    def _groups(self, path: pathlib.Path | None) -> SequenceGroups:
        options = self.config.ranker
        limits = RequestLimits(options.history, options.candidates)
        return self._open(path).groups(self.config.data, self._names, self._schema, limits)

    @functools.lru_cache(maxsize=2)  # noqa: B019 - as long-lived as a run
    def _open(self, path: pathlib.Path | None) -> RequestData:
        return RequestData.open(self.config, path)

    @property
    def hold_out(self) -> str:
        data = self.config.data
        if self.config.windows:
            return f"the last of {self.config.windows} windows of time"
        if data.eval_path is not None or data.hold_out_from is not None:
            return super().hold_out
        return (
            f"the newest {100 * float(data.hold_out or DEFAULT_FRACTION):.4g} % of the candidates"
        )

    def datasets(self, shard: Shard) -> tuple[RequestDataset, RequestDataset]:
        config = self.config
        groups = self._groups(config.data.path)
        shape = batch_shape(groups, config)

        def batches(groups: SequenceGroups, seed: int | None, epochs: int = 1) -> SequenceBatches:
            return SequenceBatches(groups, shape, seed=seed, epochs=epochs, shard=shard)

        if config.data.eval_path is not None:
            held_out = batches(self._groups(config.data.eval_path), None)
            training = (batches(groups, config.seed, config.data.epochs),)
            return RequestDataset(training), RequestDataset((held_out,))
        *windows, last = map(groups.within, split_windows(groups, config, self._names.time))
        return (
            RequestDataset(tuple(batches(x, config.seed, config.data.epochs) for x in windows)),
            RequestDataset((batches(last, None),)),
        )

    def check_held_out(self, held_out: Dataset) -> None:
        assert isinstance(held_out, RequestDataset)
        for window in held_out.windows:
            for group in range(len(window.groups.sizes)):
                window.groups.read(group)

    @functools.cached_property
    def _features(self) -> RankerFeatures:
        return RankerFeatures(**sequence_schema(self._names, self._schema).features())

    def tables(self) -> list[EmbeddingConfig]:  # type: ignore[override]
        pairs = {**self._features.items, **self._features.additional}
        options = self.config.model
        return [
            EmbeddingConfig(
                name,
                encoding.num_embeddings or 0,
                options.embedding_dim,
                feature_names=(name, pairs[name]) if name in pairs else (name,),
                initializer=nnx.initializers.normal(0.1),
                dtype=options.table_dtype,
            )
            for name, encoding in self._schema.categorical.items()
        ]

    def row_optimizer(self, num_steps: int) -> RowOptimizer:
        rate = optax.linear_schedule(self.config.optimizer.table_learning_rate, 0.0, num_steps)
        return optim.adam(rate)

    def make(self, num_steps: int, rngs: nnx.Rngs) -> HSTURanker:
        options = self.config.ranker
        length = options.history + options.candidates + len(self._features.context)
        return HSTURanker(
            EmbeddingCollection(self.tables(), optimizer=self.row_optimizer(num_steps), rngs=rngs),
            self._features,
            [TargetTask("action", bit=1)],
            dim=options.dim,
            num_layers=options.layers,
            num_heads=options.heads,
            max_length=length,
            action_bits=BITS,
            num_positions=length + 1,
            max_attention_length=options.window,
            token_hidden_dim=options.dim,
            item_hidden_dim=options.dim,
            task_hidden_sizes=(options.dim,),
            dropout_rate=options.dropout,
            dtype=self.dtype,
            rngs=rngs,
        )

    def loss(self, model: Any, batch: Any) -> tuple[Float[Array, ""], Mapping[str, Array]]:
        features = batch.features
        # One task, whose targets lie in rows of padding and of devices.
        outputs, labels, weights = (
            x.reshape(-1).astype(jnp.float32)
            for x in (model(features), model.labels(features), model.weights(features))
        )
        is_real = weights > 0
        outputs, labels = (jnp.where(is_real, x, 0) for x in (outputs, labels))
        task, total = self.tasks["action"], weights.sum()
        losses = (weights * task.losses(outputs, labels)).sum()
        terms = [(weights * term).sum() for term in task.terms(outputs, labels)]
        named = {"outputs": outputs[:, None], "labels": labels[:, None], "weights": weights}
        sums = jnp.stack([total, total, losses, *terms])
        return losses / jnp.maximum(total, 1), named | {"sums": sums}

    def evaluate(self, held_out: HeldOutBatches) -> dict[str, float]:
        """Return the values of `measures`, and ``best_auc`` of a generated log."""
        values = super().evaluate(held_out)
        log = self._open(self.config.data.path).log
        return values if log is None else values | {"best_auc": log.best_auc}

    def evaluations(self, rows: Dataset, held_out: Dataset) -> Mapping[int, Dataset]:
        """Return the next window for the last step of each window, with ``--windows``."""
        assert isinstance(rows, RequestDataset)
        if not self.config.windows:
            return {}
        following = [*(RequestDataset((window,)) for window in rows.windows[1:]), held_out]
        return dict(zip(rows.ends, following, strict=True))

    def refuse_export(self) -> str | None:
        return (
            f"model.name {self.name} reads requests, and exported models predict each row by "
            "itself; load it in a program, by jaxrec.train.load_model"
        )
