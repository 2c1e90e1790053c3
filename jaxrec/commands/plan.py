"""The command ``jaxrec plan``, which finds a sharding plan or measures a topology."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Annotated, Literal

import tyro

from jaxrec.arguments import ConfigError, parse
from jaxrec.embed.stash import Stash
from jaxrec.plan.feature_statistics import Statistics
from jaxrec.plan.model_file import ModelFile, read_model_file
from jaxrec.plan.plan import PlanMismatchError, ShardingPlan
from jaxrec.plan.planner import Planner
from jaxrec.plan.report import require_matplotlib
from jaxrec.plan.shortage import PlanError
from jaxrec.plan.stashes import render_stashes
from jaxrec.plan.topology import Topology
from jaxrec.plan.trials import dry_run, parse_machines, render_trials

USAGE_ERRORS = (ConfigError,)
FAILURES = (PlanError, PlanMismatchError, ValueError, ModuleNotFoundError)

# Options of one plan for one cluster.
_OF_ONE_PLAN = frozenset(
    f"--{name}"
    for name in (
        *("devices", "devices-per-host", "machine", "topology", "memory"),
        *("output", "plot", "load"),
    )
)


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """Finds the best sharding of tables over devices, and estimates its memory and time.

    No accelerator is needed: the devices are named or described by a file. With --machines, the
    command plans for several clusters and compares them in one table. With --calibrate, it measures
    this machine's devices instead and writes such a file.

    Example: jaxrec plan model.yaml --devices 64 --machine h200 --output plan.json
    Example: jaxrec plan model.yaml --machines 8xh100 2x8xh200 --prices h100=2 h200=3
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
    machines: tuple[str, ...] = ()
    """Clusters to compare, instead of --devices and --machine, such as 8xh100 (devices) or 2x8xh200
    (hosts and devices of each)."""
    prices: tuple[str, ...] = ()
    """With --machines: price of one device for an hour, such as h100=2.5, in any currency."""
    memory: float | None = None
    """GB of each device, instead of the machine's."""
    batch_size: int | None = None
    """Samples of all devices in a step; by default the model file's batch_size."""
    storages: tuple[Literal["device", "host", "store"], ...] = ("device",)
    """Places that may hold the rows: host memory and row stores have caches on the devices."""
    store: str | None = None
    """URL of the row store of storage "store", such as "file:///data/{table}"."""
    stashes: tuple[Literal["none", "recompute", "host"], ...] = ("none",)
    """Policies that the plan may choose for what an update needs of its lookups while the dense
    part runs: kept on the devices, computed again, or put into pinned host memory."""
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

    def check(self, given: set[str]) -> None:
        """Raise ConfigError if options contradict each other; ``given`` are the named ones."""
        if self.calibrate and self.machines:
            raise ConfigError("--calibrate measures the devices here and takes no --machines")
        if self.machines and (others := sorted(given & _OF_ONE_PLAN)):
            raise ConfigError(f"--machines compares plans for other devices; leave out {others[0]}")
        if self.prices and not self.machines:
            raise ConfigError("--prices are those of --machines; name these")
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
    given = {option.split("=")[0].replace("_", "-") for option in options}
    parsed.check(given)
    if parsed.calibrate:
        return _calibrate(parsed, given)
    return _dry_run(parsed) if parsed.machines else _plan(parsed)


def _plan(options: PlanOptions) -> int:
    if options.plot is not None:
        require_matplotlib()  # the search takes long: a missing package must not fail after it
    model, batch_size = _model(options)
    planner = _planner(options, model, _topology(options))
    if options.load is None:
        plan = planner.plan(model.tables, batch_size=batch_size)
    else:
        made_for = planner.context(model.tables, batch_size=batch_size)
        plan = ShardingPlan.from_json(options.load.read_text(), made_for)
    print(plan)
    if options.stashes != PlanOptions.stashes:
        print("", render_stashes(planner, model.tables, plan, batch_size=batch_size), sep="\n")
    if options.plot is not None:
        plan.plot(options.plot)
    if options.output is not None:
        options.output.write_text(plan.to_json() + "\n")
    return 0


def _dry_run(options: PlanOptions) -> int:
    model, batch_size = _model(options)
    try:
        topologies = [parse_machines(text) for text in options.machines]
    except ValueError as error:
        raise ConfigError(f"--machines: {error}") from None
    prices = _prices(options.prices, {topology.name for topology in topologies})
    planner = _planner(options, model, topologies[0])
    trials = []
    for trial in dry_run(
        planner, model.tables, options.machines, batch_size=batch_size, prices=prices
    ):
        # A search may take its whole time limit: say what is done.
        print(f"{trial.machines}: {'no plan' if trial.plan is None else 'ok'}", file=sys.stderr)
        trials.append(trial)
    print(render_trials(trials))
    return 0 if any(trial.plan is not None for trial in trials) else 1


def _prices(assignments: Sequence[str], machines: set[str]) -> dict[str, float]:
    prices = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if name not in machines:
            raise ConfigError(
                f"--prices {assignment}: --machines has no {name!r}, but "
                f"{', '.join(sorted(machines))}"
            )
        try:
            prices[name] = float(value)
        except ValueError:
            equals = ""
        if not equals or not 0 < prices[name] < math.inf:
            raise ConfigError(f"--prices takes MACHINE=NUMBER above 0, got {assignment!r}")
    return prices


def _model(options: PlanOptions) -> tuple[ModelFile, int]:
    """Return the model file and the batch size."""
    model = read_model_file(options.model)
    batch_size = options.batch_size or model.batch_size
    if batch_size is None:
        raise ConfigError(f"{options.model} has no batch_size; give --batch-size")
    return model, batch_size


def _planner(options: PlanOptions, model: ModelFile, topology: Topology) -> Planner:
    return Planner(
        topology,
        model.constraints,
        statistics=None if options.statistics is None else Statistics.load(options.statistics),
        storages=options.storages,
        store=options.store,
        stashes=_stashes(options),
        reserve=options.reserve,
        time_limit=options.time_limit,
        dense_bytes=model.dense_bytes,
    )


def _stashes(options: PlanOptions) -> tuple[Stash | None, ...]:
    return tuple(None if stash == "none" else stash for stash in options.stashes)


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
