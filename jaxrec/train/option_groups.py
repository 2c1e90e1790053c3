"""Groups of options of a training run: vocabularies, the requests of a ranker, and processes."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

import tyro

from jaxrec.arguments import ConfigError
from jaxrec.mesh.processes import LOST_AFTER_SECONDS, check_processes
from jaxrec.tier.stores import open_store
from jaxrec.tier.vocabulary.counts import MAX_SIGHTINGS


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
