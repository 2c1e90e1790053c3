"""The command ``jaxrec plan``, which finds a sharding plan or measures a topology."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Annotated, Literal

import tyro

from jaxrec.arguments import ConfigError, parse
from jaxrec.plan.feature_statistics import Statistics
from jaxrec.plan.model_file import read_model_file
from jaxrec.plan.plan import PlanMismatchError, ShardingPlan
from jaxrec.plan.planner import Planner
from jaxrec.plan.report import render, require_matplotlib
from jaxrec.plan.shortage import PlanError
from jaxrec.plan.topology import Topology

USAGE_ERRORS = (ConfigError,)
FAILURES = (PlanError, PlanMismatchError, ValueError, ModuleNotFoundError)


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """Finds the best sharding of tables over devices, and estimates its memory and time.

    No accelerator is needed: the devices are named or described by a file. With --calibrate, the
    command measures this machine's devices instead and writes such a file.

    Example: jaxrec plan model.yaml --devices 64 --machine h200 --output plan.json
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL.yaml")] = ""
    """YAML file of the tables; see the documentation of jaxrec.plan.model_file."""
    devices: int = 8
    """Number of devices in all. With --calibrate on a CPU: number of devices to simulate."""
    devices_per_host: int | None = None
    """Number of devices on each host; by default as many as such a machine usually has."""
    machine: str = "h100"
    """Kind of devices: a100, h100, h200, b200, tpu-v5e, tpu-v6e, tpu-v5p or cpu."""
    topology: pathlib.Path | None = None
    """File of measured devices, instead of --machine; --devices is their number."""
    memory: float | None = None
    """GB of each device, instead of the machine's."""
    batch_size: int | None = None
    """Samples of all devices in a step; by default the model file's batch_size."""
    storages: tuple[Literal["device", "host", "store"], ...] = ("device",)
    """Places that may hold the rows: host memory and row stores have caches on the devices."""
    store: str | None = None
    """URL of the row store of storage "store", such as "file:///data/{table}"."""
    statistics: pathlib.Path | None = None
    """File of statistics of batches, written by jaxrec.plan.Statistics.save."""
    reserve: float = 0.15
    """Fraction of each device's memory to leave free."""
    time_limit: float = 30.0
    """Seconds that the search may take."""
    output: pathlib.Path | None = None
    """JSON file to write the plan to, or with --calibrate the topology."""
    plot: pathlib.Path | None = None
    """Picture to draw: memory and time of each device."""
    load: pathlib.Path | None = None
    """Plan to show instead of searching for one; an error if it is for another model or other
    devices."""
    calibrate: bool = False
    """Measure this machine's devices and write the topology to --output."""

    def check(self) -> None:
        """Raise ConfigError if the options do not go together."""
        if self.calibrate and self.model:
            raise ConfigError("--calibrate measures devices and takes no model")
        if self.calibrate and self.output is None:
            raise ConfigError("--calibrate writes a topology; say where to with --output")
        if not self.calibrate and not self.model:
            raise ConfigError("give the YAML file of a model, or --calibrate")
        if self.devices < 1:
            raise ConfigError(f"--devices must be 1 or more, got {self.devices}")


def run(options: Sequence[str]) -> int:
    """Run ``jaxrec plan``; return the exit code."""
    parsed = parse("plan", options, PlanOptions())
    parsed.check()
    if parsed.calibrate:
        return _calibrate(parsed, given={option.split("=")[0] for option in options})
    return _plan(parsed)


def _plan(options: PlanOptions) -> int:
    if options.plot is not None:
        require_matplotlib()  # the search takes long: a missing package must not fail after it
    model = read_model_file(options.model)
    batch_size = options.batch_size or model.batch_size
    if batch_size is None:
        raise ConfigError(f"{options.model} has no batch_size; give --batch-size")
    planner = Planner(
        _topology(options),
        model.constraints,
        statistics=None if options.statistics is None else Statistics.load(options.statistics),
        storages=options.storages,
        store=options.store,
        reserve=options.reserve,
        time_limit=options.time_limit,
        dense_bytes=model.dense_bytes,
    )
    if options.load is None:
        plan = planner.plan(model.tables, batch_size=batch_size)
    else:
        made_for = planner.context(model.tables, batch_size=batch_size)
        plan = ShardingPlan.from_json(options.load.read_text(), made_for)
    print(plan if plan.estimate is None else render(plan.estimate))
    if options.plot is not None:
        plan.plot(options.plot)
    if options.output is not None:
        options.output.write_text(plan.to_json() + "\n")
    return 0


def _topology(options: PlanOptions) -> Topology:
    try:
        if options.topology is None:
            topology = Topology.named(
                options.machine, devices=options.devices, devices_per_host=options.devices_per_host
            )
        else:
            measured = Topology.load(options.topology)
            topology = measured.with_devices(options.devices, options.devices_per_host)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if options.memory is not None:
        memory = int(options.memory * 1e9)
        topology = dataclasses.replace(topology, memory=memory, device_memory=())
    return topology


def _calibrate(options: PlanOptions, given: set[str]) -> int:
    # Imported here: planning alone must not start a device.
    import jax

    from jaxrec.plan.calibration import Measurement, calibrate
    from jaxrec.tier.calibration import calibrate_caches

    if "--devices" in given and os.environ.get("JAX_PLATFORMS", "cpu") == "cpu":
        with contextlib.suppress(RuntimeError):  # JAX has started its devices: measure these
            jax.config.update("jax_num_cpu_devices", options.devices)
    devices = jax.devices()
    count = options.devices if "--devices" in given else len(devices)
    if count > len(devices):
        raise ConfigError(f"--devices {count}, but there are {len(devices)} at hand")
    # By default a host is a process.
    each = options.devices_per_host or max(1, count // jax.process_count())
    if count % each:
        raise ConfigError(f"{count} devices do not fill hosts of {each}")
    axes = {"device": count} if each == count else {"host": count // each, "device": each}
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), devices=devices[:count])

    def report(measured: Measurement) -> None:
        print(
            f"{measured.operation:16} {measured.items:8,} items {measured.bytes:12,} bytes "
            f"{measured.seconds * 1e3:10.3f} ms",
            file=sys.stderr,
        )

    memory = None if options.memory is None else int(options.memory * 1e9)
    topology = calibrate(mesh, name=devices[0].device_kind, memory=memory, report=report)
    topology = calibrate_caches(topology, mesh, report=report)
    assert options.output is not None
    topology.save(options.output)
    print(f"{count} devices of kind {devices[0].device_kind}: rates written to {options.output}")
    return 0
