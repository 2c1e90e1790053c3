"""The file that keeps which kernels passed their trial, and which ones `jaxrec tune` chose.

`Trials` finds out whether a kernel computes correctly on the card at hand. `TunedCall` is the
fastest implementation of calls of one form and about one size.
"""

# Both answers hold for one processor or card, its driver, the versions of JAX and jaxrec, and the
# text of the kernels. So there is one file for each combination, in the user's cache directory or
# in JAXREC_CACHE_DIR, named after a hash of these. A file that is damaged or that was written
# elsewhere is ignored.
#
# Only forms that passed are kept. A form that failed may have failed for lack of memory on the
# card, so the next process tries it again.

from __future__ import annotations

import concurrent.futures
import contextvars
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import tempfile
import threading
import typing
import warnings
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import jax

from jaxrec.embed.kernels import trial
from jaxrec.embed.kernels.trial import Form, size_of
from jaxrec.files.cache import cache_directory

# A choice holds for calls up to four times larger or smaller than the one that was timed: batches
# are padded, and the last one may be smaller.
SIZE_RATIO = 4.0

# Exceptions of reading a file that is damaged, or that is not ours.
_DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)


@dataclasses.dataclass(frozen=True)
class TunedCall:
    """The fastest implementation of calls of one form and about one size."""

    form: str  # `str` of a `Form`
    lookups: int  # of the call that was timed
    bags: int
    implementation: str
    options: Mapping[str, int]
    milliseconds: float  # median time of the call
    default: str  # the implementation that runs without a choice
    default_milliseconds: float

    @classmethod
    def from_json(cls, fields: Any) -> TunedCall:
        """Read a choice from JSON; a ValueError says what is wrong with it."""
        kinds = typing.get_type_hints(cls) | {"options": dict}
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
        """Return the ratio of a call's size to the timed one's, or its inverse: 1 or more."""
        sizes = (lookups, self.lookups), (bags, self.bags)
        return math.exp(max(abs(math.log(max(a, 1) / max(b, 1))) for a, b in sizes))


@dataclasses.dataclass(frozen=True)
class Answers:
    """Content of the file that keeps answers of `jaxrec tune` and of trials.

    It holds for one processor or card, its driver and the versions.
    """

    path: pathlib.Path
    environment: Mapping[str, str]
    # By implementation, the names of the forms that passed their trial.
    passed: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    calls: tuple[TunedCall, ...] = ()
    problem: str | None = None  # the reason why the file is ignored

    @classmethod
    def read(cls, device: Any) -> Answers:
        """Read the answers for a device; empty if there is no file or it is ignored."""
        environment = environment_of(device)
        digest = hashlib.sha256(json.dumps(environment, sort_keys=True).encode()).hexdigest()
        path = cache_directory() / f"answers-{digest[:16]}.json"
        return cls(path, environment)._read_again()

    def _read_again(self) -> Answers:
        empty = Answers(self.path, self.environment)
        try:
            content = json.loads(self.path.read_text())
            if content["environment"] != self.environment:
                raise ValueError("it was written for another machine or other versions")
            calls = tuple(map(TunedCall.from_json, content["calls"]))
            passed = {name: tuple(map(str, forms)) for name, forms in content["passed"].items()}
        except FileNotFoundError:
            return empty
        except _DAMAGE as error:
            reason = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
            problem = f"{empty.path} is left out: {reason}; `jaxrec tune` writes it anew"
            return dataclasses.replace(empty, problem=problem)
        return dataclasses.replace(empty, passed=passed, calls=calls)

    def find(self, primitive: str, arguments: Mapping[str, Any]) -> TunedCall | None:
        """Return the choice for calls of this form and about this size; None: there is none."""
        # This runs at every trace of a primitive. The form takes a while, so we look first whether
        # there is any choice for the primitive.
        if not any(call.form.startswith(f"{primitive} ") for call in self.calls):
            return None
        form, size = str(Form.of(primitive, arguments)), size_of(primitive, arguments)
        alike = [call for call in self.calls if call.form == form]
        nearest = min(alike, key=lambda call: call.ratio(*size), default=None)
        return nearest if nearest is not None and nearest.ratio(*size) <= SIZE_RATIO else None

    def with_call(self, call: TunedCall) -> Answers:
        """Return these answers with a choice, which replaces that of the same form and size."""
        same = call.form, call.lookups, call.bags
        others = [each for each in self.calls if (each.form, each.lookups, each.bags) != same]
        return dataclasses.replace(self, calls=(*others, call), problem=None)

    def with_passed(self, implementation: str, form: Form) -> Answers:
        """Return these answers with a form that an implementation passed."""
        forms = *self.passed.get(implementation, ()), str(form)
        passed = {**self.passed, implementation: forms}
        return dataclasses.replace(self, passed=passed, problem=None)

    def write(self) -> bool:
        """Write the file; return whether that was possible. Several processes may do it at once."""
        # Forms that passed since we read the file must not get lost: while `jaxrec tune` runs, its
        # own calls are tried and written by `Trials`.
        passed = {name: {*forms} for name, forms in self._read_again().passed.items()}
        for name, forms in self.passed.items():
            passed.setdefault(name, set()).update(forms)
        content = {
            "environment": self.environment,
            "passed": {name: sorted(forms) for name, forms in passed.items()},
            "calls": [dataclasses.asdict(call) for call in self.calls],
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Replaced in one step, so that another process never reads half of a file.
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False) as file:
                json.dump(content, file, indent=1)
            os.replace(file.name, self.path)
        except OSError:
            return False
        return True

    def of_other_versions(self) -> int:
        """Return the number of choices for this device from other versions or drivers."""
        return sum(map(self._count_others, self.path.parent.glob("*.json")))

    def _count_others(self, path: pathlib.Path) -> int:
        try:
            content = json.loads(path.read_text())
            environment = content["environment"]
            is_other = environment["device"] == self.environment["device"]
            return len(content["calls"]) if is_other and environment != self.environment else 0
        except _DAMAGE:
            return 0


