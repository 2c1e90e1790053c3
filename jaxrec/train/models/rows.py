"""Models that predict the labels of each row from its columns: the family of click models."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxrec.arguments import ConfigError
from jaxrec.data import Schema, Shard
from jaxrec.embed import EmbeddingBagCollection, EmbeddingBagConfig
from jaxrec.mesh.agree import of_all_processes
from jaxrec.metrics import auc
from jaxrec.optim import RowOptimizer, rowwise_adagrad
from jaxrec.train.config import TrainConfig
from jaxrec.train.datasets import (
    Dataset,
    LogDataset,
    ParquetDataset,
    check_held_out,
    split_datasets,
)
from jaxrec.train.explanation import as_results, column_importance, deciles, sample_size
from jaxrec.train.models.kind import LOSS, HeldOutBatches, Measure, ModelKind
from jaxrec.train.models.labels import LabelTask, label_loss, label_tasks, task_sums
from jaxrec.train.row_sample import SampledDataset
from jaxrec.train.run_size import MAX_BATCH_SIZE

# First values of rows, so small that a row that few samples have trained adds little to an output.
FIRST_VALUES = nnx.initializers.normal(0.01)

# Row-wise Adagrad divides a row's gradient by the root of the sum of its squares so far. Without a
# first value of this sum, the first sample of a rare id would move its row as far as a hundred
# samples move that of a frequent one, and the row would repeat that sample's label. The first value
# is in squares of the gradient of one sample's loss.
FIRST_SQUARES = 10.0

# End of the names of the tables of width 1 that a linear part has beside the others.
LINEAR = " (linear)"


class RowModel(ModelKind):
    """A model of tables and dense features that computes a number for each label of a row.

    Implementors give ``name`` and `make`. The model is called as ``model(dense, features)`` and
    returns ``[batch]`` outputs, or ``[batch, tasks]`` if it has several labels.

    Attributes:
        has_several_labels: Whether the model takes several labels.
        has_one_width: Whether its tables must have one width.
    """

    has_several_labels: ClassVar[bool] = False
    has_one_width: ClassVar[bool] = True

    @classmethod
    def check(cls, config: TrainConfig, schema: Schema) -> None:
        super().check(config, schema)
        count = len(schema.labels)
        if count == 0 or (count > 1 and not cls.has_several_labels):
            raise ConfigError(
                f"model.name {cls.name} predicts one label, and there are {count}"
                + ("; take --model mmoe or --model ple" if count else "; name it with --label")
            )
        dim = config.model.embedding_dim
        widths = {x.embedding_dim or dim for x in schema.categorical.values()}
        if cls.has_one_width and len(widths) > 1:
            raise ConfigError(
                f"model.name {cls.name} has tables of one width; leave embedding_dim out of the "
                "schema, or take --model.name dcn_v2"
            )

    @functools.cached_property
    def tasks(self) -> dict[str, LabelTask]:
        """Loss and metrics of each label, by the label's name."""
        return label_tasks(self.encoder)

    @property
    def measures(self) -> tuple[Measure, ...]:
        if len(self.tasks) == 1:
            return next(iter(self.tasks.values())).measures
        of_labels = [
            dataclasses.replace(each, name=f"{label}/{each.name}", title=f"{label} {each.title}")
            for label, task in self.tasks.items()
            for each in task.measures
        ]
        return (LOSS, *of_labels)

    def datasets(self, shard: Shard) -> tuple[Dataset, Dataset]:
        return split_datasets(self.config, shard, self.encoder)

    def check_held_out(self, held_out: Dataset) -> None:
        assert isinstance(held_out, LogDataset | ParquetDataset)
        check_held_out(held_out, self.config)

    def tables(self) -> list[EmbeddingBagConfig]:
        return self.tables_of([*self.encoder.schema.categorical])

    def tables_of(self, columns: Sequence[str]) -> list[EmbeddingBagConfig]:
        return [
            dataclasses.replace(table, initializer=FIRST_VALUES)
            for table in super().tables_of(columns)
        ]

    def row_optimizer(self, num_steps: int) -> RowOptimizer:
        # The loss of a step is a mean over its samples, and so is each gradient.
        samples = self.config.data.batch_size or MAX_BATCH_SIZE
        rate = super().row_optimizer(num_steps).learning_rate
        return rowwise_adagrad(rate, initial_accumulator_value=FIRST_SQUARES / samples**2)

    def model_options(self, rngs: nnx.Rngs) -> dict[str, Any]:
        """Return the arguments that all click models of `jaxrec.nn` take, but the tables."""
        types = {"dtype": self.dtype, "logit_dtype": "float32"}
        return {"num_dense": self.num_dense, **types, "rngs": rngs}

    def bottom_layer_sizes(self, embeddings: EmbeddingBagCollection) -> tuple[int, ...]:
        """Return the sizes of layers from the dense features to one vector of the tables' width."""
        return (*self.config.model.bottom_layer_sizes, embeddings.configs[0].embedding_dim)

    def linear_tables(self) -> list[EmbeddingBagConfig]:
        """Return tables of width 1 that read the same features as the others."""
        return [
            dataclasses.replace(table, name=f"{table.name}{LINEAR}", embedding_dim=1)
            for table in RowModel.tables(self)
        ]

    def loss(self, model: Any, batch: Any) -> tuple[Float[Array, ""], Mapping[str, Array]]:
        return label_loss([*self.tasks.values()], model, batch)

    def running_values(
        self, sums: Float[np.ndarray, " n"], samples: Mapping[str, np.ndarray] | None = None
    ) -> dict[str, float]:
        values: dict[str, float] = {}
        parts = task_sums([*self.tasks.values()], sums)
        is_real = None if samples is None else samples["weights"] > 0
        loss = 0.0
        for number, (label, task) in enumerate(self.tasks.items()):
            of_task = {}
            if samples is not None:
                outputs, labels = (samples[x][is_real, number] for x in ("outputs", "labels"))
                of_task = task.sample_values(outputs, labels, samples["weights"][is_real])
            of_task |= task.values(parts[number])
            loss += (parts[number][task.sums[0]] / parts[number]["weights"]).item()
            prefix = f"{label}/" if len(self.tasks) > 1 else ""
            values |= {f"{prefix}{name}": value for name, value in of_task.items()}
        return {LOSS.name: loss} | values if len(self.tasks) > 1 else values

    def evaluate(self, held_out: HeldOutBatches) -> dict[str, float]:
        """Return the values of `measures`, and ``best_auc``: the AUC of the true probabilities,
        where they are known."""
        values, samples = self._evaluated(held_out)
        if isinstance(held_out.dataset, LogDataset):
            probabilities = held_out.dataset.probabilities()
            if probabilities is not None:
                labels = samples["labels"][samples["weights"] > 0, 0]
                values["best_auc"] = auc(probabilities, labels)
        return values

    def _evaluated(
        self, held_out: HeldOutBatches, batches: Iterator[Any] | None = None
    ) -> tuple[dict[str, float], dict[str, np.ndarray]]:
        """Return the values of `measures` and the samples' outputs, of some batches or of all."""
        columns, sums = [], []
        for outputs in held_out.outputs(self.loss, batches):
            sums.append(outputs.pop("sums").astype(np.float64))
            columns.append(outputs)
        # From `[processes, batches, samples]` to `[batches, processes, samples]`, the order of the
        # rows and so of their true probabilities.
        samples = {
            name: _in_row_order(np.stack([each[name] for each in columns])) for name in columns[0]
        }
        return self.running_values(np.sum(sums, axis=0), samples), samples

    def explain(self, held_out: HeldOutBatches, rows: int) -> dict[str, Any]:
        dataset = held_out.dataset
        if not isinstance(dataset, SampledDataset):
            return {}
        sample = dataset.sample(sample_size(rows, len(self.encoder.schema.columns)))
        if not len(sample):
            return {}
        _, samples = self._evaluated(held_out, sample.batches(held_out.batch_size))
        is_real = samples["weights"] > 0
        own = {name: each[is_real] for name, each in samples.items()}
        groups = {}
        for number, (label, task) in enumerate(self.tasks.items()):
            outputs = jnp.asarray(own["outputs"][:, number])
            predictions = next(iter(task.predictions(outputs).values()))
            labels = task.in_units(own["labels"][:, number])
            groups[label] = deciles(np.asarray(predictions), labels, own["weights"])
        named = {x.name: x.best for x in self.measures if x.best is not None}
        tasks = [*self.tasks.values()]
        importance = column_importance(
            sample,
            sample.columns,
            lambda rows: self._evaluated(held_out, rows.batches(held_out.batch_size))[0],
            named,
            value=tasks[0].loss_measure if len(tasks) == 1 else LOSS.name,
            rows=int(is_real.sum()),
            seed=self.config.seed,
        )
        return as_results(groups, importance)

    def predictions(self, model: Any, dense: Any, features: Any) -> dict[str, Array]:
        outputs = model(dense, features)
        outputs = outputs.reshape(outputs.shape[0], -1)
        predictions: dict[str, Array] = {}
        for number, (label, task) in enumerate(self.tasks.items()):
            prefix = f"{label}_" if len(self.tasks) > 1 else ""
            of_task = task.predictions(outputs[:, number])
            predictions |= {f"{prefix}{name}": value for name, value in of_task.items()}
        return predictions


def check_categorical(names: Iterable[str], schema: Schema, options: str) -> None:
    """Raise a ConfigError if a column that some options name is not categorical."""
    for name in names:
        if name not in schema.categorical:
            raise ConfigError(
                f"column {name!r} is not categorical; {options} name categorical columns: "
                f"{', '.join(schema.categorical)}"
            )


def _in_row_order(values: np.ndarray) -> np.ndarray:
    """Return ``[rows, ...]`` values of all processes from ``[batches, samples, ...]`` of each."""
    gathered = np.moveaxis(of_all_processes(values), 0, 1)
    return gathered.reshape(-1, *gathered.shape[3:])
