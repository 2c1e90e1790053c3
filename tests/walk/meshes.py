"""The meshes of the walk, and batches that lie on them."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding

DEVICES = 2


@dataclasses.dataclass(frozen=True)
class Setting:
    """A mesh with axes of a kind, and whether steps run under `jax.set_mesh`."""

    axes: AxisType
    is_set: bool

    @property
    def mesh(self) -> Mesh:
        return jax.make_mesh((DEVICES,), ("data",), axis_types=(self.axes,))

    def context(self) -> contextlib.AbstractContextManager[Any]:
        return jax.set_mesh(self.mesh) if self.is_set else contextlib.nullcontext()

    def place(self, tree: Any) -> Any:
        """Cut the first axis of each array over the devices."""
        return jax.device_put(tree, NamedSharding(self.mesh, jax.P("data")))


SETTINGS = {
    "explicit": Setting(AxisType.Explicit, is_set=False),
    "auto": Setting(AxisType.Auto, is_set=False),
    "explicit_set": Setting(AxisType.Explicit, is_set=True),
    "auto_set": Setting(AxisType.Auto, is_set=True),
}
