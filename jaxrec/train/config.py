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
from jaxrec.data.split import DEFAULT_FRACTION
from jaxrec.files.atomic import write_atomically
from jaxrec.train.data_path import DataPath
from jaxrec.train.hold_out import split_of
from jaxrec.train.loggers import LOGGERS
from jaxrec.train.option_groups import (
    JobConfig,
    RankerConfig,
    VocabularyConfig,
    check_positive,
    option_name,
)
from jaxrec.train.row_memory import parse_memory
from jaxrec.train.stream_options import StreamConfig, topic_address

# Files of a run's directory: its options, and the `TableEncoder` of its Parquet files.
CONFIG_FILE = "config.yaml"
FEATURES_DIRECTORY = "features"

# Names of the kinds of model, the keys of `jaxrec.train.models.KINDS`.
ModelName = Literal[
    "dlrm",
    "dcn_v2",
    "deepfm",
    "wide_deep",
    "wukong",
    "rankmixer",
    "masknet",
    "finalmlp",
    "gdcn",
    "din",
    "transact",
    "longer",
    "onetrans",
    "mmoe",
    "ple",
    "pepnet",
    "two_tower",
    "sasrec",
    "bert4rec",
    "hstu_ranker",
]

# Earlier names of options, which saved runs have.
_RENAMED = {"dense": "dense_layers"}

# Name of the option `hold_out` in earlier versions.
_FORMER_HOLD_OUT = "eval_fraction"

