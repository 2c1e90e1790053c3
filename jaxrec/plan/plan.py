"""A plan: which table goes where."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxrec.mesh.placement import Placement


@dataclasses.dataclass(frozen=True)
class ShardingPlan:
    """The placement of every table of a model.

    Attributes:
        placements: Placement of each table, by name.

    Example:
        >>> from jaxrec.mesh import row_wise, table_wise
        >>> plan = ShardingPlan.from_dict({"product": row_wise(), "user": table_wise(device=0)})
        >>> print(plan)
        product: row_wise
        user: table_wise on 0
    """

    placements: tuple[tuple[str, Placement], ...]

    @classmethod
    def from_dict(cls, placements: Mapping[str, Placement]) -> ShardingPlan:
        """A plan made by hand.

        Raises:
            TypeError: If a value is no placement.
        """
        for name, placement in placements.items():
            if not isinstance(placement, Placement):
                raise TypeError(
                    f"table {name!r}: a placement is made by jaxrec.mesh.row_wise() and its "
                    f"siblings, got {placement!r}"
                )
        return cls(tuple(placements.items()))

    def to_dict(self) -> dict[str, Placement]:
        """The placements by table."""
        return dict(self.placements)

    def __str__(self) -> str:
        return "\n".join(
            f"{name}: {placement.kind}"
            + (f" on {', '.join(map(str, placement.places))}" if placement.places else "")
            for name, placement in self.placements
        )
