"""The configuration of a training run, from the command line and from files."""

from __future__ import annotations

import dataclasses
import pathlib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import yaml

from jaxrec.arguments import ConfigError, parse, read_yaml
from jaxrec.data.encoder import SCHEMA_FILE
from jaxrec.data.split import DEFAULT_FRACTION
from jaxrec.files.atomic import write_atomically
from jaxrec.train.loggers import LOGGERS
from jaxrec.train.option_groups import (
    CheckpointConfig,
    DataConfig,
    JobConfig,
    ModelConfig,
    OptimizerConfig,
    RankerConfig,
    VocabularyConfig,
)
from jaxrec.train.stream_options import StreamConfig, topic_address

# Files of a run's directory: its options, and the `TableEncoder` of its Parquet files.
CONFIG_FILE = "config.yaml"
FEATURES_DIRECTORY = "features"

# Earlier names of options, which saved runs have.
_RENAMED = {"dense": "dense_layers"}

# Name of the option `hold_out` in earlier versions.
_FORMER_HOLD_OUT = "eval_fraction"

# First line of the options file of a run.
_HEADER = "# Written by jaxrec train."


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