# First line of the options file of a run.
_HEADER = "# Written by jaxrec train."


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Data of the run."""

    path: Annotated[DataPath | None, tyro.conf.arg(aliases=["--data"])] = None
    """File, directory of files (also in directories key=value), a pattern in quotes,
    'parts/*.parquet', or an address of one of these, such as s3://bucket/parts. Files are Parquet,
    CSV, TSV, JSON lines or Arrow, known by their names, with any columns or written by
    `jaxrec data criteo`, and are read in random order, see docs/your_own_data.md. Or text in
    Criteo's format, plain or gzip: a label, 13 integers and 26 hexadecimal ids per line, separated
    by tabs. By default a generated log."""
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
    """Columns to leave out of the features, without a schema: names or patterns in quotes, such as
    user_id 'debug_*' ts.month."""
    dense: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--dense"])] = ()
    """Columns of numbers to take as dense features, without a schema: names or patterns."""
    categorical: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--categorical"])] = ()
    """Columns to take as categories, without a schema: names or patterns. Numbers must be whole."""
    types: tuple[str, ...] = ()
    """Types of columns of CSV, TSV or JSON lines in place of guessed ones, such as zip=string:
    string, integer, float or boolean."""
    user: Annotated[str | None, tyro.conf.arg(aliases=["--user"])] = None
    """Name of the column of users, whose rows in the order of --time are a sequence, for --model
    sasrec, bert4rec and hstu_ranker; a column that gates of finalmlp and pepnet read; two_tower
    does not rank the items again that the user has in training rows of label 1, unless --exclude
    leaves the column out."""
    item: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--item"])] = ()
    """Names of the columns of the item that a row is about, first its id: for --model din,
    transact, longer, onetrans, two_tower, sasrec, bert4rec and hstu_ranker; columns that gates of
    finalmlp and pepnet read."""
    history: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--history"])] = ()
    """Names of columns of lists, the items that a user had before, oldest first. For --model din,
    transact, longer and onetrans one for each column of --item, whose table they share; for sasrec
    and bert4rec one, in place of --user and --time."""
    time: Annotated[str | None, tyro.conf.arg(aliases=["--time"])] = None
    """Name of the column of times by which the rows of a user are ordered; by default they have the
    order of the files."""
    hold_out: Annotated[
        str | None, tyro.conf.arg(aliases=["--hold-out", "--data.eval-fraction"])
    ] = None
    """Rows to hold out: a fraction such as 0.2 for the last ones; random, or random:0.2; or last,
    the last row of each --user by --time. By default the last tenth; of a generated log
    data.generated-eval-rows, of sequences the last item of each."""
    hold_out_by: Annotated[str | None, tyro.conf.arg(aliases=["--hold-out-by"])] = None
    """Column, such as user_id, of which a share of the values is held out, each with all of its
    rows; --hold-out has the share."""
    hold_out_from: Annotated[str | None, tyro.conf.arg(aliases=["--hold-out-from"])] = None
    """Column and value, such as ts=2024-03-01, from which on rows are held out: a number, a date or
    a time."""
    eval_path: Annotated[DataPath | None, tyro.conf.arg(aliases=["--hold-out-data"])] = None
    """File, directory, pattern or address of the held-out rows; all rows of --data are then trained
    on."""
    bad_rows: Literal["fail", "skip"] = "fail"
    """At a malformed line of text stop, or skip and count it."""
    memory: Annotated[str | None, tyro.conf.arg(aliases=["--memory"])] = None
    """Memory for the rows of files of columns while they are converted, read and shuffled, such as
    500MB or 2GB, besides the program, its model and its vocabularies, and what two_tower ranks: a
    row of each item, and a vector of each held-out row. By default up to 2^20 rows are shuffled
    together."""
    table_rows: int = 100_000
    """Number of rows of each table, for text and for raw ids, which are taken modulo this number;
    with --vocabulary dynamic, the rows that ids are given."""
    batch_size: Annotated[int, tyro.conf.arg(aliases=["--batch-size"])] = 0
    """Number of samples of a step; 0: about the root of the number of training rows, a power of two
    from 16 to 2048."""
    epochs: Annotated[int, tyro.conf.arg(aliases=["--epochs"])] = 0
    """Number of epochs; 0: two for at most 100,000 rows with frequent ids, else one; of two_tower
    up to 20, for two million samples."""
    generated_rows: int = 5_000_000
    """Number of training rows of the generated log."""
    generated_eval_rows: int = 200_000
    """Number of held-out rows of the generated log."""

    def __post_init__(self) -> None:
        check_positive(self, "table_rows", "generated_rows", "generated_eval_rows")
        for name in ("batch_size", "epochs"):
            if (value := getattr(self, name)) < 0:
                raise ConfigError(f"{option_name('data', name)} must be 0 or more, got {value}")
        if self.memory is not None:
            parse_memory(self.memory)
            if self.path is None:
                raise ConfigError("--memory is for the files of --data")
        if self.types and self.path is None:
            raise ConfigError("data.types is for the files of --data")
        # Earlier versions named the option of dense layers so.
        if layers := {"replicated", "fsdp"} & {*self.dense}:
            raise ConfigError(
                f"--dense names columns; where dense layers lie is --dense-layers {layers.pop()}"
            )
        names = ("label", "weight", "exclude", "dense", "categorical")
        given = [name for name in names if getattr(self, name)]
        given += ["label_kind"] if self.label_kind != "auto" else []
        if self.schema is not None and given:
            columns = dict.fromkeys(("exclude", "dense", "categorical"), "features")
            columns["label_kind"] = "kinds of the labels"
            what = columns.get(given[0], f"column of {given[0]}s")
            raise ConfigError(
                f"data.schema names the {what}; leave {option_name('data', given[0])} out"
            )
        if (self.schema is not None or given) and self.path is None:
            name = "schema" if self.schema is not None else given[0]
            raise ConfigError(f"{option_name('data', name)} is for the Parquet files of --data")
        if self.eval_path is not None and self.path is None:
            raise ConfigError("data.eval-path holds out a file, but no file to train on is given")
        split_of(self)

    @property
    def users(self) -> tuple[str, ...]:
        """Name of the column of users, if one is given."""
        return () if self.user is None else (self.user,)

    @property
    def hold_out_options(self) -> list[str]:
        """Names of the options that say which rows of ``path`` are held out, if they are given."""
        names = ("hold_out", "hold_out_by", "hold_out_from")
        return [name for name in names if getattr(self, name) is not None]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The model."""

    name: Annotated[ModelName, tyro.conf.arg(aliases=["--model"])] = "dcn_v2"
    """Kind of model, see docs/choosing_a_model.md."""
    embedding_dim: int = 16
    """Number of columns of each table, unless the schema has another."""
    bottom_layer_sizes: tuple[int, ...] = (128, 64)
    """Sizes of the hidden layers of the MLP of the dense features in DLRM, Wukong and MaskNet; a
    layer of embedding-dim follows."""
    top_layer_sizes: tuple[int, ...] = (128, 64)
    """Sizes of the hidden layers of the network on top, or of the deep network, of models that
    predict rows, where a layer of size 1 follows; of both streams of FinalMLP; of the experts of
    MMoE and PLE and of each task of PEPNet; of two towers, where a layer of twice embedding-dim
    follows."""
    cross_layers: int = 3
    """Number of layers of the cross networks of DCN-v2 and GDCN, of layers of Wukong and RankMixer,
    and of blocks of MaskNet."""
    max_length: int = 100
    """Largest number of items of a sequence that SASRec, BERT4Rec, TransAct, LONGER and OneTrans
    read, the last ones."""
    domain: tuple[str, ...] = ()
    """Columns that name the domain of a row, such as a page or a country, for PEPNet."""
    table_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Data type of the tables."""
    dense_dtype: Annotated[
        Literal["float32", "bfloat16"], tyro.conf.arg(aliases=["--dense-dtype"])
    ] = "float32"
    """Data type that dense layers compute in. Parameters, optimizer state, the last layer, the
    logits and the loss are float32."""

    def __post_init__(self) -> None:
        check_positive(self, "embedding_dim", "cross_layers", "max_length")
        for name in ("bottom_layer_sizes", "top_layer_sizes"):
            if min(getattr(self, name), default=1) < 1:
                raise ConfigError(
                    f"{option_name('model', name)} must be 1 or more, got {getattr(self, name)}"
                )


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Adam for dense layers, row-wise Adagrad for tables; both rates decay linearly to 0."""

    learning_rate: Annotated[float, tyro.conf.arg(aliases=["--lr"])] = 0.002
    """Initial learning rate of Adam."""
    table_learning_rate: float = 0.5
    """Initial learning rate of row-wise Adagrad."""

    def __post_init__(self) -> None:
        check_positive(self, "learning_rate", "table_learning_rate")


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
        check_positive(self, "every", "keep_last")
        if self.keep_best < 0:
            raise ConfigError(f"checkpoint.keep-best must be 0 or more, got {self.keep_best}")


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
    stream: StreamConfig = StreamConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    job: JobConfig = JobConfig()
    devices: int = 1
    """Number of devices of each process; the planner shards the tables over all of them. A CPU
    simulates several devices."""
    dense_layers: Literal["replicated", "fsdp"] = "replicated"
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
    explain_rows: int = 10_000
    """Number of held-out rows on which calibration by decile and the importance of each column are
    computed at the end, by predicting these rows once for each column; 0: neither."""
    log: tuple[str, ...] = ()
    """Systems that get the run's values besides metrics.jsonl, such as tensorboard,wandb,mlflow,
    each with the extra of its name; see docs/training.md."""
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
    sweep: tuple[str, ...] = ()
    """Options and their values, such as lr=0.01,0.02 embedding_dim=8,16: a run is made of each
    combination, in a folder of --output."""

    def __post_init__(self) -> None:
        for name in ("record_every", "devices"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{name.replace('_', '-')} must be above 0, got {value}")
        for name in self.loggers:
            if name not in LOGGERS or self.loggers.count(name) > 1:
                raise ConfigError(f"--log takes each of {', '.join(LOGGERS)} once, got {name!r}")
        if self.eval_only and self.resume is None:
            raise ConfigError("--eval-only evaluates a saved model; say which with --resume")
        if self.sweep and self.resume is not None:
            raise ConfigError(
                "--sweep makes new runs; to go on with a sweep, repeat its command without --resume"
            )
        if self.sweep and self.stream.follow:
            raise ConfigError(
                "--sweep compares runs on held-out rows, and --follow holds out none; leave one out"
            )
        if self.step is not None and not self.eval_only:
            raise ConfigError("--step says which checkpoint --eval-only evaluates")
        for name in ("evaluate_every", "patience", "explain_rows"):
            if (value := getattr(self, name)) < 0:
                raise ConfigError(f"{name.replace('_', '-')} must be 0 or more, got {value}")
        if self.windows and (self.model.name != "hstu_ranker" or self.windows < 2):
            raise ConfigError("windows are 2 or more, and for --model hstu_ranker")
        held_out = self.data.eval_path is not None or self.data.hold_out_options
        if self.windows and (self.data.epochs > 1 or held_out):
            raise ConfigError(
                "each window is evaluated before it is trained on; leave --epochs and what is held "
                "out (--hold-out, --hold-out-data) out, or --windows"
            )
        if self.windows and (self.patience or self.checkpoint.keep_best):
            raise ConfigError(
                "the windows of a run have different rows, so that their values do not say which "
                "step is the best; leave --patience and --checkpoint.keep-best out, or --windows"
            )
        # A model may be evaluated on other files than those that its run holds out.
        options = [] if self.eval_only else self.data.hold_out_options
        if self.data.eval_path is not None and options:
            raise ConfigError(
                "--hold-out-data holds out the rows of other files; leave "
                f"--{options[0].replace('_', '-')} out"
            )
        if topic_address(self.data.path) is not None and not self.stream.follow:
            raise ConfigError(f"--data {topic_address(self.data.path)} is read with --follow")
        if (topic := topic_address(self.data.eval_path)) is not None:
            raise ConfigError(f"--hold-out-data takes files, and {topic} is a topic")
        if self.seed < 0:
            raise ConfigError(f"seed must be 0 or more, got {self.seed}")

    @property
    def loggers(self) -> list[str]:
        """Names of the systems of ``log``, which commas may separate."""
        return [name for text in self.log for name in text.split(",") if name]


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
        name = name if prefix else _RENAMED.get(name, name)
        if prefix == "data." and name == _FORMER_HOLD_OUT:
            # Runs wrote it also for data that it did not apply to, whose own default it now is.
            value = None if value == DEFAULT_FRACTION else value
            name = "hold_out"
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
        if isinstance(group, bool) and isinstance(value, bool):
            yield [f"--{prefix}{'' if value else 'no-'}{name.replace('_', '-')}"]
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


def run_options(config: TrainConfig) -> dict[str, Any]:
    """Return the options that make a run what it is, by name, with those of a group in a mapping.

    They have only types that YAML and JSON have.
    """
    options = _plain(config)
    for name in ("config", "resume", "output", "eval_only", "step", "profile", "sweep", "job"):
        del options[name]
    return options


def write_options(config: TrainConfig, path: pathlib.Path) -> None:
    """Write a configuration to a YAML file for `load_config`, complete or not at all."""
    options = run_options(config)
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
        if isinstance(value, pathlib.Path):
            return topic_address(value) or str(value.absolute())
        return value

    return {field.name: plain(getattr(config, field.name)) for field in dataclasses.fields(config)}
