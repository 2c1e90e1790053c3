"""A sharding plan: the placement of every table, its context, and one plan for all processes."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
from flax import nnx

from jaxrec.embed.stash import STASHES, Stash
from jaxrec.embed.state import state_bytes
from jaxrec.mesh.agree import gather_texts, on_process_zero, require_same
from jaxrec.mesh.placement import Placement
from jaxrec.plan.caches import TableCache
from jaxrec.plan.constraints import ParameterConstraints
from jaxrec.plan.estimate import Estimate
from jaxrec.plan.fingerprint import Fingerprint
from jaxrec.plan.model_tables import ModelTables
from jaxrec.plan.report import draw, render
from jaxrec.plan.shortage import PlanError
from jaxrec.plan.topology import Topology
from jaxrec.plan.workload import TableWorkload


class PlanMismatchError(ValueError):
    """The plan was made for another context; the message names the differences."""


@dataclasses.dataclass(frozen=True)
class Context:
    """The tables, devices and settings that a plan was made for.

    Attributes:
        fields: Tables with their workloads, devices, batch size, constraints and the planner's
            settings, in the types of JSON.
    """

    fields: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        workloads: Sequence[TableWorkload],
        topology: Topology,
        batch_size: int,
        constraints: Mapping[str, ParameterConstraints],
        settings: Mapping[str, Any],
    ) -> Context:
        fields = {
            "batch_size": batch_size,
            "topology": topology.to_dict(),
            "tables": {workload.name: _table(workload) for workload in workloads},
            "constraints": {name: _plain(each) for name, each in sorted(constraints.items())},
            "settings": dict(settings),
        }
        # Through JSON, so that tuples become lists as in a plan that is read back, and the two
        # compare equal.
        return cls(json.loads(json.dumps(fields)))

    @property
    def hash(self) -> str:
        """SHA-256 of the fields."""
        # Sorted and without spaces: one text, and so one hash, for equal fields.
        text = json.dumps(self.fields, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def differences(self, other: Context) -> list[str]:
        """Return the differences of another context, such as ``["batch_size: 512, now 1024"]``."""
        return list(_differences("", self.fields, other.fields))

    def require_same(self, other: Context) -> None:
        """Check that another context is the same.

        Raises:
            PlanMismatchError: If it is not.
        """
        if differences := self.differences(other):
            count = len(differences) - 5
            more = f"; and {count} more differences" if count > 0 else ""
            raise PlanMismatchError(
                f"the plan was made for something else: {'; '.join(differences[:5])}{more}. "
                "Plan anew, or load it without saying what for"
            )


def _table(workload: TableWorkload) -> dict[str, Any]:
    return {
        "rows": workload.rows,
        "dim": workload.dim,
        "dtype": workload.dtype,
        "collection": workload.collection,
        "optimizer": type(workload.optimizer).__name__,
        "state_bytes": state_bytes(workload.optimizer, workload.dim),
        "is_pooled": workload.is_pooled,
        "is_weighted": workload.is_weighted,
        "features": {
            feature.name: {
                # Rounded, since sums of floats may differ in the last digit between machines.
                "lookups": round(feature.lookups, 6),
                "capacity": feature.capacity,
                "bags": feature.bags,
                "distinct": round(feature.heat.distinct(feature.lookups), 6),
            }
            for feature in workload.features
        },
    }


def _plain(constraint: ParameterConstraints) -> dict[str, Any]:
    """Return the fields that differ from their defaults; a new field changes no old hash."""
    default = ParameterConstraints()
    return {
        field.name: value.to_dict() if isinstance(value, Placement) else value
        for field in dataclasses.fields(constraint)
        if (value := getattr(constraint, field.name)) != getattr(default, field.name)
    }


def _differences(path: str, mine: Any, other: Any) -> Iterator[str]:
    if isinstance(mine, Mapping) and isinstance(other, Mapping):
        for key in {**mine, **other}:
            below = f"{path}.{key}" if path else str(key)
            if key not in other:
                yield f"{below} is gone"
            elif key not in mine:
                yield f"{below} is new"
            else:
                yield from _differences(below, mine[key], other[key])
    elif mine != other:
        yield f"{path}: {mine}, now {other}"


Model = TypeVar("Model", bound=nnx.Module)


@dataclasses.dataclass(frozen=True)
class ShardingPlan:
    """The placement of every table of a model.

    Make a plan by hand with `from_dict`, or by `jaxrec.plan.Planner`. The planner's plans have an
    estimate, which ``print(plan)`` shows.

    Attributes:
        placements: Name and placement of each table.
        estimate: Expected memory and time; None if made by hand.
        context: Tables, devices and settings that the plan is for; None if made by hand.
        caches: Name and cache of each table that has only some of its rows on the devices.
        stash: The ``stash`` that `jaxrec.shard` gives all collections; None: they keep their own.

    Example:
        >>> from jaxrec.mesh import row_wise, table_wise
        >>> plan = ShardingPlan.from_dict({"product": row_wise(), "user": table_wise(device=0)})
        >>> print(plan)
        product: row_wise
        user: table_wise on 0
    """

    placements: tuple[tuple[str, Placement], ...]
    estimate: Estimate | None = dataclasses.field(default=None, compare=False, repr=False)
    context: Context | None = dataclasses.field(default=None, compare=False, repr=False)
    caches: tuple[tuple[str, TableCache], ...] = ()
    stash: Stash | None = None

    @classmethod
    def from_dict(
        cls,
        placements: Mapping[str, Placement],
        caches: Mapping[str, TableCache] | None = None,
        stash: Stash | None = None,
    ) -> ShardingPlan:
        """Make a plan by hand.

        Args:
            placements: Placement of each table.
            caches: Cache of each table that has only some of its rows on the devices.
            stash: The ``stash`` of all collections, "host" or "recompute"; None: their own.

        Raises:
            TypeError: If ``placements`` does not map names to placements, or ``caches`` names to
                caches.
            ValueError: If a table has a cache and no placement, or is placed data_parallel.
        """
        if not isinstance(placements, Mapping):
            raise TypeError(
                "a plan has placements by table, {'user': jaxrec.mesh.row_wise()}, got "
                f"{placements!r:.80}"
            )
        for name, placement in placements.items():
            if not isinstance(placement, Placement):
                raise TypeError(
                    f"table {name!r}: a placement is made by jaxrec.mesh.row_wise() and its "
                    f"siblings, got {placement!r}"
                )
        for name, cache in (caches or {}).items():
            if not isinstance(cache, TableCache):
                raise TypeError(
                    f"table {name!r}: a cache is a jaxrec.plan.TableCache(rows), got {cache!r}"
                )
            if name not in placements or placements[name].is_replicated:
                raise ValueError(
                    f"table {name!r} has a cache, whose rows need a placement such as row_wise(), "
                    f"got {placements.get(name)}"
                )
        return cls(tuple(placements.items()), caches=tuple((caches or {}).items()), stash=stash)

    @property
    def num_devices(self) -> int | None:
        """Number of devices that the plan is for; None if made by hand."""
        if self.context is None:
            return None
        topology = self.context.fields["topology"]
        return topology["hosts"] * topology["devices_per_host"]

    @property
    def fingerprint(self) -> Fingerprint:
        """Tables and machine that the plan is for, and the versions that run."""
        return Fingerprint.of(None if self.context is None else self.context.fields)

    def changes_since(self, saved: str) -> list[str]:
        """Return what changed since a plan was saved: tables, machine and version, in words.

        Args:
            saved: The JSON of the plan, such as `jaxrec.train.CheckpointMetadata.plan`. Facts that
                an older version did not save are left out.

        Example:
            >>> import jaxrec
            >>> table = jaxrec.EmbeddingBagConfig("user", 1000, 64)
            >>> old, new = (
            ...     jaxrec.plan.Planner(Topology.named("h100", devices=count)).plan(
            ...         [table], batch_size=64)
            ...     for count in (8, 16))
            >>> new.changes_since(old.to_json())
            ['machine: h100, 1 host of 8; now h100, 2 hosts of 8']
        """
        fingerprint = Fingerprint.read(saved)
        return [] if fingerprint is None else fingerprint.differences(self.fingerprint)

    def to_dict(self) -> dict[str, Placement]:
        """Return the placements by table."""
        return dict(self.placements)

    def maker(self, make_model: Callable[[], Model]) -> Callable[[], Model]:
        """Return a function that makes a model with the plan's caches in its tables.

        `jaxrec.shard` calls it, for plans with caches.

        Args:
            make_model: Makes the model. It may lack tables of the plan.
        """
        # The one import of a higher layer, which `pyproject.toml` allows by name. A plan may come
        # from a file, and the program that carries it out may not have loaded `jaxrec.tier`.
        from jaxrec.tier.model_tiers import make_cached

        caches = {name: (cache.rows, cache.store) for name, cache in self.caches}
        return functools.partial(make_cached, make_model, caches)

    def to_json(self) -> str:
        """Return the plan with its estimate, its context and the context's hash as JSON."""
        fields: dict[str, Any] = {
            "format": 1,
            "placements": {name: placement.to_dict() for name, placement in self.placements},
        }
        if self.caches:
            fields["caches"] = {name: cache.to_dict() for name, cache in self.caches}
        if self.stash is not None:
            fields["stash"] = self.stash
        if self.estimate is not None:
            fields["estimate"] = self.estimate.to_dict()
        if self.context is not None:
            fields |= {"made_for": self.context.fields, "hash": self.context.hash}
        fields["fingerprint"] = self.fingerprint.to_dict()
        return json.dumps(fields, indent=1)

    @classmethod
    def from_json(cls, text: str, made_for: Context | None = None) -> ShardingPlan:
        """Make a plan from the text of `to_json`.

        Args:
            text: The JSON.
            made_for: Context to check the plan against, from `Planner.context`; None: no check.

        Raises:
            ValueError: If the text is not a plan, its context was changed by hand, or a table is
                stored off the devices and its cache is missing.
            PlanMismatchError: If the plan is for another context.

        Example:
            >>> from jaxrec.mesh import row_wise
            >>> plan = ShardingPlan.from_dict({"product": row_wise()})
            >>> ShardingPlan.from_json(plan.to_json()) == plan
            True
        """
        try:
            fields = json.loads(text)
            placements = tuple(
                (name, Placement.from_dict(placement))
                for name, placement in fields["placements"].items()
            )
            context = Context(fields["made_for"]) if "made_for" in fields else None
            estimate = Estimate.from_dict(fields["estimate"]) if "estimate" in fields else None
            caches = tuple(
                (name, TableCache.from_dict(cache))
                for name, cache in fields.get("caches", {}).items()
            )
            stash = fields.get("stash")
            if stash is not None and stash not in STASHES:
                raise ValueError(f"stash {stash!r}")
            stated = fields["hash"] if context else None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"this is not a plan that to_json wrote: {error!r}") from None
        if context is not None and stated != context.hash:
            raise ValueError(
                "the plan's context does not have the hash that the plan gives; it was changed by "
                "hand. Plan anew"
            )
        if made_for is not None:
            if context is None:
                raise PlanMismatchError("the plan was made by hand, and does not say what for")
            context.require_same(made_for)
        cached = {name for name, _ in caches}
        # Old plans name the storage in their estimate alone. Without this check such a table would
        # be made whole on the devices, which it does not fit.
        for table in () if estimate is None else estimate.tables:
            if table.storage != "device" and table.name not in cached:
                raise ValueError(
                    f"the plan keeps table {table.name!r} in storage {table.storage!r}, and does "
                    "not say which cache it has: it was made before jaxrec.shard made caches. Plan "
                    "anew, with storages of 'device', 'host' and 'store'"
                )
        return cls(placements, estimate, context, caches, stash)

    def __str__(self) -> str:
        stash = [] if self.stash is None else [f"Stash   {self.stash}, in all collections"]
        if self.estimate is not None:
            return "\n\n".join([render(self.estimate), *stash])
        lines, caches = [], dict(self.caches)
        for name, placement in self.placements:
            cached = ""
            if name in caches:
                cached = f", {caches[name].rows:,} rows cached over {caches[name].store}"
            lines.append(f"{name}: {placement}{cached}")
        return "\n".join([*lines, *stash])

    def plot(self, path: str | os.PathLike) -> None:
        """Draw the memory and time of each device as bars stacked by table, into a picture file.

        Needs matplotlib: ``pip install 'jaxrec[plot]'``.

        Args:
            path: The file; its ending says the format, such as ``.png`` or ``.svg``.

        Raises:
            ValueError: If the plan was made by hand and has no estimate.
            ModuleNotFoundError: If matplotlib is not installed.
        """
        if self.estimate is None:
            raise ValueError(
                "a plan made by hand has no estimate to draw; Planner.evaluate(model, plan, "
                "batch_size=...) gives it one"
            )
        draw(self.estimate, path)


