"""The configuration of a training run, from the command line and from files."""

from __future__ import annotations

import dataclasses
import pathlib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import tyro
import yaml

from jaxrec.arguments import ConfigError, parse, read_yaml
from jaxrec.data.encoder import SCHEMA_FILE
from jaxrec.files.atomic import write_atomically
from jaxrec.mesh.processes import LOST_AFTER_SECONDS, check_processes
from jaxrec.tier.stores import open_store
from jaxrec.tier.vocabulary.counts import MAX_SIGHTINGS

# Files of a run's directory: its options, and the `TableEncoder` of its Parquet files.
CONFIG_FILE = "config.yaml"
FEATURES_DIRECTORY = "features"

# Names of the kinds of model, the keys of `jaxrec.train.models.KINDS`.
ModelName = Literal[
    "dlrm",
    "dcn_v2",
    "deepfm",
    "wide_deep",
    "din",
    "mmoe",
    "ple",
    "two_tower",
    "sasrec",
    "bert4rec",
    "hstu_ranker",
]

# First line of the options file of a run.
_HEADER = "# Written by jaxrec train."


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
    """Data of the run."""

    path: Annotated[pathlib.Path | None, tyro.conf.arg(aliases=["--data"])] = None
    """Parquet file, directory of Parquet files (also in directories key=value) or a pattern in
    quotes, 'parts/*.parquet', read in random order, with any columns or written by
    `jaxrec data criteo`. Or text in Criteo's format, plain or gzip: a label, 13 integers and 26
    hexadecimal ids per line, separated by tabs. By default a generated log."""
    schema: Annotated[pathlib.Path | None, tyro.conf.arg(aliases=["--schema"])] = None
    """YAML file with the encodings of Parquet columns, see docs/data.md. By default they follow
    from the types of the columns and are printed."""
    label: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--label"])] = ()
    """Name of the column of labels, without a schema; by default label, click or target. Several
    names are for --model mmoe or ple."""
    label_kind: Annotated[
        Literal["auto", "binary", "number"], tyro.conf.arg(aliases=["--label-kind"])
    ] = "auto"
    """binary: labels are 0 or 1, and the model predicts the probability of 1. number: it predicts
    the number. auto: number for columns of floats with values other than 0 and 1, else binary."""
    weight: Annotated[str | None, tyro.conf.arg(aliases=["--weight"])] = None
    """Name of the column of sample weights, 0 or above, without a schema. They weigh the rows in
    the loss and in the metrics; by default all rows weigh 1."""
    exclude: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--exclude"])] = ()
    """Names of columns to leave out of the features, without a schema."""
    types: tuple[str, ...] = ()
    """Types of columns of CSV, TSV or JSON lines in place of guessed ones, such as zip=string:
    string, integer, float or boolean."""
    user: Annotated[str | None, tyro.conf.arg(aliases=["--user"])] = None
    """Name of the column of users, whose rows in the order of --time are a sequence, for --model
    sasrec, bert4rec and hstu_ranker."""
    item: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--item"])] = ()
    """Names of the columns of the item that a row is about, first its id: for --model din,
    two_tower, sasrec, bert4rec and hstu_ranker."""
    history: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--history"])] = ()
    """Names of columns of lists, the items that a user had before, oldest first. For --model din
    one for each column of --item, whose table they share; for sasrec and bert4rec one, in place of
    --user and --time."""
    time: Annotated[str | None, tyro.conf.arg(aliases=["--time"])] = None
    """Name of the column of times by which the rows of a user are ordered; by default they have the
    order of the files."""
    eval_path: pathlib.Path | None = None
    """File or directory of the held-out rows; by default the last rows of the data."""
    eval_fraction: float = 0.1
    """Share of the rows that is held out."""
    bad_rows: Literal["fail", "skip"] = "fail"
    """At a malformed line of text stop, or skip and count it."""
    table_rows: int = 100_000
    """Number of rows of each table, for text and for raw ids, which are taken modulo this number;
    with --vocabulary dynamic, the rows that ids are given."""
    batch_size: Annotated[int, tyro.conf.arg(aliases=["--batch-size"])] = 0
    """Number of samples of a step; 0: about the root of the number of training rows, a power of two
    from 16 to 2048."""
    epochs: Annotated[int, tyro.conf.arg(aliases=["--epochs"])] = 0
    """Number of epochs; 0: two for at most 100,000 rows with frequent ids, else one."""
    generated_rows: int = 5_000_000
    """Number of training rows of the generated log."""
    generated_eval_rows: int = 200_000
    """Number of held-out rows of the generated log."""

    def __post_init__(self) -> None:
        _positive(self, "table_rows", "generated_rows", "generated_eval_rows")
        for name in ("batch_size", "epochs"):
            if (value := getattr(self, name)) < 0:
                raise ConfigError(f"{_option('data', name)} must be 0 or more, got {value}")
        if not 0 < self.eval_fraction < 1:
            raise ConfigError(
                f"data.eval-fraction must be between 0 and 1, got {self.eval_fraction}"
            )
        if self.types and self.path is None:
            raise ConfigError("data.types is for the files of --data")
        given = [name for name in ("label", "weight", "exclude") if getattr(self, name)]
        given += ["label_kind"] if self.label_kind != "auto" else []
        if self.schema is not None and given:
            columns = {"exclude": "features", "label_kind": "kinds of the labels"}
            what = columns.get(given[0], f"column of {given[0]}s")
            raise ConfigError(
                f"data.schema names the {what}; leave {_option('data', given[0])} out"
            )
        if (self.schema is not None or given) and self.path is None:
            name = "schema" if self.schema is not None else given[0]
            raise ConfigError(f"{_option('data', name)} is for the Parquet files of --data")
        if self.eval_path is not None and self.path is None:
            raise ConfigError("data.eval-path holds out a file, but no file to train on is given")


