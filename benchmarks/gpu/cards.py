"""NVIDIA cards, described well enough that JAX compiles for them on a machine without one."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding

_TARGET = """
gpu_device_info {{
  name: "{name}"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability {{ major: {major} minor: {minor} {feature} }}
  platform_version: "Compute Capability {major}.{minor}"
  core_count: {multiprocessors} fpus_per_core: 128 threads_per_warp: 32
  threads_per_block_limit: 1024 threads_per_core_limit: {threads}
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_core: {shared_memory} shared_memory_per_block: 49152
  shared_memory_per_block_optin: {block_shared_memory}
  l2_cache_size: {l2_cache} memory_bandwidth: {bandwidth} device_memory_size: {memory}
  clock_rate_ghz: {clock_ghz} device_address_bits: 64 pcie_bandwidth: 34359738368
  ecc_enabled: true cub_version: "3.1.2" dnn_version: "9.10.0"
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 12 minor: 8 patch: 0 }}
device_description_str: "{name}"
"""


@dataclasses.dataclass(frozen=True)
class DescribedDevice(AbstractDevice):
    """A device that is only described to JAX.

    Pallas' Mosaic backend asks for the compute capability while it lowers a kernel. Without an
    answer it takes 9.0, which is wrong for all cards but Hopper's.
    """

    compute_capability: str = ""


@dataclasses.dataclass(frozen=True)
class Card:
    """A card's data sheet.

    Attributes:
        name: Name.
        major: First digit of the compute capability.
        minor: Second digit.
        multiprocessors: Number of multiprocessors.
        warps: Most resident warps of a multiprocessor.
        blocks: Most resident blocks of a multiprocessor.
        shared_memory: Bytes of shared memory of a multiprocessor.
        l2_cache: Bytes of the L2 cache.
        bandwidth: Bytes of memory traffic a second.
        memory: Bytes of memory.
        clock_ghz: Highest clock rate.
    """

    name: str
    major: int
    minor: int
    multiprocessors: int
    warps: int
    blocks: int
    shared_memory: int
    l2_cache: int
    bandwidth: int
    memory: int
    clock_ghz: float

    @property
    def devices(self) -> tuple[Any, ...]:
        """One described device."""
        return self.topology("1x1x1")

    def topology(self, shape: str) -> tuple[Any, ...]:
        """Return described devices, such as two hosts of eight for "2x8x1"."""
        # Hopper's own instructions, which Mosaic uses, are an extension of compute capability 9.0.
        feature = "feature_extension: ACCELERATED_FEATURES" if self.major == 9 else ""
        fields = dataclasses.asdict(self) | {
            "feature": feature,
            "threads": 32 * self.warps,
            "block_shared_memory": self.shared_memory - 1024,
        }
        target = _TARGET.format(**fields)
        described = topologies.get_topology_desc(
            platform="cuda", target_config=target, topology=shape
        )
        return tuple(described.devices)

    @property
    def abstract_mesh(self) -> AbstractMesh:
        """Mesh of one device, for `jax.sharding.use_abstract_mesh`: kernels ask it for the card."""
        device = DescribedDevice(
            device_kind=self.name,
            num_cores=None,
            platform="gpu",
            compute_capability=f"{self.major}.{self.minor}",
        )
        return AbstractMesh((1,), ("device",), axis_types=(AxisType.Auto,), abstract_device=device)

    def compile(
        self,
        function: Callable,
        *arguments: Any,
        donate: tuple[int, ...] = (),
        dump: pathlib.Path | None = None,
    ) -> Any:
        """Compile a function of arrays.

        Args:
            function: The function.
            arguments: Its arguments, as trees of `jax.ShapeDtypeStruct`.
            donate: Arguments whose memory it takes.
            dump: Folder into which XLA writes what it made of the function; None: nowhere.
        """
        options = None if dump is None else {"xla_dump_to": str(dump)}
        sharding = SingleDeviceSharding(self.devices[0])
        placed = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
        )
        with jax.sharding.use_abstract_mesh(self.abstract_mesh):
            traced = jax.jit(function, donate_argnums=donate).trace(*placed)
            return traced.lower(lowering_platforms=("cuda",)).compile(compiler_options=options)

    def resident_warps(self, registers: int, warps: int, shared_memory: int) -> int:
        """Return how many warps of a kernel fit a multiprocessor at once.

        Args:
            registers: Registers of a thread.
            warps: Warps of a block.
            shared_memory: Bytes of shared memory of a block.
        """
        # A quarter of a multiprocessor has 16384 registers and gives them out in units of 256.
        per_quarter = 16384 // (-(-registers * 32 // 256) * 256)
        blocks = min(
            4 * per_quarter // warps,
            self.warps // warps,
            self.blocks,
            self.shared_memory // (shared_memory + 1024),
        )
        return blocks * warps


CARDS = {
    "h200": Card(
        "NVIDIA H200", 9, 0, 132, 64, 32, 233472, 50 << 20, 4_800_000_000_000, 141 << 30, 1.98
    ),
    "h100": Card(
        "NVIDIA H100",  # by its full name XLA takes CUB's sort, and loads CUDA's libraries
        9,
        0,
        132,
        64,
        32,
        233472,
        50 << 20,
        3_350_000_000_000,
        80 << 30,
        1.98,
    ),
    "a100": Card(
        "NVIDIA A100-SXM4-80GB",
        8,
        0,
        108,
        64,
        32,
        167936,
        40 << 20,
        2_039_000_000_000,
        80 << 30,
        1.41,
    ),
    "l4": Card("NVIDIA L4", 8, 9, 58, 48, 24, 102400, 48 << 20, 300_000_000_000, 24 << 30, 2.04),
}
