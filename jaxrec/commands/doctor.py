"""The command ``jaxrec doctor``: the implementations that run on this machine, and its problems."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import pathlib
import platform
import warnings
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxrec import optim
from jaxrec.arguments import ConfigError, parse
from jaxrec.embed import kernels
from jaxrec.embed.formats import FORMATS, TABLE_FORMATS, RowFormat, TableArray, as_table, is_packed
from jaxrec.embed.kernels import BagLayout, Choice, Lookups, cpu, registry, trial
from jaxrec.embed.kernels.answers import Answers, cores, processor, tunable_device
from jaxrec.tier.ids import library as id_map_library

USAGE_ERRORS = (ConfigError,)
FAILURES = (RuntimeError,)

PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "libtpu",
    "flax",
    "optax",
    "numpy",
)
# Older versions add floats on GPUs by loops of compare-and-swap: xla issue 46225.
OLDEST_JAX_ON_GPUS = (0, 11, 2)


@dataclasses.dataclass(frozen=True)
class DoctorOptions:
    """Tries the kernels for this machine's GPU, and says what jaxrec runs here and what is missing.

    The exit status is 1 if something is wrong or needlessly slow.

    Example: jaxrec doctor --dim 64
    """

    dim: int = 128
    """Width of the rows of the examined calls."""
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "int8")
    """Types of the rows, of trained or quantized tables."""


def run(options: Sequence[str]) -> int:
    """Run ``jaxrec doctor``; return the exit code."""
    parsed = parse("doctor", options, DoctorOptions())
    if parsed.dim < 1:
        raise ConfigError(f"--dim must be 1 or more, got {parsed.dim}")
    known = [*TABLE_FORMATS, *(name for name in FORMATS if name not in TABLE_FORMATS)]
    for dtype in parsed.dtypes:
        if dtype not in known:
            raise ConfigError(f"--dtypes are {', '.join(known[:-1])} and {known[-1]}, got {dtype}")
    with warnings.catch_warnings():
        # The warnings say why a kernel does not run, and so does `problems` below.
        warnings.simplefilter("ignore", RuntimeWarning)
        choices = [choose_flat()]
        choices += [choice for dtype in parsed.dtypes for choice in choose(parsed.dim, dtype)]
        attention = choose_attention()
    tuning, tuning_problems = read_tuning()
    for title, lines in {
        f"jaxrec {_version('jaxrec') or 'is not installed'}": versions(),
        "Machine": machine(),
        "Kernels": [
            line for call, choice in [*choices, *attention] for line in describe(call, choice)
        ],
        "Choices of jaxrec tune": [] if tuning is None else list(map(str, tuning.calls)),
    }.items():
        if lines:
            print(title, *(f"  {line}" for line in lines), sep="\n")
    found = [*problems([choice for _, choice in choices]), *tuning_problems]
    found += failed_trials([choice for _, choice in attention])
    print("To mend" if found else "Nothing to mend.", *(f"  {each}" for each in found), sep="\n")
    return 1 if found else 0


def versions() -> list[str]:
    """Return the versions of Python and of the packages that computations depend on."""
    lines = [f"Python {platform.python_version()} on {platform.platform()}"]
    found = {package: _version(package) for package in PACKAGES}
    return [*lines, *(f"{package} {version}" for package, version in found.items() if version)]


def _version(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine() -> list[str]:
    """Return the processor, the devices and the native library of this process."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    lines = [f"{processor()}, {cores()} cores, {memory:.0f} GB of memory"]
    counts: dict[str, int] = {}
    for device in jax.local_devices():
        counts[device.device_kind] = counts.get(device.device_kind, 0) + 1
    devices = ", ".join(f"{count} x {kind}" for kind, count in counts.items())
    lines.append(f"JAX computes on {jax.default_backend()}: {devices}")
    instructions = cpu.instruction_set()
    library = f"has {instructions} code for this processor" if instructions else "is not there"
    return [*lines, f"The native library {library}"]


def choose(dim: int, dtype: str) -> list[tuple[str, Choice]]:
    """Return names of typical lookups and updates, each with the implementation that runs it.

    Their table has ``dim`` columns of type ``dtype``. On a GPU, kernels without a recorded trial
    are tried first.
    """
    trained, quantized = TABLE_FORMATS.get(dtype), FORMATS.get(dtype)
    choices = [] if trained is None else _choose(dim, trained, "")
    if quantized is not None and quantized != trained:
        choices += _choose(dim, quantized, "quantized ")
    return choices


def _choose(dim: int, row_format: RowFormat, kind: str) -> list[tuple[str, Choice]]:
    def table() -> TableArray:
        return as_table(row_format.pack(jnp.zeros((1000, dim))), row_format, dim)

    # Choosing an implementation needs shapes and types, so that the table is never made.
    rows, gradients = jax.eval_shape(table), jnp.zeros((8, dim))
    ids, lengths, step = jnp.zeros(64, jnp.int32), jnp.zeros(8, jnp.int32), jnp.int32(0)
    lookups, layout = Lookups(ids, ids, None), _layout()
    calls: dict[str, tuple] = {
        "pooled_lookup": (rows, ids, lengths, None, layout, "float32"),
        "row_lookup": (rows, ids),
    }
    if not is_packed(rows):  # XLA updates packed rows, whatever the machine
        rule = optim.rowwise_adagrad(0.01)
        state = jax.eval_shape(lambda: rule.init(1000, dim))
        calls["sum_rows"] = lookups, gradients, 1000
        calls["fused_update"] = rows, state, lookups, gradients, rule, step
    return [
        (
            f"{name} of {kind}{row_format.name} rows of {dim}",
            kernels.describe(name, *arguments),
        )
        for name, arguments in calls.items()
    ]


