"""A plan: which table goes where."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

from jaxrec.mesh.placement import Placement
from jaxrec.plan.context import Context, PlanMismatchError
from jaxrec.plan.estimate import Estimate
from jaxrec.plan.plot import draw
from jaxrec.plan.report import render
from jaxrec.plan.topology import Topology


@dataclasses.dataclass(frozen=True)
class ShardingPlan:
    """The placement of every table of a model.

    Made by hand with `from_dict`, or by `jaxrec.plan.Planner`, whose plans know what they are
    expected to take: ``print(plan)`` says it.

    Attributes:
        placements: Placement of each table, by name.
        estimate: What the plan is expected to take; None for one made by hand.
        context: What the plan was made for; None for one made by hand.

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

    @classmethod
    def from_dict(cls, placements: Mapping[str, Placement]) -> ShardingPlan:
        """A plan made by hand.

        Raises:
            TypeError: If they are no mapping, or a value is no placement.
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
        return cls(tuple(placements.items()))

    @property
    def num_devices(self) -> int | None:
        """Number of devices that the plan was made for; None for one made by hand."""
        if self.context is None:
            return None
        return Topology.from_dict(self.context.fields["topology"]).num_devices

    def to_dict(self) -> dict[str, Placement]:
        """The placements by table.

        Raises:
            ValueError: If the plan keeps tables in host memory or on disk, which is for planning
                ahead alone.
        """
        tables = () if self.estimate is None else self.estimate.tables
        for table in tables:
            if table.storage != "device":
                raise ValueError(
                    f"table {table.name!r} is planned in storage {table.storage!r}, which "
                    "jaxrec.shard does not carry out; plan with storages=('device',)"
                )
        return dict(self.placements)

    def to_json(self) -> str:
        """The plan with its estimate, and what it was made for, with a hash of that."""
        fields: dict[str, Any] = {
            "format": 1,
            "placements": {
                name: dataclasses.asdict(placement) for name, placement in self.placements
            },
        }
        if self.estimate is not None:
            fields["estimate"] = self.estimate.to_dict()
        if self.context is not None:
            fields |= {"made_for": self.context.fields, "hash": self.context.hash}
        return json.dumps(fields, indent=1)

    @classmethod
    def from_json(cls, text: str, made_for: Context | None = None) -> ShardingPlan:
        """The reverse of `to_json`.

        Args:
            text: The JSON.
            made_for: What the plan will be used for, of `Planner.context`; None: not checked.

        Raises:
            ValueError: If it is no plan, or was changed by hand.
            PlanMismatchError: If it was made for something else.

        Example:
            >>> from jaxrec.mesh import row_wise
            >>> plan = ShardingPlan.from_dict({"product": row_wise()})
            >>> ShardingPlan.from_json(plan.to_json()) == plan
            True
        """
        try:
            fields = json.loads(text)
            placements = tuple(
                (name, _placement(placement)) for name, placement in fields["placements"].items()
            )
            context = Context(fields["made_for"]) if "made_for" in fields else None
            estimate = Estimate.from_dict(fields["estimate"]) if "estimate" in fields else None
            stated = fields["hash"] if context else None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"this is no plan that to_json wrote: {error!r}") from None
        if context is not None and stated != context.hash:
            raise ValueError(
                "what the plan says that it was made for does not have the hash that it says; it "
                "was changed by hand. Plan anew"
            )
        if made_for is not None:
            if context is None:
                raise PlanMismatchError("the plan was made by hand, and does not say what for")
            context.require_same(made_for)
        return cls(placements, estimate, context)

    def __str__(self) -> str:
        if self.estimate is not None:
            return render(self.estimate)
        return "\n".join(
            f"{name}: {placement.kind}"
            + (f" on {', '.join(map(str, placement.places))}" if placement.places else "")
            + (" by sums" if placement.exchange == "sums" else "")
            for name, placement in self.placements
        )

    def plot(self, path: str | os.PathLike) -> None:
        """Draws devices by memory and by time, bars stacked by table, as a picture file.

        Needs matplotlib: ``pip install 'jaxrec[plot]'``.

        Args:
            path: Where to; its ending is the format, such as ``.png`` or ``.svg``.

        Raises:
            ValueError: If the plan was made by hand, and knows neither.
            ModuleNotFoundError: If matplotlib is not installed.
        """
        if self.estimate is None:
            raise ValueError(
                "a plan made by hand has no estimate to draw; Planner.evaluate(model, plan, "
                "batch_size=...) gives it one"
            )
        draw(self.estimate, path)


def _placement(fields: Mapping[str, Any]) -> Placement:
    return Placement(**{**fields, "places": tuple(fields["places"])})
