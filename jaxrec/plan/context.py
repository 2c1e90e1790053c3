"""The context of a plan: the tables, devices and settings that it was made for."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxrec.embed.state import state_bytes
from jaxrec.mesh.placement import Placement
from jaxrec.plan.constraints import ParameterConstraints
from jaxrec.plan.topology import Topology
from jaxrec.plan.workload import TableWorkload


class PlanMismatchError(ValueError):
    """A plan is loaded in another context than its own; the message says what differs."""


@dataclasses.dataclass(frozen=True)
class Context:
    """The tables, devices and settings that a plan was made for.

    Attributes:
        fields: The tables with their workloads, the devices, the batch size, the constraints and
            the planner's settings, as JSON has them.
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
        # As JSON will read it back: tuples become lists.
        return cls(json.loads(json.dumps(fields)))

    @property
    def hash(self) -> str:
        """SHA-256 of the fields."""
        text = json.dumps(self.fields, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def differences(self, other: Context) -> list[str]:
        """Return the differences of another context, such as ``batch_size: 512, now 1024``."""
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
                "lookups": round(feature.lookups, 6),
                "capacity": feature.capacity,
                "bags": feature.bags,
                "distinct": round(feature.heat.distinct(feature.lookups), 6),
            }
            for feature in workload.features
        },
    }


def _plain(constraint: ParameterConstraints) -> dict[str, Any]:
    """Return the fields that differ from their defaults."""
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