# Errors that all processes raise alike, the narrowest first: a PlanError is a ValueError.
_ERRORS = (PlanError, ValueError)


def with_least_memory(topology: Topology) -> Topology:
    """Return a topology with the smallest memory of all processes; every process calls this."""
    if jax.process_count() == 1:
        return topology
    least = min(map(int, gather_texts(str(topology.memory))))
    # Without ``device_memory``, whose minimum would otherwise replace the memory given here.
    return dataclasses.replace(topology, memory=least, device_memory=())


def plan_once(
    search: Callable[[], ShardingPlan], tables: ModelTables, batch_size: int
) -> ShardingPlan:
    """Return the plan that process 0 finds, or raise its error; every process calls this."""
    if jax.process_count() == 1:
        return search()
    # A search with a time limit may end elsewhere in each process, and sampled statistics and
    # calibrated devices differ. So one process searches, once it is certain that all plan the same
    # tables.
    facts = {
        f"table {table.name!r}": f"{table.num_embeddings} x {table.embedding_dim} {table.dtype}"
        for _, layout, _ in tables.collections
        for table in layout.configs
    }
    require_same("model to plan", {"batch_size": str(batch_size)} | facts)
    return ShardingPlan.from_json(on_process_zero(lambda: search().to_json(), _ERRORS))