@dataclasses.dataclass(frozen=True)
class VocabularyConfig:
    """Assigns rows to ids. All options but --vocabulary need --vocabulary dynamic."""

    kind: Annotated[Literal["fixed", "dynamic"], tyro.conf.arg(aliases=["--vocabulary"])] = "fixed"
    """fixed: a vocabulary is learned from the columns of Parquet files before training, and raw ids
    are taken modulo data.table-rows. dynamic: ids are 64-bit integers or strings that get one of
    data.table-rows rows when they come, and lose it when others need it."""
    eviction: Literal["lru", "lfu", "lfu_lru", "distance_lfu", "ttl"] = "lru"
    """Which ids lose their rows: those used least recently, least frequently, of the lowest
    frequency class, of the smallest frequency by age, or unused for ttl-batches."""
    ttl_batches: int | None = None
    """Number of steps after which eviction ttl evicts an unused id."""
    admit_after: int = 1
    """Number of appearances from which an id gets a row, at most 255."""
    unknown: Literal["zeros", "default"] = "zeros"
    """Values that ids without a row read: zeros, or one row that is trained."""
    store: str | None = None
    """Store of evicted rows: memory://, or a URL such as file:///data/{table}, rocksdb:///data/{table}
    or redis://host/0?prefix={table}. By default evicted rows are lost."""

    @property
    def is_dynamic(self) -> bool:
        """Whether tables have open vocabularies."""
        return self.kind == "dynamic"

    def __post_init__(self) -> None:
        if not self.is_dynamic:
            for field in dataclasses.fields(self):
                if getattr(self, field.name) != field.default:
                    raise ConfigError(
                        f"{_option('vocabulary', field.name)} is for --vocabulary dynamic; give "
                        "this too, or leave it out"
                    )
        if (self.ttl_batches is None) == (self.eviction == "ttl"):
            raise ConfigError(
                "vocabulary.eviction ttl needs vocabulary.ttl-batches, and only ttl takes them"
            )
        if self.ttl_batches is not None:
            _positive(self, "ttl_batches")
        if not 1 <= self.admit_after <= MAX_SIGHTINGS:
            raise ConfigError(
                f"vocabulary.admit-after must be from 1 to {MAX_SIGHTINGS}, got {self.admit_after}"
            )
        if self.store is not None:
            try:
                open_store(self.store)
            except (ValueError, ImportError) as error:
                raise ConfigError(f"vocabulary.store does not name a row store: {error}") from None


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The model."""

    name: Annotated[ModelName, tyro.conf.arg(aliases=["--model"])] = "dcn_v2"
    """Kind of model, see docs/choosing_a_model.md."""
    embedding_dim: int = 16
    """Number of columns of each table, unless the schema has another."""
    bottom_layer_sizes: tuple[int, ...] = (128, 64)
    """Sizes of the hidden layers of DLRM's bottom MLP; a layer of embedding-dim follows."""
    top_layer_sizes: tuple[int, ...] = (128, 64)
    """Sizes of the hidden layers of DLRM's top MLP, of the deep network of DCN-v2, DeepFM, wide &
    deep and DIN, where a layer of size 1 follows; of the experts of MMoE and PLE; of two towers,
    where a layer of twice embedding-dim follows."""
    cross_layers: int = 3
    """Number of layers of DCN-v2's cross network."""
    max_length: int = 100
    """Largest number of items of a sequence that SASRec and BERT4Rec read, the last ones."""
    table_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Data type of the tables."""
    dense_dtype: Annotated[
        Literal["float32", "bfloat16"], tyro.conf.arg(aliases=["--dense-dtype"])
    ] = "float32"
    """Data type that dense layers compute in. Parameters, optimizer state, the last layer, the
    logits and the loss are float32."""

    def __post_init__(self) -> None:
        _positive(self, "embedding_dim", "cross_layers", "max_length")
        for name in ("bottom_layer_sizes", "top_layer_sizes"):
            if min(getattr(self, name), default=1) < 1:
                raise ConfigError(
                    f"{_option('model', name)} must be 1 or more, got {getattr(self, name)}"
                )


@dataclasses.dataclass(frozen=True)
class RankerConfig:
    """Requests and layers of --model hstu_ranker."""

    history: int = 200
    """Largest number of events of a request, the newest ones."""
    candidates: int = 8
    """Largest number of candidates of a request; a longer list becomes several requests."""
    dim: int = 32
    """Number of columns of a token."""
    layers: int = 2
    """Number of layers."""
    heads: int = 2
    """Number of heads of a layer."""
    window: int = 0
    """Number of events before it that a token sees in a layer; 0: all."""
    dropout: float = 0.0
    """Share of a layer's result that is dropped in training."""

    def __post_init__(self) -> None:
        _positive(self, "history", "candidates", "dim", "layers", "heads")
        if self.dim % self.heads:
            raise ConfigError(
                f"ranker.dim is {self.dim}, which does not divide by {self.heads} heads"
            )
        if self.window < 0 or not 0 <= self.dropout < 1:
            raise ConfigError(
                "ranker.window must be 0 or more and ranker.dropout from 0 to below 1, got "
                f"{self.window} and {self.dropout}"
            )


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Adam for dense layers, row-wise Adagrad for tables; both rates decay linearly to 0."""

    learning_rate: Annotated[float, tyro.conf.arg(aliases=["--lr"])] = 0.002
    """Initial learning rate of Adam."""
    table_learning_rate: float = 0.5
    """Initial learning rate of row-wise Adagrad."""

    def __post_init__(self) -> None:
        _positive(self, "learning_rate", "table_learning_rate")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints during training; the end of training is always saved."""

    every: int = 1000
    """Number of steps between two checkpoints."""
    keep_last: int = 1
    """Number of newest checkpoints to keep."""
    keep_best: int = 0
    """Number of best checkpoints to keep besides; each checkpoint is evaluated on the held-out
    rows."""
    best_by: str | None = None
    """Value on the held-out rows by which a checkpoint is the best, such as auc, normalized_entropy
    or log_loss; by default the first that the model reports."""

    def __post_init__(self) -> None:
        _positive(self, "every", "keep_last")
        if self.keep_best < 0:
            raise ConfigError(f"checkpoint.keep-best must be 0 or more, got {self.keep_best}")


