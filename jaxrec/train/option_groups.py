"""Groups of options of a training run, such as those of its data and of its model."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Annotated, Any, Literal

import tyro

from jaxrec.arguments import ConfigError
from jaxrec.mesh.processes import LOST_AFTER_SECONDS, check_processes
from jaxrec.tier.stores import open_store
from jaxrec.tier.vocabulary.counts import MAX_SIGHTINGS
from jaxrec.train.data_path import DataPath
from jaxrec.train.hold_out import split_of
from jaxrec.train.row_memory import parse_memory

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


def check_positive(config: Any, *names: str) -> None:
    """Raise a ConfigError unless some numbers of a group of options are above 0."""
    for name in names:
        if not getattr(config, name) > 0:
            group = type(config).__name__.removesuffix("Config").lower()
            raise ConfigError(
                f"{option_name(group, name)} must be above 0, got {getattr(config, name)}"
            )


def option_name(group: str, name: str) -> str:
    """Return the name of an option of a group, such as "data.batch-size"."""
    return f"{group}.{name.replace('_', '-')}"


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
                        f"{option_name('vocabulary', field.name)} is for --vocabulary dynamic; "
                        "give this too, or leave it out"
                    )
        if (self.ttl_batches is None) == (self.eviction == "ttl"):
            raise ConfigError(
                "vocabulary.eviction ttl needs vocabulary.ttl-batches, and only ttl takes them"
            )
        if self.ttl_batches is not None:
            check_positive(self, "ttl_batches")
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
        check_positive(self, "history", "candidates", "dim", "layers", "heads")
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
        check_positive(self, "lost_after")
        try:
            check_processes(self.coordinator, self.num_processes, self.process_id)
        except ValueError as error:
            raise ConfigError(str(error)) from None
