"""What this machine answered about kernels: which pass their trial, and which `jaxrec tune` chose.

May a kernel run here? That is tried the first time that a form of a call is needed (`Trials`, by
`jaxrec.embed.kernels.trial`). Which implementation is fastest here, with which options? That is
timed when the user asks for it, and holds for calls of one form and about one size (`TunedCall`).

Both answers depend on the same things: the processor or card, its driver, the versions of JAX and
jaxrec, and the text of the kernels. So one file keeps both, for each of these, in the user's cache
directory; JAXREC_CACHE_DIR names another one. A file that is damaged, or that was written
elsewhere, is left out. Forms that failed are not kept: the card may have had no memory left, and
the next process tries them again.
"""

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

# Largest ratio of a call's size to that of a choice for it. Batches are padded, and the last one
# may be smaller.
SIZE_RATIO = 4.0

# What reading a file raises that is not one of ours.
_DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)


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
        """Read a choice as JSON has it; a ValueError says what is wrong with it."""
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
        """Return how many times larger or smaller a call is than the one that was timed."""
        sizes = (lookups, self.lookups), (bags, self.bags)
        return math.exp(max(abs(math.log(max(a, 1) / max(b, 1))) for a, b in sizes))


@dataclasses.dataclass(frozen=True)
class Answers:
    """The answers that hold for one processor or card.

    Attributes:
        path: The file that keeps them.
        environment: The processor or card, its driver and the versions that they hold for.
        passed: Names of the forms that passed their trial, by implementation.
        calls: The choices of `jaxrec tune`.
        problem: Reason why the file is left out; None: it is not.
    """

    path: pathlib.Path
    environment: Mapping[str, str]
    passed: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    calls: tuple[TunedCall, ...] = ()
    problem: str | None = None

    @classmethod
    def read(cls, device: Any) -> Answers:
        """Read the answers that are kept for a device; none where the file is of no use."""
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
        """Return the choice for a call, given its arguments by name; None: there is none.

        Among the choices for calls of its form, the nearest in size is taken, within `SIZE_RATIO`.
        """
        if not any(call.form.startswith(f"{primitive} ") for call in self.calls):
            return None
        form, size = str(Form.of(primitive, arguments)), size_of(primitive, arguments)
        alike = [call for call in self.calls if call.form == form]
        nearest = min(alike, key=lambda call: call.ratio(*size), default=None)
        return nearest if nearest is not None and nearest.ratio(*size) <= SIZE_RATIO else None

    def with_call(self, call: TunedCall) -> Answers:
        """Return these answers and a choice, in the place of that for a call of the same size."""
        same = call.form, call.lookups, call.bags
        others = [each for each in self.calls if (each.form, each.lookups, each.bags) != same]
        return dataclasses.replace(self, calls=(*others, call), problem=None)

    def with_passed(self, implementation: str, form: Form) -> Answers:
        """Return these answers and a form that an implementation passed."""
        forms = *self.passed.get(implementation, ()), str(form)
        passed = {**self.passed, implementation: forms}
        return dataclasses.replace(self, passed=passed, problem=None)

    def write(self) -> bool:
        """Write the file; return whether that was possible. Several processes may do so at once."""
        # `jaxrec tune` writes again and again what it read at its start, and its own calls were
        # tried meanwhile.
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
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False) as file:
                json.dump(content, file, indent=1)
            os.replace(file.name, self.path)
        except OSError:
            return False
        return True

    def of_other_versions(self) -> int:
        """Return the number of choices kept for this device by other versions or drivers."""
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
    """Return the answers with the choices that hold on a platform, read once; None: none do.

    Processes of one run may lie on hosts with other files, and replicated rows must change alike on
    all of them: such processes use no choices.
    """
    if jax.process_count() > 1 or (device := tunable_device(platform_name)) is None:
        return None
    answers = Answers.read(device)
    if answers.problem is not None:
        warnings.warn(answers.problem, RuntimeWarning, stacklevel=2)
    return answers if answers.calls else None


def tunable_device(platform_name: str) -> Any:
    """Return the device of this process whose choices hold on a platform; None: there is none."""
    if platform_name == "cuda":
        return next(iter(trial.cards()), None)
    try:
        return jax.local_devices(backend=platform_name)[0]
    except RuntimeError:
        return None


class Trials:
    """The trials of one implementation on one kind of card.

    Args:
        name: Name of the implementation.
        kernels: Its module.
        card: The device.
    """

    def __init__(self, name: str, kernels: ModuleType, card: Any):
        self.name, self.kernels, self.card = name, kernels, card
        self._results: dict[Form, str | None] = {}
        self._lock = threading.Lock()

    def failure(self, form: Form) -> str | None:
        """Return what is wrong with a form; None: nothing. Warns of it once.

        The first call for a form tries it, unless it passed in an earlier process.
        """
        with self._lock:
            if form not in self._results:
                self._results[form] = result = self._find(form)
                if result is not None:
                    warnings.warn(
                        f"jaxrec computes {form} by XLA on this {self.card.device_kind}, more "
                        f"slowly: its {self.name} kernel did not pass the trial, since {result}. "
                        "Please report this with the output of `jaxrec doctor`; "
                        "JAXREC_KERNELS=reference chooses XLA without this warning",
                        RuntimeWarning,
                        stacklevel=2,
                    )
            return self._results[form]

    def _find(self, form: Form) -> str | None:
        if form.is_lasting and str(form) in Answers.read(self.card).passed.get(self.name, ()):
            return None
        # In a thread and a context of its own, apart from the trace, mesh and settings of the call.
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            result = pool.submit(contextvars.Context().run, self._try, form).result()
        if form.is_lasting and result is None:
            # Other processes may have written since. If the file cannot be written, the next
            # process tries the form again.
            Answers.read(self.card).with_passed(self.name, form).write()
        return result

    def _try(self, form: Form) -> str | None:
        with jax.default_device(self.card):
            return trial.compare(form, getattr(self.kernels, form.primitive))


def cache_directory() -> pathlib.Path:
    """Return the directory that answers are kept in."""
    if named := os.environ.get("JAXREC_CACHE_DIR"):
        return pathlib.Path(named)
    import platformdirs  # An import of jaxrec.embed does not need it.

    return platformdirs.user_cache_path("jaxrec")


def environment_of(device: Any) -> dict[str, str]:
    """Return what answers about kernels on a device depend on."""
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
    # A checkout on the path is not installed. Of a damaged installation the version is None, and
    # for Python 3.14 and later an error.
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