def choose_flat() -> tuple[str, Choice]:
    """Return ``"flatten_bags"`` and its implementation, which serves every row format."""
    batch = jnp.zeros(64, jnp.int32), jnp.zeros(8, jnp.int32), None
    return "flatten_bags", kernels.describe("flatten_bags", *batch, _layout(), 1000)


def choose_attention() -> list[tuple[str, Choice]]:
    """Return names of the passes of `hstu_attention`, each with the implementation that runs it."""
    # On CPUs they compute in float32, whatever the type of the vectors.
    dtype = jnp.bfloat16 if trial.cards() else jnp.float32
    vectors = jax.ShapeDtypeStruct((1024, 4, 128), dtype)
    ranges, offsets = (jax.ShapeDtypeStruct(x, jnp.int32) for x in ((3, 1024), (2, 9)))
    operands = vectors, vectors, vectors, ranges, offsets, jnp.zeros((0, 4))
    calls = {"attention": (*operands, 1.0), "attention_gradients": (*operands, vectors, 1.0)}
    title = f"of {jnp.dtype(dtype).name} heads of 128"
    try:
        return [(f"{name} {title}", kernels.describe(name, *calls[name])) for name in calls]
    except ValueError:  # JAXREC_KERNELS names no kernels of attention.
        return []


def describe(call: str, choice: Choice) -> list[str]:
    """Return lines that name the implementation that runs a call, and why others do not."""
    name = choice.name(_platform())
    # The reference takes memory for all pairs, and `hstu_attention` never runs it.
    is_tiled = name == "reference" and choice.primitive.startswith("attention")
    lines = [f"{call}: {'tiles of XLA' if is_tiled else name}"]
    for name, reason in choice.refused.items():
        # Without such a card, the reason why a kernel for GPUs or TPUs does not run is noise.
        if name not in _tried() or name in _tried(_platform()):
            lines.append(f"  not {name}: {reason}")
    return lines


def read_tuning() -> tuple[Answers | None, list[str]]:
    """Return the choices that `jaxrec tune` kept for this machine, and problems with them."""
    if (device := tunable_device(_platform())) is None:
        return None, []
    tuning = Answers.read(device)
    found = [] if tuning.problem is None else [f"{tuning.problem}."]
    if not tuning.calls and (count := tuning.of_other_versions()):
        found.append(
            f"{count} choices of jaxrec tune are not used, as they were made with other versions "
            "or another driver: run `jaxrec tune` again."
        )
    return tuning, found


def problems(choices: Sequence[Choice]) -> list[str]:
    """Return the problems of this machine, each with its remedy."""
    found = []
    if _version("jaxrec") is None:
        found.append("jaxrec runs from a folder and is not installed: pip install -e FOLDER.")
    is_gpu = bool(trial.cards())
    # The driver's device file exists whether or not JAX was installed for GPUs.
    if not is_gpu and pathlib.Path("/dev/nvidiactl").exists() and jax.default_backend() == "cpu":
        found.append(
            "There is an NVIDIA GPU that JAX does not use: pip install 'jaxrec[cuda12]' (or "
            "'jaxrec[cuda13]'), and unset JAX_PLATFORMS."
        )
    if is_gpu and jax.__version_info__ < OLDEST_JAX_ON_GPUS:
        found.append(
            f"JAX {jax.__version__} adds floats on GPUs by loops of compare-and-swap: install "
            f"JAX {'.'.join(map(str, OLDEST_JAX_ON_GPUS))} or later, which needs Python 3.12."
        )
    if not is_gpu and (missing := cpu.missing()) is not None:
        found.append(f"Lookups and updates run in XLA, up to twenty times slower: {missing}.")
    if (missing := id_map_library.missing()) is not None:
        found.append(
            f"Id maps of open vocabularies run in NumPy, up to fifty times slower: {missing}."
        )
    if named := os.environ.get("JAXREC_KERNELS"):
        found.append(f"JAXREC_KERNELS={named} keeps other kernels from running: unset it.")
    if not is_gpu:
        return found + failed_trials(choices)
    for choice in choices:
        if choice.chosen.get("cuda") in _tried("cuda") or "cuda" in choice.tuned:
            continue
        for name, reason in choice.refused.items():
            if name in _tried("cuda"):
                found.append(f"{choice.primitive} runs without its {name} kernel: {reason}.")
    return found


def failed_trials(choices: Sequence[Choice]) -> list[str]:
    """Return sentences about kernels that failed their trials on this machine's GPU or TPU."""
    # A kernel may also be refused because it is not made for this card, as attention's is for
    # Hopper cards only. That is no fault to report.
    return [
        f"{choice.primitive} runs without its {name} kernel: {reason}."
        for choice in choices
        for name, reason in choice.refused.items()
        if reason.startswith(registry.FAILED)
    ]


def _tried(platform: str | None = None) -> set[str]:
    """Return the names of the implementations that run only after a trial on a card.

    ``platform`` is that of the card; None: any.
    """
    return {
        each.name
        for each in registry.IMPLEMENTATIONS
        if each.is_tried and platform in (None, *each.platforms)
    }


def _layout() -> BagLayout:
    return BagLayout((0,), (64,), (0,), (8,), (0,), (1000,), (False,))


def _platform() -> str:
    return "cuda" if trial.cards() else jax.default_backend()
