"""Kernels are tried on the card at hand before they run by default.

The tests interpret and compile the kernels for GPUs without a card. What a card computes is tried
on the card itself, the first time that a form of a call is needed: a primitive with its types,
width and optimizer. The kernel runs twice on small data. Both results must be the same bits and
agree with the reference. Where they do not, the reference runs the form, and a warning says why.

Forms that passed are kept in the user's cache directory, for each card, driver, version of JAX and
text of the kernels; JAXREC_CACHE_DIR names another directory. Forms that failed are tried again by
the next process: the card may have had no memory left.
"""

from __future__ import annotations

import concurrent.futures
import contextvars
import dataclasses
import functools
import hashlib
import importlib.metadata
import itertools
import json
import os
import pathlib
import tempfile
import threading
import warnings
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrec.embed.formats import PackedRows, RowFormat, is_packed
from jaxrec.embed.kernels.base import BagLayout, Lookups
from jaxrec.optim.base import RowOptimizer
from jaxrec.optim.hyperparameter import with_numbers

NUM_ROWS = 50
BAGS_EACH = 1100  # of each feature of the batch that lookups are tried on: two blocks of bags
NUM_BAGS = 64  # of the batch that updates are tried on
NUM_LOOKUPS = 20_000  # nine tenths of one row, so that parts of its run are summed in blocks