@dataclasses.dataclass(frozen=True)
class JobConfig:
    """Processes of the job, if no launcher that JAX knows started them: Slurm, Open MPI and
    Kubernetes need none of these options."""

    coordinator: Annotated[str | None, tyro.conf.arg(aliases=["--coordinator"])] = None
    """Address of process 0, host:port."""
    num_processes: Annotated[int | None, tyro.conf.arg(aliases=["--num-processes"])] = None
    """Number of processes; 1: this process alone, whatever the launcher."""
    process_id: Annotated[int | None, tyro.conf.arg(aliases=["--process-id"])] = None
    """Number of this process, from 0."""
    lost_after: Annotated[int, tyro.conf.arg(aliases=["--lost-after"])] = LOST_AFTER_SECONDS
    """Seconds without a sign of life after which a process counts as lost, and the others end."""
    uneven: Annotated[Literal["stop", "empty"], tyro.conf.arg(aliases=["--uneven"])] = "stop"
    """If a process has fewer batches than others, stop after the last that all have, or let it go
    on with empty batches until all have ended."""

    def __post_init__(self) -> None:
        _positive(self, "lost_after")
        try:
            check_processes(self.coordinator, self.num_processes, self.process_id)
        except ValueError as error:
            raise ConfigError(str(error)) from None


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Train a model on Parquet files or click logs, and report its metrics on held-out rows.

    Example: jaxrec train --data clicks.parquet --label click --model dcn_v2 --epochs 3 --patience 3
    --output run
    """

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    ranker: RankerConfig = RankerConfig()
    vocabulary: VocabularyConfig = VocabularyConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    job: JobConfig = JobConfig()
    devices: int = 1
    """Number of devices of each process; the planner shards the tables over all of them. A CPU
    simulates several devices."""
    dense: Literal["replicated", "fsdp"] = "replicated"
    """Where dense layers and their optimizer state lie, if there are several devices: replicated on
    each, or fsdp: arrays of 65,536 elements or more are cut over all devices."""
    evaluate_every: int = 0
    """Number of steps between two evaluations on the held-out rows; 0: only at the end, and before
    checkpoints if checkpoint.keep-best is given; with --patience a tenth of the run, or an epoch if
    there are several."""
    patience: int = 0
    """Number of evaluations in a row without a better value (checkpoint.best-by) after which
    training stops; the model of the best one is kept. 0: training goes on to the end."""
    windows: int = 0
    """Number of windows of time, of equal length, for --model hstu_ranker: train on one after the
    other, and evaluate on the next before it is trained on. 0: the last candidates are held out."""
    record_every: int | None = None
    """Number of steps between two lines of metrics.jsonl, besides the last step; by default 100, or
    a twentieth of a shorter run."""
    output: pathlib.Path | None = None
    """Directory of the run; by default a new one in runs/."""
    seed: int = 0
    """Seed of the initial model, of the order of Parquet rows and of the generated log."""
    config: pathlib.Path | None = None
    """YAML or TOML file with any of these options; the command line takes precedence."""
    resume: pathlib.Path | None = None
    """Directory of a saved run to continue, with its own options as defaults."""
    eval_only: bool = False
    """Evaluate the model of --resume on the held-out rows, without training."""
    step: int | None = None
    """Step of the checkpoint that --eval-only evaluates; by default the newest."""
    profile: bool = False
    """Write a trace of some steps to profile/ in the run, for TensorBoard or Perfetto."""

    def __post_init__(self) -> None:
        for name in ("record_every", "devices"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{name.replace('_', '-')} must be above 0, got {value}")
        if self.eval_only and self.resume is None:
            raise ConfigError("--eval-only evaluates a saved model; say which with --resume")
        if self.step is not None and not self.eval_only:
            raise ConfigError("--step says which checkpoint --eval-only evaluates")
        for name in ("evaluate_every", "patience"):
            if (value := getattr(self, name)) < 0:
                raise ConfigError(f"{name.replace('_', '-')} must be 0 or more, got {value}")
        if self.windows and (self.model.name != "hstu_ranker" or self.windows < 2):
            raise ConfigError("windows are 2 or more, and for --model hstu_ranker")
        if self.windows and (self.data.epochs > 1 or self.data.eval_path is not None):
            raise ConfigError(
                "each window is evaluated before it is trained on; leave --epochs and "
                "--data.eval-path out, or --windows"
            )
        if self.windows and (self.patience or self.checkpoint.keep_best):
            raise ConfigError(
                "the windows of a run have different rows, so that their values do not say which "
                "step is the best; leave --patience and --checkpoint.keep-best out, or --windows"
            )
        if self.seed < 0:
            raise ConfigError(f"seed must be 0 or more, got {self.seed}")


_DEFAULT = TrainConfig()


def _read_options(path: pathlib.Path) -> list[str]:
    """Return the options of a YAML or TOML file as command-line arguments.

    The file has a key for each option and a mapping for each group; dashes and underscores are
    equivalent.
    """
    try:
        text = path.read_text()
        options = tomllib.loads(text) if path.suffix == ".toml" else read_yaml(text)
    except (tomllib.TOMLDecodeError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(" ".join(str(error).split())) from None
    if options is None:
        return []
    if not isinstance(options, Mapping):
        raise ConfigError(f"expected options and their values, got {options!r}")
    return [token for option in _tokens(TrainConfig, options, "") for token in option]


def _tokens(config: type, options: Mapping[str, Any], prefix: str) -> Iterator[list[str]]:
    """Yield the command-line arguments of each option; ``prefix`` is the group's name and a dot."""
    # A group's default is an instance of its class; the class of the group reads the options in it.
    known = {
        field.name: field.default for field in dataclasses.fields(config) if field.name != "config"
    }
    for key, value in options.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ConfigError(
                f"unknown option {prefix}{key}; "
                f"{'options of ' + prefix[:-1] if prefix else 'options'} are "
                f"{', '.join(name.replace('_', '-') for name in known)}"
            )
        option = f"{prefix}{name.replace('_', '-')}"
        group = known[name]
        # A null is an option that is not given. Earlier versions wrote it for the label, of which
        # there may be several by now.
        if value is None and group in (None, ()):
            continue
        if not dataclasses.is_dataclass(group):
            values = value if isinstance(value, list) else [value]
            yield [f"--{option}", *map(str, values)]
        elif isinstance(value, Mapping):
            yield from _tokens(type(group), value, f"{option}.")
        else:
            raise ConfigError(f"{option} is a group of options, got {value!r}")


