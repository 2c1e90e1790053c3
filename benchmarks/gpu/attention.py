"""Checks HSTU attention on one GPU against float64, and times it beside tiles of XLA.

    python -m benchmarks.gpu.attention
    python -m benchmarks.gpu.attention --dry-run      # interpreted on the CPU, small

Prints JSON lines. First one for each check: the largest error of an output or a gradient, as a
share of the sum of absolute values that make up the number, and whether a second run gave the same
bits. Then, if all checks passed, one for each shape, way and direction: milliseconds (minimum and
median over rounds), those of the card's kernels, and TFLOP/s by the work that the lengths need:
four operations for each pair that the mask shows, head and column forward, ten backward. The ways
are the Mosaic kernels and XLA's tiles. ``--seconds`` ends the run in time: what no longer begins
has a line that says so. The exit status is 1 if a check or a call failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.measure import SHRINK, copy_bandwidth
from benchmarks.gpu.timing import profile, timed
from jaxrec.embed.kernels import mosaic, use_kernels
from jaxrec.nn import hstu_attention
from jaxrec.nn.attention_mask import key_intervals, make_mask

NAMES = ("output", "query", "key", "value")
# Scores and their gradients are rounded to the type before they are multiplied, and so are results.
# The instruction for tanh has 11 bits.
BOUNDS = {"bfloat16": 2.0**-7, "float16": 2.0**-9}


@dataclasses.dataclass(frozen=True)
class Case:
    """A call that is checked."""

    name: str
    lengths: tuple[int, ...]
    dim: int
    value_dim: int = 0  # 0: as many as `dim`
    dtype: str = "bfloat16"
    heads: int = 2
    mask: tuple[tuple[str, Any], ...] = ()
    padding: int = 37


LENGTHS = (5, 0, 300, 130, 1, 90, 700)
TARGETS = (0, 0, 40, 0, 1, 70, 300)
MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "all": {"causal": False},
    "targets": {"num_targets": TARGETS},
    "groups": {"num_targets": TARGETS, "target_group_size": 3},
    "context": {"contextual_length": 4},
    "window": {
        "num_targets": TARGETS,
        "contextual_length": 4,
        "max_attention_length": 100,
        "min_full_attention_length": 20,
    },
}
CASES = [
    *(Case(name, LENGTHS, 128, mask=tuple(mask.items())) for name, mask in MASKS.items()),
    *(
        Case(f"d{dim}", LENGTHS, dim, mask=(("num_targets", TARGETS),))
        for dim in (32, 64, 192, 256)
    ),
    Case("float16", LENGTHS, 128, dtype="float16"),
    Case("float16 d256", LENGTHS, 256, dtype="float16"),
    Case("d64 values of 256", LENGTHS, 64, 256),
    Case("whole blocks", (1024, 1024), 128, padding=0),
    # The last of two blocks of 64 keys that a program has is all padding.
    Case("block of padding", (5, 300, 130, 1, 90, 660), 128, padding=200),
]
DRY_CASES = [
    Case("causal", (5, 0, 100, 30), 64, heads=1, padding=70),
    Case("d256", (5, 140), 256, heads=1, mask=(("num_targets", (0, 20)),), padding=3),
]


@dataclasses.dataclass(frozen=True)
class Shape:
    """A call that is timed: causal attention of a batch of rows."""

    rows: int
    length: int  # of the longest row
    heads: int
    dim: int
    is_ragged: bool

    @property
    def name(self) -> str:
        lengths = "ragged" if self.is_ragged else "full"
        return f"attention {self.rows} x {self.length} at {self.heads} x {self.dim}, {lengths}"

    @property
    def lengths(self) -> np.ndarray:
        """The lengths of rows: the longest, or uniform from 1 to it."""
        if not self.is_ragged:
            return np.full(self.rows, self.length, np.int32)
        return np.random.default_rng(0).integers(1, self.length + 1, self.rows).astype(np.int32)

    def flop(self, direction: str) -> float:
        """Operations that the lengths need, forward or both ways together."""
        lengths = self.lengths.astype(float)
        pairs = float((lengths * (lengths + 1) / 2).sum())
        return {"forward": 4, "both": 14}[direction] * pairs * self.heads * self.dim


SHAPES = [
    Shape(32, length, 4, dim, is_ragged)
    for length in (1024, 4096)
    for dim in (128, 256)
    for is_ragged in (False, True)
]
DRY_SHAPES = [Shape(2, 96, 1, 64, is_ragged) for is_ragged in (False, True)]
# The ways of a timed call, by the kernels that it names.
WAYS = {"mosaic": ("mosaic", "reference"), "tiles of XLA": ("reference",)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=math.inf, help="then nothing begins")
    parser.add_argument("--dry-run", action="store_true", help="small, interpreted on the CPU")
    arguments = parser.parse_args()
    end, is_dry = time.monotonic() + arguments.seconds, arguments.dry_run
    card = {"kind": "card", "card": jax.devices()[0].device_kind, "jax": jax.__version__}
    card |= {"copy_bytes_per_s": copy_bandwidth(SHRINK if is_dry else 1)}
    print(json.dumps(card), flush=True)
    failures = 0
    for start, run in work(is_dry):
        # Times of wrong numbers are worth nothing.
        if time.monotonic() > end or (failures and start["kind"] == "attention"):
            print(json.dumps(start | {"kind": "left out"}), flush=True)
            continue
        try:
            line = run()
        except Exception as exception:
            line = {"exception": f"{type(exception).__name__}: {exception}"[:300]}
            line |= {"passed": False} if start["kind"] == "check" else {}
        failures += "exception" in line or not line.get("passed", True)
        print(json.dumps(start | line), flush=True)
    sys.exit(failures > 0)


def work(is_dry: bool) -> Iterator[tuple[dict[str, str], Callable[[], dict[str, Any]]]]:
    """Yield the start of each line, and a function that returns its end."""
    vectors = jax.ShapeDtypeStruct((128, 1, 64), jnp.bfloat16)
    call = {"query": vectors, "key": vectors, "value": vectors, "bias": jnp.zeros((0, 1))}
    if (reason := mosaic.refuse("attention", call)) is not None:
        print(f"-- Mosaic's kernels of attention do not run here: {reason}", file=sys.stderr)
    cases = DRY_CASES if is_dry else CASES
    for case in () if reason else cases:
        start = {"kind": "check", "implementation": "mosaic", "primitive": "attention"}
        run = functools.partial(check, case, interpret=is_dry)
        yield start | {"shape": f"attention {case.name}"}, run
    for way, names in WAYS.items():
        # Interpreted kernels are checked above, and cannot be named here.
        if way == "mosaic" and (is_dry or reason):
            continue
        for shape in DRY_SHAPES if is_dry else SHAPES:
            for direction in ("forward", "both"):
                start = {"kind": "attention", "implementation": way, "primitive": direction}
                run = functools.partial(measure, shape, direction, names)
                yield start | {"shape": shape.name}, run


def check(case: Case, *, interpret: bool) -> dict[str, Any]:
    """Return the largest error of a call's output and gradients, and whether bits repeat."""
    lengths, rng = np.array(case.lengths, np.int32), np.random.default_rng(0)
    n, dim, value_dim = int(lengths.sum()), case.dim, case.value_dim or case.dim
    ranges = ranges_of(case, lengths)
    exact = [
        rng.uniform(-1, 1, (n, case.heads, width)).astype(case.dtype)
        for width in (dim, dim, value_dim, value_dim)
    ]
    nothing = [(0, case.padding), (0, 0), (0, 0)]
    given = [jnp.asarray(np.pad(x, nothing, constant_values=np.nan)) for x in exact]
    offsets = jnp.asarray(np.tile(np.cumsum([0, *lengths], dtype=np.int32), (2, 1)))
    alpha, scale = 3 * dim**-0.5, 1 / 64
    bias = jnp.zeros((0, case.heads))
    options = {"alpha": alpha, "scale": scale, "interpret": interpret}

    @jax.jit
    def kernel(query: Any, key: Any, value: Any, gradient: Any) -> Any:
        operands = query, key, value, jnp.asarray(ranges), offsets, bias
        out = mosaic.attention(*operands, **options)
        return out, *mosaic.attention_gradients(*operands, gradient, **options)[:3]

    first = [np.asarray(x) for x in kernel(*given)]
    second = first if interpret else [np.asarray(x) for x in kernel(*given)]
    errors = {}
    for name, found, (wanted, size) in zip(
        NAMES, first, definition(exact, ranges[:, :n], alpha, scale), strict=True
    ):
        if found[n:].any():
            errors[name] = math.inf
            continue
        error = np.abs(found[:n].astype(np.float64) - wanted) / (size + 1e-30)
        errors[name] = float(np.max(error))
    repeats = all(a.tobytes() == b.tobytes() for a, b in zip(first, second, strict=True))
    worst = max(errors.values())
    is_right = worst <= BOUNDS[case.dtype]
    return {"passed": is_right and repeats, "error": worst, "repeats": repeats, "errors": errors}


