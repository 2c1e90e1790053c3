"""What a plan was made for, so that it is not used for something else."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxrec.mesh.placement import Placement
from jaxrec.plan.constraints import ParameterConstraints
from jaxrec.plan.topology import Topology
from jaxrec.plan.workload import TableWork, state_bytes


class PlanMismatchError(ValueError):
    """A plan is loaded for something that it was not made for; the message says what differs."""


@dataclasses.dataclass(frozen=True)
class Context:
    """What a plan was made for.

    Attributes:
        fields: The tables with what a step asks of them, the devices, the batch size and all that
            the search was told, as JSON has them.
    """

    fields: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        works: Sequence[TableWork],
        topology: Topology,
        batch_size: int,
        constraints: Mapping[str, ParameterConstraints],
        settings: Mapping[str, Any],
    ) -> Context:
        fields = {
            "batch_size": batch_size,
            "topology": topology.to_dict(),
            "tables": {work.name: _table(work) for work in works},
            "constraints": {name: _plain(said) for name, said in sorted(constraints.items())},
            "settings": dict(settings),
        }
        # As it will be read back: tuples are lists, and so on.
        return cls(json.loads(json.dumps(fields)))

    @property
    def hash(self) -> str:
        """SHA-256 of the fields."""
        text = json.dumps(self.fields, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def differences(self, other: Context) -> list[str]:
        """What is different in the other, in words such as ``batch_size: 512, now 1024``."""
        return list(_differences("", self.fields, other.fields))

    def require_same(self, other: Context) -> None:
        """Checks that the plan is used for what it was made for.

        Raises:
            PlanMismatchError: If not.
        """
        if different := self.differences(other):
            more = f"; and {len(different) - 5} more differences" if len(different) > 5 else ""
            raise PlanMismatchError(
                f"the plan was made for something else: {'; '.join(different[:5])}{more}. "
                "Plan anew, or load it without saying what for"
            )


def _table(work: TableWork) -> dict[str, Any]:
    return {
        "rows": work.rows,
        "dim": work.dim,
        "dtype": work.dtype,
        "collection": work.collection,
        "optimizer": type(work.optimizer).__name__,
        "state_bytes": state_bytes(work.optimizer, work.dim),
        "is_pooled": work.is_pooled,
        "is_weighted": work.is_weighted,
        "features": {
            feature.name: {
                "lookups": round(feature.lookups, 6),
                "capacity": feature.capacity,
                "bags": feature.bags,
                "distinct": round(feature.heat.distinct(feature.lookups), 6),
            }
            for feature in work.features
        },
    }


def _plain(said: ParameterConstraints) -> dict[str, Any]:
    """What is said, leaving out what is not."""
    default = ParameterConstraints()
    return {
        field.name: dataclasses.asdict(value) if isinstance(value, Placement) else value
        for field in dataclasses.fields(said)
        if (value := getattr(said, field.name)) != getattr(default, field.name)
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