def load_config(path: pathlib.Path, default: TrainConfig = _DEFAULT) -> TrainConfig:
    """Read the configuration of a YAML or TOML file; ``default`` has the other options."""
    try:
        config = parse_options(_read_options(path), default)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    # Only a copy that a run has written names its schema relative to the file; a user's own file
    # names it relative to the working directory, as on the command line.
    if config.data.schema is not None and is_written(path):
        data = dataclasses.replace(config.data, schema=path.parent / config.data.schema)
        config = dataclasses.replace(config, data=data)
    return config


def parse_options(options: Sequence[str], default: TrainConfig = _DEFAULT) -> TrainConfig:
    """Parse command-line arguments; ``default`` has the values of options that are not given."""
    return parse("train", options, default)


def write_options(config: TrainConfig, path: pathlib.Path) -> None:
    """Write a configuration to a YAML file for `load_config`, complete or not at all."""
    options = _plain(config)
    for name in ("config", "resume", "output", "eval_only", "step", "profile", "job"):
        del options[name]
    if config.data.schema is not None:
        # The copy in the run's encoder, so that the run can be repeated and moved.
        options["data"]["schema"] = str(pathlib.PurePath(FEATURES_DIRECTORY, SCHEMA_FILE))
    with write_atomically(path) as unfinished:
        unfinished.write_text(f"{_HEADER}\n{yaml.safe_dump(options, sort_keys=False)}")


def is_written(path: pathlib.Path) -> bool:
    """Return whether `write_options` wrote a file."""
    return path.exists() and path.read_bytes().startswith(f"{_HEADER}\n".encode())


def _plain(config: Any) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            return _plain(value)
        if isinstance(value, tuple):
            return list(value)
        return str(value.absolute()) if isinstance(value, pathlib.Path) else value

    return {field.name: plain(getattr(config, field.name)) for field in dataclasses.fields(config)}
