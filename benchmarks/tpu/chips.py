"""TPU chips, described well enough that JAX compiles for them on a machine without one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding

import jaxrec


@dataclasses.dataclass(frozen=True)
class Chip:
    """A kind of TPU chip.

    Attributes:
        name: Name, as libtpu's topologies begin.
        one: Shape of one chip's topology.
        eight: Shape of the topology of eight chips, on two hosts.
        memory_rate: Bytes a second of the memory, by data sheet; see `jaxrec.plan.machines`.
        link_rate: Bytes a second from a chip to others, by data sheet.
        has_sparse_cores: Whether Pallas describes its SparseCores.
    """

    name: str
    one: str
    eight: str
    memory_rate: float
    link_rate: float
    has_sparse_cores: bool = True

    def devices(self, count: int) -> tuple[Any, ...]:
        """Return 1 or 8 described devices."""
        shape = {1: self.one, 8: self.eight}[count]
        described = topologies.get_topology_desc(
            platform="tpu", topology_name=f"{self.name}:{shape}"
        )
        return tuple(described.devices)

    def machine(self, count: int) -> jaxrec.plan.Topology:
        """Return that many chips, as the planner sees them."""
        return jaxrec.plan.Topology.named(f"tpu-{self.name}", devices=count)

    @property
    def abstract_mesh(self) -> AbstractMesh:
        """Mesh of one device, for `jax.sharding.use_abstract_mesh`: kernels ask it for the chip."""
        (device,) = self.devices(1)
        abstract = AbstractDevice(
            device_kind=device.device_kind, num_cores=device.num_cores, platform="tpu"
        )
        return AbstractMesh(
            (1,), ("device",), axis_types=(AxisType.Auto,), abstract_device=abstract
        )

    def lower(self, function: Callable, *arguments: Any, donate: tuple[int, ...] = ()) -> Any:
        """Lower a function of arrays for one chip.

        Args:
            function: The function.
            arguments: Its arguments, as trees of `jax.ShapeDtypeStruct`.
            donate: Arguments whose memory it takes.
        """
        sharding = SingleDeviceSharding(self.devices(1)[0])
        placed = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
        )
        with jax.sharding.use_abstract_mesh(self.abstract_mesh):
            traced = jax.jit(function, donate_argnums=donate).trace(*placed)
            return traced.lower(lowering_platforms=("tpu",))


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v5e", "1x1", "2x4", 0.819e12, 200e9, has_sparse_cores=False),
        Chip("v6e", "1x1", "2x4", 1.638e12, 400e9),
        Chip("v5p", "1x1x1", "2x2x2", 2.765e12, 600e9),
    )
}
