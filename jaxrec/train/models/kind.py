"""The interface of a kind of model that ``jaxrec train --model NAME`` trains.

To add a kind, write a module here with a subclass of `ModelKind`, or of a family such as
`jaxrec.train.models.rows.RowModel`, and list it in `jaxrec.train.models` and in
`jaxrec.train.option_groups.ModelName`. The command, checkpoints and `load_model` see only this
interface.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float
from rich.console import Console

from jaxrec import optim
from jaxrec.arguments import ConfigError
from jaxrec.data import Schema, Shard, TableEncoder
from jaxrec.embed import EmbeddingBagCollection, EmbeddingBagConfig
from jaxrec.embed.config import TableConfig
from jaxrec.mesh.agree import on_host
from jaxrec.optim import RowOptimizer
from jaxrec.train.config import TrainConfig
from jaxrec.train.datasets import Dataset
from jaxrec.train.evaluation import Evaluation, Loss
from jaxrec.train.features import run_encoder
from jaxrec.train.hold_out import split_of
from jaxrec.train.placed_batches import placed_batches, put_batch
from jaxrec.train.run_size import epochs_of_clicks


@dataclasses.dataclass(frozen=True)
class Measure:
    """A value that an evaluation reports.

    Attributes:
        name: Name in ``results.json`` and ``metrics.jsonl``.
        title: Name on the console and in the picture.
        best: Whether the largest or the smallest value is the best; None: neither is.
        unit: Text after the value on the console.
    """

    name: str
    title: str
    best: Literal["max", "min"] | None = None
    unit: str = ""


# Mean loss of a batch, shown while a model trains that measures nothing else of its steps.
LOSS = Measure("loss", "loss", "min")


class EvaluationStopped(Exception):
    """An evaluation was stopped before its end."""


@dataclasses.dataclass(eq=False)
class HeldOutBatches:
    """A model and the held-out rows on which it is evaluated.

    ``place`` puts a batch on the devices; an evaluation ends after a batch if ``stop()`` is True.
    """

    model: nnx.Module
    dataset: Dataset
    batch_size: int
    place: Callable[[Any], Any] = put_batch
    stop: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self._evaluation = Evaluation()

    def outputs(
        self, loss: Loss, batches: Iterator[Any] | None = None
    ) -> Iterator[dict[str, np.ndarray]]:
        """Yield the outputs of a loss for each batch, as host arrays; the model is in eval mode.

        Each loss is compiled once in all evaluations. ``batches`` are host batches; None: those of
        the held-out rows. Raises `EvaluationStopped` if ``stop()`` is True.
        """
        host_batches = self.dataset.batches(self.batch_size) if batches is None else batches
        with placed_batches(
            self.model, host_batches, place=self.place, is_training=False
        ) as placed:
            for outputs in self._evaluation.outputs(self.model, loss, placed):
                yield {name: on_host(value) for name, value in outputs.items()}
                if self.stop():
                    raise EvaluationStopped


@dataclasses.dataclass(frozen=True, eq=False)
class ModelKind(abc.ABC):
    """A kind of model, with the options and the columns of one run.

    Implementors give `name`, `measures`, `tables`, `make`, `datasets`, `loss`, `running_values` and
    `evaluate`, and may override the other methods::

        check            raise ConfigError if the model cannot take the columns; before all is read
        learn            learn from the training rows what the model must know of its columns
        datasets         the training rows and the held-out rows
        epochs           the number of epochs, if --epochs gives none
        tables, make     the tables, for the planner, and the model
        loss             the loss of a batch, and the outputs for metrics
        running_values   metrics of training from the outputs of the last steps
        evaluate         metrics of the held-out rows
        evaluations      other rows to evaluate on, by step
        explain          calibration and importance of the columns, after training
        predictions      outputs of the exported model

    The methods are called in this order. One object serves a run: `make` is called on the devices
    of the run, `loss` is traced.

    Attributes:
        config: Options of the run.
        encoder: The columns as they were learned; those of Criteo's format for text and generated
            logs.
        name: Name of the kind, for ``--model``.
        needs_label: Whether a run must have a label.
        reads_domain: Whether the model reads the columns of ``--model.domain``.
        defaults: Default values of options that differ from `TrainConfig`, as in
            ``{"data.batch_size": 128}``.
    """

    config: TrainConfig
    encoder: TableEncoder

    name: ClassVar[str]
    needs_label: ClassVar[bool] = True
    reads_domain: ClassVar[bool] = False
    defaults: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def check(cls, config: TrainConfig, schema: Schema) -> None:
        """Raise a ConfigError with advice if the model cannot take the columns of a schema."""
        if config.model.domain and not cls.reads_domain:
            raise ConfigError(
                f"model.name {cls.name} reads no --model.domain; leave it out, or take --model "
                "pepnet"
            )

    @classmethod
    def learn(cls, config: TrainConfig, console: Console) -> TableEncoder:
        """Learn the columns of a new run's Parquet files, or load those of a resumed run."""
        return run_encoder(
            config,
            console,
            check=lambda schema: cls.check(config, schema),
            needs_label=cls.needs_label,
        )

    def epochs(self, rows: int) -> int:
        """Return the number of epochs over ``rows`` training rows, if the options give none."""
        return epochs_of_clicks(self.encoder, rows)

    @property
    @abc.abstractmethod
    def measures(self) -> tuple[Measure, ...]:
        """Measures that `evaluate` reports, in the order of the report.

        The first one says which checkpoint is the best, unless ``--checkpoint.best-by`` does. The
        first two are shown during training.
        """

    @property
    def hold_out(self) -> str:
        """Description of the rows that are held out."""
        data = self.config.data
        if data.eval_path is not None:
            return f"the rows of {data.eval_path}"
        if data.path is None and data.hold_out is None:
            return f"the last {data.generated_eval_rows:,} rows"
        return str(split_of(data, self.config.seed))

    @abc.abstractmethod
    def datasets(self, shard: Shard) -> tuple[Dataset, Dataset]:
        """Return the training rows and the held-out rows."""

    def check_held_out(  # noqa: B027 - most datasets are read by `learn`
        self, held_out: Dataset
    ) -> None:
        """Read held-out rows that `learn` has not read, to find bad values before training."""

    @abc.abstractmethod
    def tables(self) -> Sequence[TableConfig]:
        """Return the configurations of the model's tables."""

    @abc.abstractmethod
    def make(self, num_steps: int, rngs: nnx.Rngs) -> nnx.Module:
        """Make the model, with first values, for a run of ``num_steps`` steps."""

    @abc.abstractmethod
    def loss(self, model: Any, batch: Any) -> tuple[Float[Array, ""], Mapping[str, Array]]:
        """Return the mean loss of a batch, and outputs for `running_values` and `evaluate`.

        The output ``sums`` is ``[n]`` float32; its first element is the number of samples. Other
        outputs are of samples, ``[batch, ...]``.
        """

    @abc.abstractmethod
    def running_values(
        self, sums: Float[np.ndarray, " n"], samples: Mapping[str, np.ndarray] | None = None
    ) -> dict[str, float]:
        """Return metrics of training by name.

        Args:
            sums: ``[n]`` float64, the output ``sums`` of `loss`, added over the last steps.
            samples: The other outputs of fewer last steps, concatenated. None: only values that
                follow from ``sums``.
        """

    @abc.abstractmethod
    def evaluate(self, held_out: HeldOutBatches) -> dict[str, float]:
        """Evaluate the model on held-out rows; return the values of `measures` by name."""

    def evaluations(self, rows: Dataset, held_out: Dataset) -> Mapping[int, Dataset]:
        """Return the rows to evaluate on after some steps, by step; they are trained on later.

        ``rows`` and ``held_out`` are those of `datasets`. The values are part of the results.
        """
        return {}

    def explain(self, held_out: HeldOutBatches, rows: int) -> dict[str, Any]:
        """Return entries of ``results.json`` that explain the model, from ``rows`` held-out rows.

        These are ``calibration_deciles`` and ``importance``, as `jaxrec.train.explanation` makes
        them, as far as the kind has them. Raises `EvaluationStopped` as `HeldOutBatches.outputs`.
        """
        return {}

    def predictions(self, model: Any, dense: Any, features: Any) -> dict[str, Array]:
        """Return the outputs of the exported model, ``[batch, ...]`` by name.

        A kind that cannot be exported says so by `refuse_export`.
        """
        raise NotImplementedError

    def refuse_export(self) -> str | None:
        """Return why `jaxrec export` and `jaxrec quantize` do not take the model; None: they do."""
        return None

    # Parts of which `tables` and `make` consist.

    def tables_of(self, columns: Sequence[str]) -> list[EmbeddingBagConfig]:
        """Return the tables that some categorical columns read; columns may share a table."""
        options = self.encoder.schema.categorical
        owners: dict[str, list[str]] = {}
        for name in columns:
            owners.setdefault(options[name].table or name, []).append(name)
        return [
            EmbeddingBagConfig(
                owner,
                self.encoder.table_rows[owner],
                options[owner].embedding_dim or self.config.model.embedding_dim,
                feature_names=tuple(features),
                pooling=options[owner].pooling,
                dtype=self.config.model.table_dtype,
            )
            for owner, features in owners.items()
        ]

    def collection(
        self, tables: Sequence[EmbeddingBagConfig], num_steps: int, rngs: nnx.Rngs
    ) -> EmbeddingBagCollection:
        """Make the collection of some tables, with the run's row optimizer."""
        return EmbeddingBagCollection(tables, optimizer=self.row_optimizer(num_steps), rngs=rngs)

    def row_optimizer(self, num_steps: int) -> RowOptimizer:
        """Return the optimizer of the tables' rows."""
        rate = optax.linear_schedule(self.config.optimizer.table_learning_rate, 0.0, num_steps)
        return optim.rowwise_adagrad(rate)

    @property
    def num_dense(self) -> int:
        """Number of dense features."""
        return self.encoder.schema.num_dense

    @property
    def dtype(self) -> str | None:
        """Type that dense layers compute in; None: the parameters'."""
        dtype = self.config.model.dense_dtype
        return None if dtype == "float32" else dtype