@functools.cache
def kept_for(platform_name: str) -> Answers | None:
    """Return a platform's file of answers, read once; None if it holds no choice of a kernel."""
    # Several processes may run on hosts with different files. Replicated rows must change alike on
    # all of them, to the last bit, so such runs follow no choices.
    if jax.process_count() > 1 or (device := tunable_device(platform_name)) is None:
        return None
    answers = Answers.read(device)
    if answers.problem is not None:
        warnings.warn(answers.problem, RuntimeWarning, stacklevel=2)
    return answers if answers.calls else None


def tunable_device(platform_name: str) -> Any:
    """Return this process's first device of a platform; None: there is none."""
    if platform_name == "cuda":
        return next(iter(trial.cards()), None)
    try:
        return jax.local_devices(backend=platform_name)[0]
    except RuntimeError:
        return None


class Trials:
    """Runs each form of one implementation once on a GPU or a TPU, and keeps the results."""

    def __init__(self, name: str, kernels: ModuleType, card: Any):
        self.name, self.kernels, self.card = name, kernels, card
        self._results: dict[Form, str | None] = {}
        self._lock = threading.Lock()

    def failure(self, form: Form) -> str | None:
        """Return why the kernel failed the trial of a form; None: it passed.

        The first call for a form runs the trial, and warns of a failure.
        """
        with self._lock:
            if form not in self._results:
                self._results[form] = result = self._find(form)
                if result is not None:
                    warnings.warn(
                        f"jaxrec's {self.name} kernel did not pass the trial of {form} on this "
                        f"{self.card.device_kind}, since {result}. The next implementation runs "
                        "instead, which is slower if it is XLA's. "
                        "Please report this with the output of `jaxrec doctor`; "
                        "JAXREC_KERNELS=reference chooses XLA without this warning",
                        RuntimeWarning,
                        stacklevel=2,
                    )
            return self._results[form]

    def _find(self, form: Form) -> str | None:
        if form.is_lasting and str(form) in Answers.read(self.card).passed.get(self.name, ()):
            return None
        # A form is needed while the user's step is traced. In a thread and a context of its own,
        # the trial is not part of that trace and does not see its mesh and settings.
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            result = pool.submit(contextvars.Context().run, self._try, form).result()
        if form.is_lasting and result is None:
            # Read again: other processes may have written meanwhile. If the file cannot be written,
            # the next process tries the form again.
            Answers.read(self.card).with_passed(self.name, form).write()
        return result

    def _try(self, form: Form) -> str | None:
        with jax.default_device(self.card):
            return trial.compare(form, getattr(self.kernels, form.primitive))


def environment_of(device: Any) -> dict[str, str]:
    """Describe the device, its driver and the versions; recorded answers hold for these alone."""
    environment = {
        "device": device.device_kind,
        "platform": device.client.platform_version,  # which names the driver
        "jax": jax.__version__,
        "jaxrec": _version(),
        "kernels": _text_digest(),
    }
    if device.platform == "cpu":
        environment["device"] = f"{processor()}, {cores()} cores"
        environment["library"] = _library_digest()
    return environment


def _version() -> str:
    # A checkout on the path is not installed. The version of a damaged installation is None, and
    # with Python 3.14 and later an error.
    try:
        version: str | None = importlib.metadata.version("jaxrec")
    except (importlib.metadata.PackageNotFoundError, KeyError):
        version = None
    return version or "not installed"


@functools.cache
def _text_digest() -> str:
    """Return a digest of the kernels' text, so that a changed kernel is tried and timed again."""
    digest = hashlib.sha256()
    for path in sorted(pathlib.Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


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