def ranges_of(case: Case, lengths: np.ndarray) -> np.ndarray:
    """Return the intervals of keys of a case, ``[3 or 4, queries]``."""
    counts = {
        name: np.array(value, np.int32) if isinstance(value, tuple) else value
        for name, value in case.mask
    }
    usual: dict[str, Any] = {
        "causal": True,
        "num_targets": None,
        "contextual_length": 0,
        "max_attention_length": 0,
        "min_full_attention_length": 0,
        "target_group_size": 1,
    }
    mask = make_mask(lengths, **(usual | counts))
    intervals = key_intervals(mask, jnp.asarray(lengths), int(lengths.sum()) + case.padding)
    fields = (intervals.first, intervals.last, intervals.own, intervals.group)
    return np.stack([np.asarray(each) for each in fields if each is not None])


def definition(
    arrays: list[np.ndarray], ranges: np.ndarray, alpha: float, scale: float
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield output and gradients in float64, each with the sum of absolute values of its terms."""
    q, k, v, gradient = (each.astype(np.float64) for each in arrays)
    first, last, own, *group = ranges[:, :, None]
    place = np.arange(len(k))[None]
    sees = (first <= place) & (place <= last)
    for start in group:
        sees |= (start <= place) & (place <= own)
    x = alpha * np.einsum("ahd,bhd->hab", q, k)
    gate = 1 / (1 + np.exp(-x))
    weights = np.where(sees, x * gate, 0)
    of_weights = np.einsum("ahe,bhe->hab", gradient, v)
    of_scores = np.where(sees, of_weights * gate * (1 + x * (1 - gate)), 0)
    # By tanh a weight's rounding is that of x / 2 at least, and a slope's that of 1 + x / 2.
    rounded = np.where(sees, np.maximum(np.abs(weights), np.abs(x) / 2), 0)
    rounded_slopes = np.where(sees, np.abs(of_weights) * (1 + np.abs(x) / 2), 0)
    for terms, rounding, factor, pattern, of in (
        (weights, rounded, scale, "hab,bhe->ahe", v),
        (of_scores, rounded_slopes, alpha * scale, "hab,bhd->ahd", k),
        (of_scores, rounded_slopes, alpha * scale, "hab,ahd->bhd", q),
        (weights, rounded, scale, "hab,ahe->bhe", gradient),
    ):
        wanted = factor * np.einsum(pattern, terms, of)
        yield wanted, factor * np.einsum(pattern, rounding, np.abs(of))


def measure(shape: Shape, direction: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the times of a call, and TFLOP/s by the work that its lengths need."""
    lengths = jnp.asarray(shape.lengths)
    size = shape.rows * shape.length, shape.heads, shape.dim
    arrays = [jax.random.normal(jax.random.key(i), size, jnp.bfloat16) for i in range(4)]

    def forward(query: Any, key: Any, value: Any) -> Any:
        scale = 1 / shape.length
        return hstu_attention(query, key, value, lengths, alpha=shape.dim**-0.5, scale=scale)

    def both(query: Any, key: Any, value: Any, gradient: Any) -> Any:
        out, vjp = jax.vjp(forward, query, key, value)
        return out, vjp(gradient)

    used = arrays[:3] if direction == "forward" else arrays
    with use_kernels(*names):
        program = jax.jit(forward if direction == "forward" else both)
        compiled = program.lower(*used).compile()
    call = functools.partial(compiled, *used)
    line: dict[str, Any] = timed(call)
    if jax.default_backend() == "gpu":
        (kernels,) = profile([call])
        line |= {"device_ms": kernels.total_ms, "launches": round(kernels.launches)}
    line["tflop_per_s"] = shape.flop(direction) / 1e9 / line.get("device_ms", line["ms"][0])
    return line


if __name__ == "__main__":
    main()
