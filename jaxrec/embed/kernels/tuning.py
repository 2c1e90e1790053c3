"""Choices of implementations that `jaxrec tune` measured on this machine.

A choice holds for calls of one form and about one size: it names an implementation and its options.
The choices are kept in the user's cache directory (see `jaxrec.embed.kernels.trial`), in a file for
each processor or card, its driver, the versions of JAX and jaxrec, and the text of the kernels. A
file that is damaged, or that was written elsewhere, is left out with a warning.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
import pathlib
import platform
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from jaxrec.embed.kernels import trial
from jaxrec.embed.kernels.trial import Form

# Largest ratio of a call's size to that of a choice for it. Batches are padded, and the last one
# may be smaller.
SIZE_RATIO = 4.0


@dataclasses.dataclass(frozen=True)
class TunedCall:
    """The choice for calls of one form and about one size.

    Attributes:
        form: Name of the form (`Form`).
        lookups: Number of lookups of the call that was timed.
        bags: Number of its bags.
        implementation: Name of the chosen implementation.
        options: Its options, by name.
        milliseconds: Median time of the call.
        default: Name of the implementation that runs without a choice.
        default_milliseconds: Median time of the call without a choice.
    """

    form: str
    lookups: int
    bags: int
    implementation: str
    options: Mapping[str, int]
    milliseconds: float
    default: str
    default_milliseconds: float

    @classmethod
    def from_json(cls, fields: Any) -> TunedCall:
        """Read a choice as JSON has it.

        Raises:
            ValueError: Fields are missing, unknown or of another type.
        """
        kinds = {
            "form": str,
            "lookups": int,
            "bags": int,
            "implementation": str,
            "options": dict,
            "milliseconds": float,
            "default": str,
            "default_milliseconds": float,
        }
        if not isinstance(fields, dict) or fields.keys() != kinds.keys():
            raise ValueError("a choice has other fields")
        if wrong := [name for name, kind in kinds.items() if type(fields[name]) is not kind]:
            raise ValueError(f"the {wrong[0]} of a choice is {fields[wrong[0]]!r}")
        if not all(type(value) is int for value in fields["options"].values()):
            raise ValueError(f"the options of a choice are {fields['options']!r}")
        return cls(**fields)

    def __str__(self) -> str:
        options = "".join(f", {name} {value}" for name, value in self.options.items())
        return (
            f"{self.form}, {self.lookups:,} lookups in {self.bags:,} bags: {self.implementation}"
            f"{options}, {self.milliseconds:.3g} ms ({self.default}: "
            f"{self.default_milliseconds:.3g} ms)"
        )

    def ratio(self, lookups: int, bags: int) -> float:
        """Return how many times larger or smaller a call is than the one that was timed."""
        sizes = (lookups, self.lookups), (bags, self.bags)
        return math.exp(max(abs(math.log(max(a, 1) / max(b, 1))) for a, b in sizes))


def size_of(primitive: str, arguments: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers of lookups and of bags of a call, given its arguments by name."""
    match primitive:
        case "pooled_lookup":
            return arguments["layout"].num_positions, arguments["layout"].num_bags
        case "row_lookup":
            return (arguments["rows"].size,) * 2
        case _:
            return arguments["lookups"].rows.size, arguments["gradients"].shape[0]


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The choices for one processor or card.

    Attributes:
        path: The file that keeps them.
        environment: The processor or card, its driver and the versions that they hold for.
        calls: The choices.
        problem: Reason why the file's choices are left out; None: they are not.
    """

    path: pathlib.Path
    environment: Mapping[str, str]
    calls: tuple[TunedCall, ...] = ()
    problem: str | None = None

    @classmethod
    def read(cls, device: Any) -> Tuning:
        """Read the choices that are kept for a device; none where the file is of no use."""
        environment = environment_of(device)
        digest = hashlib.sha256(json.dumps(environment, sort_keys=True).encode()).hexdigest()
        empty = cls(trial.cache_directory() / f"tuning-{digest[:16]}.json", environment)
        try:
            content = json.loads(empty.path.read_text())
            if content["environment"] != environment:
                raise ValueError("it was written for another machine or other versions")
            calls = tuple(map(TunedCall.from_json, content["calls"]))
        except FileNotFoundError:
            return empty
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            reason = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
            problem = f"{empty.path} is left out: {reason}; `jaxrec tune` writes it anew"
            return dataclasses.replace(empty, problem=problem)
        return dataclasses.replace(empty, calls=calls)

    def find(self, primitive: str, arguments: Mapping[str, Any]) -> TunedCall | None:
        """Return the choice for a call, given its arguments by name; None: there is none.

        Among the choices for calls of its form, the nearest in size is taken, within `SIZE_RATIO`.
        """
        if not any(call.form.startswith(f"{primitive} ") for call in self.calls):
            return None
        form, size = str(Form.of(primitive, arguments)), size_of(primitive, arguments)
        alike = [call for call in self.calls if call.form == form]
        nearest = min(alike, key=lambda call: call.ratio(*size), default=None)
        return nearest if nearest is not None and nearest.ratio(*size) <= SIZE_RATIO else None

    def with_call(self, call: TunedCall) -> Tuning:
        """Return these choices and one more, in the place of that for a call of the same size."""
        same = call.form, call.lookups, call.bags
        others = [each for each in self.calls if (each.form, each.lookups, each.bags) != same]
        return dataclasses.replace(self, calls=(*others, call), problem=None)

    def write(self) -> bool:
        """Write the file; return whether that was possible."""
        calls = [dataclasses.asdict(call) for call in self.calls]
        return trial.write_json(self.path, {"environment": self.environment, "calls": calls})

    def of_other_versions(self) -> int:
        """Return the number of choices kept for this device by other versions or drivers."""
        return sum(
            len(content["calls"])
            for content in _contents(self.path.parent.glob("tuning-*.json"))
            if content["environment"].get("device") == self.environment["device"]
            and content["environment"] != self.environment
        )


def _contents(paths: Iterable[pathlib.Path]) -> Iterable[dict[str, Any]]:
    """Yield the contents of those files that hold choices."""
    for path in paths:
        try:
            content = json.loads(path.read_text())
        except (OSError, ValueError, RecursionError):
            continue
        if (
            isinstance(content, dict)
            and isinstance(content.get("environment"), dict)
            and isinstance(content.get("calls"), list)
        ):
            yield content


def tunable_device(name: str) -> Any:
    """Return the device of this process whose choices hold on a platform; None: there is none."""
    if name == "cuda":
        return next(iter(trial.cards()), None)
    try:
        return jax.local_devices(backend=name)[0]
    except RuntimeError:
        return None


@functools.cache
def kept_for(platform_name: str) -> Tuning | None:
    """Return the choices that hold on a platform, read once a process; None: none do.

    Processes of one run may lie on hosts with other files, and replicated rows must change alike on
    all of them: such processes use no choices.
    """
    if jax.process_count() > 1 or (device := tunable_device(platform_name)) is None:
        return None
    tuning = Tuning.read(device)
    if tuning.problem is not None:
        warnings.warn(tuning.problem, RuntimeWarning, stacklevel=2)
    return tuning if tuning.calls else None


def environment_of(device: Any) -> dict[str, str]:
    """Return what the speed of kernels on a device depends on."""
    if device.platform != "cpu":
        return {"device": device.device_kind, **trial.versions(device)}
    kind = f"{processor()}, {cores()} cores"
    return {"device": kind, **trial.versions(device), "library": _library_digest()}


@functools.cache
def _library_digest() -> str:
    """Return a digest of the native library, so that a new one is timed again."""
    library = pathlib.Path(__file__).parent / "native" / "libjaxrec.so"
    return hashlib.sha256(library.read_bytes()).hexdigest() if library.exists() else "missing"


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor() -> str:
    """Return the name of the processor."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else platform.machine()