@dataclasses.dataclass(frozen=True)
class Form:
    """A form of a call: all calls of one form run the same kernel, but for sizes and numbers.

    Attributes:
        primitive: Name of the primitive.
        dtype: Type of the rows or, where there is no table, of the gradients; for packed rows the
            name of their format; "" where there are neither.
        dim: Width of the rows.
        other_dtype: Type of the result of a lookup, or of the gradients of an update.
        weighted: Whether lookups have factors.
        optimizer: The row optimizer of an update, with rates that stand for any.
        bounded: Whether the elements of gradients are bounded.
        row_format: Format of packed rows; None: the rows are plain.
        averaged: Of ``flatten_bags``: whether the bags of some features are averaged.
    """

    primitive: str
    dtype: str = ""
    dim: int = 0
    other_dtype: str = ""
    weighted: bool = False
    optimizer: RowOptimizer | None = None
    bounded: bool = False
    row_format: RowFormat | None = None
    averaged: bool = False

    @classmethod
    def of(cls, primitive: str, arguments: Mapping[str, Any]) -> Form:
        """Return the form of a call, given its arguments by name."""
        if primitive == "flatten_bags":
            is_mean = any(arguments["layout"].means)
            return cls(primitive, weighted=arguments["weights"] is not None, averaged=is_mean)
        rows = arguments["table"] if "table" in arguments else arguments["gradients"]
        dim = rows.shape[1]
        row_format = rows.row_format if is_packed(rows) else None
        dtype = jnp.dtype(rows.dtype).name if row_format is None else row_format.name
        match primitive:
            case "pooled_lookup":
                other = jnp.dtype(arguments["dtype"]).name
                weighted = arguments["weights"] is not None
                return cls(primitive, dtype, dim, other, weighted, row_format=row_format)
            case "fused_update":
                other = jnp.dtype(arguments["gradients"].dtype).name
                weighted = arguments["lookups"].scales is not None
                rule = with_numbers(arguments["optimizer"], itertools.repeat(0.01))
                return cls(primitive, dtype, dim, other, weighted, rule, row_format=row_format)
            case "sum_rows":
                weighted = arguments["lookups"].scales is not None
                bounded = arguments["bound"] is not None
                return cls(primitive, dtype, dim, weighted=weighted, bounded=bounded)
            case _:
                return cls(primitive, dtype, dim, row_format=row_format)

    def __str__(self) -> str:
        # Two formats may have one name.
        rows = self.dtype if self.row_format is None else repr(self.row_format)
        parts = [self.primitive, f"D{self.dim}" if self.dim else "", rows, self.other_dtype]
        parts += ["weighted"] * self.weighted + ["averaged"] * self.averaged
        parts += ["bounded"] * self.bounded
        parts += [] if self.optimizer is None else [repr(self.optimizer)]
        return " ".join(filter(None, parts))

    @property
    def is_lasting(self) -> bool:
        """Whether the form's name says all about it, to a later process too."""
        if self.row_format is not None and not _is_defined_in_jaxrec(self.row_format):
            return False
        if self.optimizer is None:
            return True
        return _is_of_jaxrec(self.optimizer) and " at 0x" not in str(self)

    def examples(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Return arguments of small calls: trees of NumPy arrays, and static values.

        A lookup of bags is tried with bags of three lengths, for which kernels have other tiles.
        Other primitives have one example.
        """
        if self.primitive != "pooled_lookup":
            return [self._example(0)]
        return [self._example(shortest) for shortest in (0, 10, 40)]

    def _example(self, shortest: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return one example. Bags have ``shortest`` to ``shortest + 6`` ids; one has 0, one 300.

        Sums are of whole numbers, so that they are exact in whatever order they are taken. Packed
        rows hold no whole numbers, but numbers of one sign, whose sums differ in the last bits.
        """
        rng = np.random.default_rng(0)
        arrays: dict[str, Any]

        def whole(*shape: int) -> np.ndarray:
            return rng.integers(-4, 5, shape).astype(self.dtype)

        def table() -> Any:
            if self.row_format is None:
                return whole(NUM_ROWS, self.dim)
            rows = jnp.asarray(rng.integers(0, 9, (NUM_ROWS, self.dim)), jnp.float32)
            packed = PackedRows(self.row_format.pack(rows), self.row_format, self.dim)
            return jax.tree.map(np.asarray, packed)

        if self.primitive == "row_lookup":
            rows = rng.integers(-1, NUM_ROWS + 2, 100).astype(np.int32)
            return {"table": table(), "rows": rows}, {}
        if self.primitive in ("pooled_lookup", "flatten_bags"):
            each = BAGS_EACH
            lengths = shortest + rng.integers(0, 7, 2 * each).astype(np.int32)
            lengths[[3, each + 10]] = 0, 300
            capacities = int(lengths[:each].sum()) + 5, int(lengths[each:].sum()) + 5
            ids = rng.integers(0, NUM_ROWS // 2, sum(capacities)).astype(np.int32)
            ids[10] = NUM_ROWS
            weights = np.float32(2.0) ** rng.integers(-2, 3, ids.size)
            arrays = {"ids": ids, "lengths": lengths, "weights": weights if self.weighted else None}
            half = NUM_ROWS // 2
            layout = BagLayout(
                (0, capacities[0]), capacities, (0, each), (each, each), (0, half), (half, half),
                (False, self.primitive == "pooled_lookup" or self.averaged),
            )  # fmt: skip
            if self.primitive == "flatten_bags":
                return arrays, {"layout": layout, "num_rows": NUM_ROWS}
            return arrays | {"table": table()}, {"layout": layout, "dtype": self.other_dtype}
        rows = np.where(
            rng.random(NUM_LOOKUPS) < 0.9, 3, rng.integers(-1, NUM_ROWS + 2, NUM_LOOKUPS)
        )
        bags: Any = rng.integers(0, NUM_BAGS, NUM_LOOKUPS).astype(np.int32)
        scales: Any = np.float32(2.0) ** rng.integers(-1, 2, NUM_LOOKUPS)
        gradients = rng.integers(-4, 5, (NUM_BAGS, self.dim))
        lookups = Lookups(jnp.asarray(rows, jnp.int32), bags, scales if self.weighted else None)
        if self.primitive == "sum_rows":
            arrays = {"lookups": lookups, "gradients": gradients.astype(self.dtype)}
            return arrays, {"num_rows": NUM_ROWS, "bound": 2.0 if self.bounded else None}
        assert self.optimizer is not None
        state = jax.tree.map(np.asarray, self.optimizer.init(NUM_ROWS, self.dim))
        arrays = {"table": table(), "state": state, "lookups": lookups}
        arrays |= {"gradients": gradients.astype(self.other_dtype), "step": np.int32(3)}
        return arrays, {"optimizer": self.optimizer, "table_starts": (0, NUM_ROWS // 2)}


def _is_of_jaxrec(optimizer: RowOptimizer) -> bool:
    """Whether an optimizer, and those that it wraps, are jaxrec's own."""
    fields = (getattr(optimizer, field.name) for field in dataclasses.fields(optimizer))
    wrapped = (value for value in fields if isinstance(value, RowOptimizer))
    return _is_defined_in_jaxrec(optimizer) and all(_is_of_jaxrec(each) for each in wrapped)


def _is_defined_in_jaxrec(value: Any) -> bool:
    return type(value).__module__.startswith("jaxrec.")


def compare(form: Form, kernels: ModuleType, reference: ModuleType) -> str | None:
    """Run a form's examples by both modules; return what is wrong with the first, None: nothing."""
    problems = (_compare_by(*each, form, kernels, reference) for each in form.examples())
    return next((problem for problem in problems if problem is not None), None)


def _compare_by(
    arrays: dict[str, Any],
    static: dict[str, Any],
    form: Form,
    kernels: ModuleType,
    reference: ModuleType,
) -> str | None:
    """Run one example by both modules; see `compare`."""

    def run(module: ModuleType) -> list[np.ndarray]:
        function = functools.partial(getattr(module, form.primitive), **static)
        results = jax.jit(lambda arrays: function(**arrays))(arrays)
        return [np.asarray(result) for result in jax.tree.leaves(results)]

    try:
        expected = run(reference)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JAX warns that Pallas' Triton backend is deprecated.
            first, second = run(kernels), run(kernels)
    except Exception as error:
        return f"it fails: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    for wanted, found, again in zip(expected, first, second, strict=True):
        if found.tobytes() != again.tobytes():
            return "it gives other bits when it is run again"
        if jnp.issubdtype(found.dtype, jnp.integer):
            if not np.array_equal(found, wanted):
                return f"{np.count_nonzero(found != wanted)} of its integers are others"
            continue
        # Sums are exact; what is left are roundings of the optimizer's formula and of the results.
        precision = max(1e-5, float(jnp.finfo(found.dtype).eps))
        wide, narrow = wanted.astype(np.float32), found.astype(np.float32)
        if not np.allclose(narrow, wide, rtol=precision, atol=precision, equal_nan=True):
            with np.errstate(invalid="ignore"):
                difference = np.nanmax(np.abs(narrow - wide))
            return f"its results differ from the reference's, by up to {difference:.3g}"
    return None


def cards() -> list[Any]:
    """Return the NVIDIA GPUs of this process."""
    try:
        return jax.local_devices(backend="cuda")
    except RuntimeError:
        return []


class Trials:
    """The results of the trials of one implementation on one kind of card.

    Args:
        name: Name of the implementation.
        kernels: Its module.
        reference: The module that it is compared with.
        card: The device.
        directory: Where the forms that passed are kept.
    """

    def __init__(
        self,
        name: str,
        kernels: ModuleType,
        reference: ModuleType,
        card: Any,
        directory: pathlib.Path,
    ):
        self.name, self.kernels, self.reference, self.card = name, kernels, reference, card
        environment = {"card": card.device_kind, **versions(card)}
        digest = hashlib.sha256(json.dumps([name, environment]).encode()).hexdigest()[:16]
        self.path = directory / f"trials-{digest}.json"
        self.environment = environment
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
        passed = read_passed(self.path)
        if form.is_lasting and str(form) in passed:
            return None
        # In a thread and a context of its own, apart from the trace, mesh and settings of the call.
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            result = pool.submit(contextvars.Context().run, self._try, form).result()
        if form.is_lasting and result is None:
            passed = sorted({*passed, str(form)})
            # Where that is not possible, the next process tries the form again.
            write_json(self.path, {"environment": self.environment, "passed": passed})
        return result

    def _try(self, form: Form) -> str | None:
        with jax.default_device(self.card):
            return compare(form, self.kernels, self.reference)


def read_passed(path: pathlib.Path) -> list[str]:
    """Return the forms that a file keeps; none where it is missing or damaged."""
    try:
        passed = json.loads(path.read_text())["passed"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    is_sound = isinstance(passed, list) and all(isinstance(form, str) for form in passed)
    return passed if is_sound else []


def versions(device: Any) -> dict[str, str]:
    """Return the driver of a device, and the versions of JAX, jaxrec and the kernels' text."""
    return {
        "platform": device.client.platform_version,
        "jax": jax.__version__,
        "jaxrec": _version(),
        "kernels": _text_digest(),
    }


def write_json(path: pathlib.Path, content: dict[str, Any]) -> bool:
    """Write a file, and return whether that was possible; several processes may do so at once."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(content, file, indent=1)
        os.replace(file.name, path)
    except OSError:
        return False
    return True


def cache_directory() -> pathlib.Path:
    """Return where the forms that passed, and the choices of `jaxrec tune`, are kept."""
    if named := os.environ.get("JAXREC_CACHE_DIR"):
        return pathlib.Path(named)
    import platformdirs  # An import of jaxrec.embed does not need it.

    return platformdirs.user_cache_path("jaxrec")


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
    """Return a digest of the kernels' text, so that a changed kernel is tried again."""
    digest = hashlib.sha256()
    for path in sorted(pathlib.Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
