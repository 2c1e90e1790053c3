"""What a training run is told."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Annotated, Any, Literal

import tyro

from jaxrec.arguments import ConfigError
from jaxrec.mesh.processes import check_processes


def _positive(config: Any, *names: str) -> None:
    for name in names:
        if not getattr(config, name) > 0:
            group = type(config).__name__.removesuffix("Config").lower()
            raise ConfigError(
                f"{_option(group, name)} must be above 0, got {getattr(config, name)}"
            )


def _option(group: str, name: str) -> str:
    return f"{group}.{name.replace('_', '-')}"


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where the click log comes from."""

    path: Annotated[pathlib.Path | None, tyro.conf.arg(aliases=["--data"])] = None
    """Parquet file, or directory of Parquet files, which are read in random order: with columns of
    your own, or as `jaxrec data criteo` wrote them. Or text in Criteo's format: label, 13 integers
    and 26 hexadecimal ids a line, separated by tabs, plain or gzip. A generated log if not
    given."""
    schema: Annotated[pathlib.Path | None, tyro.conf.arg(aliases=["--schema"])] = None
    """YAML file that says what becomes of the columns of a Parquet file, see docs/data.md. Goes by
    the types of the columns if not given, and is printed."""
    label: Annotated[str | None, tyro.conf.arg(aliases=["--label"])] = None
    """Column of labels, 0 or 1, where no schema says it; label, click or target if not given."""
    eval_path: pathlib.Path | None = None
    """The same with the held-out rows. The last rows of the log are held out if not given."""
    eval_fraction: float = 0.1
    """Share of the file's rows that is held out."""
    bad_rows: Literal["fail", "skip"] = "fail"
    """What to do with a line of text that is no row: stop, or leave it out and count it."""
    table_rows: int = 100_000
    """Rows of each table; a file's ids are taken modulo this. A generated log has its own, and so
    have Parquet files, unless their ids are raw."""
    batch_size: int = 2048
    """Samples in a step."""
    epochs: int = 1
    """How often the training rows are read."""
    generated_rows: int = 5_000_000
    """Training rows of the generated log."""
    generated_eval_rows: int = 200_000
    """Held-out rows of the generated log."""

    def __post_init__(self) -> None:
        _positive(
            self, "table_rows", "batch_size", "epochs", "generated_rows", "generated_eval_rows"
        )
        if not 0 < self.eval_fraction < 1:
            raise ConfigError(
                f"data.eval-fraction must be between 0 and 1, got {self.eval_fraction}"
            )
        if self.schema is not None and self.label is not None:
            raise ConfigError("data.schema names the column of labels; leave data.label out")
        if (self.schema is not None or self.label is not None) and self.path is None:
            raise ConfigError("data.schema and data.label are for the Parquet file of --data")
        if self.eval_path is not None and self.path is None:
            raise ConfigError("data.eval-path holds out a file, but no file to train on is given")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The model."""

    name: Literal["dlrm", "dcn_v2", "deepfm"] = "dlrm"
    """Which one: DLRM, DCN-v2 or DeepFM."""
    embedding_dim: int = 16
    """Columns of each table, where its schema says no other."""
    bottom_layer_sizes: tuple[int, ...] = (128, 64)
    """Hidden layers of DLRM's bottom MLP; a layer of embedding-dim follows."""
    top_layer_sizes: tuple[int, ...] = (128, 64)
    """Hidden layers of DLRM's top MLP, of DCN-v2's and of DeepFM's deep network; a layer of 1
    follows."""
    cross_layers: int = 3
    """Layers of DCN-v2's cross network."""
    table_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the tables."""

    def __post_init__(self) -> None:
        _positive(self, "embedding_dim", "cross_layers")
        for name in ("bottom_layer_sizes", "top_layer_sizes"):
            if min(getattr(self, name), default=1) < 1:
                raise ConfigError(
                    f"{_option('model', name)} must be 1 or more, got {getattr(self, name)}"
                )


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Adam for the MLPs and row-wise Adagrad for the tables, both rates falling linearly to 0."""

    learning_rate: float = 0.004
    """Adam's first rate."""
    table_learning_rate: float = 0.1
    """Row-wise Adagrad's first rate."""

    def __post_init__(self) -> None:
        _positive(self, "learning_rate", "table_learning_rate")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """What is saved while training goes on; at its end the model is saved in any case."""

    every: int = 1000
    """Steps from checkpoint to checkpoint."""
    keep_last: int = 1
    """How many of the newest stay."""
    keep_best: int = 0
    """How many of the best on the held-out rows stay besides; each is evaluated before it is
    saved."""
    best_by: Literal["auc", "normalized_entropy", "log_loss"] = "auc"
    """What is best: the largest AUC, or the smallest of the others."""

    def __post_init__(self) -> None:
        _positive(self, "every", "keep_last")
        if self.keep_best < 0:
            raise ConfigError(f"checkpoint.keep-best must be 0 or more, got {self.keep_best}")


@dataclasses.dataclass(frozen=True)
class JobConfig:
    """How processes find each other where no launcher that JAX knows started them: Slurm, Open MPI
    and Kubernetes need none of this."""

    coordinator: Annotated[str | None, tyro.conf.arg(aliases=["--coordinator"])] = None
    """Address of process 0, host:port."""
    num_processes: Annotated[int | None, tyro.conf.arg(aliases=["--num-processes"])] = None
    """How many there are; 1: this one alone, whatever the launcher."""
    process_id: Annotated[int | None, tyro.conf.arg(aliases=["--process-id"])] = None
    """Which this one is, from 0."""

    def __post_init__(self) -> None:
        try:
            check_processes(self.coordinator, self.num_processes, self.process_id)
        except ValueError as error:
            raise ConfigError(str(error)) from None


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Trains DLRM, DCN-v2 or DeepFM on Parquet files or click logs and reports AUC, NE and log loss
    on held-out rows."""

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    job: JobConfig = JobConfig()
    devices: int = 1
    """How many to train on, with tables placed by the planner; a CPU is made to look like many.
    With several processes, of each."""
    evaluate_every: int = 0
    """Steps from evaluation to evaluation on the held-out rows while training goes on; 0: only at
    its end, and where a checkpoint needs it."""
    record_every: int | None = None
    """Steps from line to line of metrics.jsonl, which the summary's curves are drawn from; if not
    given 100, in short runs a twentieth of the run. The last step has a line in any case."""
    output: pathlib.Path | None = None
    """Directory of the saved model; a new one below runs/ if not given."""
    seed: int = 0
    """Of the model's first values and of the generated log."""
    config: pathlib.Path | None = None
    """YAML or TOML file with any of these options; those on the command line come first."""
    resume: pathlib.Path | None = None
    """Directory of a saved run to go on with, under its own options."""
    eval_only: bool = False
    """Evaluate the model of --resume on the held-out rows, and train no more."""
    step: int | None = None
    """Of which checkpoint to evaluate the model; the newest if not given."""
    profile: bool = False
    """Write a trace of some steps to profile/ in the output, for TensorBoard or Perfetto."""

    def __post_init__(self) -> None:
        for name in ("record_every", "devices"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{name.replace('_', '-')} must be above 0, got {value}")
        if self.eval_only and self.resume is None:
            raise ConfigError("--eval-only evaluates a saved model; say which with --resume")
        if self.step is not None and not self.eval_only:
            raise ConfigError("--step says which checkpoint --eval-only evaluates")
        if self.evaluate_every < 0:
            raise ConfigError(f"evaluate-every must be 0 or more, got {self.evaluate_every}")
        if self.seed < 0:
            raise ConfigError(f"seed must be 0 or more, got {self.seed}")
