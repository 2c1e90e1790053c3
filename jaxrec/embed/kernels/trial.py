"""The trial of a kernel on the card at hand, by forms of calls.

A form is a primitive with its types, width and optimizer. The first time that a process needs a
form, the kernel runs twice on small data. Both results must have the same bits and agree with the
reference. If they do not, the reference runs calls of that form, and a warning says why.
"""

# Why on the user's card, which is a GPU or a TPU
#
# The tests run without one: they interpret the kernels, and compile them to machine code. The
# numbers that come out of a card also depend on its driver and on the compiler there, and a wrong
# embedding shows only in a model that learns a bit worse. So no kernel is trusted before it was
# compared with the reference on the card where it will run.
#
# A new primitive needs `Form.of`, `size_of` and an example here.

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxrec.embed.formats import PackedRows, RowFormat, as_table, is_packed
from jaxrec.embed.kernels import reference
from jaxrec.embed.kernels.base import BagLayout, Lookups
from jaxrec.embed.state import state_format
from jaxrec.optim.base import RowOptimizer
from jaxrec.optim.hyperparameters import resolve, with_numbers

# Sizes of the examples. They are small, and still reach each branch of the kernels.
NUM_ROWS = 50
BAGS_EACH = 1100  # bags of each of two features in a lookup: more than a block of 1024
NUM_BAGS = 64  # bags of an update
NUM_LOOKUPS = 20_000  # of an update: nine in ten of one row, whose parts are summed in blocks


Arguments: TypeAlias = dict[str, Any]
Example: TypeAlias = tuple[Arguments, Arguments]
"""Arguments of a call by name: trees of NumPy arrays, and static values."""


@dataclasses.dataclass(frozen=True)
class Form:
    """A form of a call. Calls of one form run the same kernel, whatever their sizes and numbers."""

    primitive: str
    dtype: str = ""  # of the rows, or of the gradients if there is no table; or a format's name
    dim: int = 0
    other_dtype: str = ""  # of a lookup's result, or of an update's gradients
    weighted: bool = False  # whether lookups have factors
    optimizer: RowOptimizer | None = None  # of an update, its rates replaced by 0.01
    bounded: bool = False  # whether the elements of gradients are clipped
    row_format: RowFormat | None = None  # of packed rows
    averaged: bool = False  # in `flatten_bags`: whether the bags of some features are averaged
    value_dim: int = 0  # of attention, whose ``dim`` is that of queries
    grouped: bool = False  # whether queries of attention have groups

    @classmethod
    def of(cls, primitive: str, arguments: Mapping[str, Any]) -> Form:
        """Return the form of a call, given its arguments by name."""
        if primitive == "flatten_bags":
            is_mean = any(arguments["layout"].means)
            return cls(primitive, weighted=arguments["weights"] is not None, averaged=is_mean)
        if primitive in ("attention", "attention_gradients"):
            query, value = arguments["query"], arguments["value"]
            return cls(
                primitive,
                jnp.dtype(query.dtype).name,
                query.shape[2],
                value_dim=value.shape[2],
                grouped=arguments["ranges"].shape[0] > 3,
            )
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
                # Another learning rate is no other kernel: rates are operands.
                rule = with_numbers(arguments["optimizer"], itertools.repeat(0.01))
                return cls(primitive, dtype, dim, other, weighted, rule, row_format=row_format)
            case "sum_rows":
                weighted = arguments["lookups"].scales is not None
                bounded = arguments["bound"] is not None
                return cls(primitive, dtype, dim, weighted=weighted, bounded=bounded)
            case _:
                return cls(primitive, dtype, dim, row_format=row_format)

    def __str__(self) -> str:
        # By repr: two formats may have one name, such as "int8".
        rows = self.dtype if self.row_format is None else repr(self.row_format)
        parts = [self.primitive, f"D{self.dim}" if self.dim else "", rows, self.other_dtype]
        parts += ["weighted"] * self.weighted + ["averaged"] * self.averaged
        parts += ["bounded"] * self.bounded + ["grouped"] * self.grouped
        parts += [f"values of {self.value_dim}"] if self.value_dim else []
        parts += [] if self.optimizer is None else [repr(self.optimizer)]
        return " ".join(filter(None, parts))

    @property
    def is_lasting(self) -> bool:
        """Whether the form's name means the same form in a later process."""
        # A user's own format or optimizer may change under the same name. A repr with an address
        # names another object in each process.
        if self.row_format is not None and not _is_defined_in_jaxrec(self.row_format):
            return False
        if self.optimizer is None:
            return True
        return _is_of_jaxrec(self.optimizer) and " at 0x" not in str(self)

    def examples(self) -> list[Example]:
        """Return small calls of this form."""
        # For bags of three lengths, as kernels take other tiles for short, middling and long ones.
        shortest = (0, 10, 40) if self.primitive == "pooled_lookup" else (0,)
        return [_EXAMPLES[self.primitive](self, np.random.default_rng(0), n) for n in shortest]


def size_of(primitive: str, arguments: Mapping[str, Any]) -> tuple[int, int]:
    """Return a call's numbers of lookups and of bags, given its arguments by name."""
    match primitive:
        case "pooled_lookup":
            return arguments["layout"].num_positions, arguments["layout"].num_bags
        case "row_lookup":
            return (arguments["rows"].size,) * 2
        case _:
            return arguments["lookups"].rows.size, arguments["gradients"].shape[0]


# The examples. They sum whole numbers times powers of two, so that float32 sums are exact in any
# order, and a kernel that adds in another order than the reference agrees with it. Packed rows do
# not hold whole numbers exactly. Theirs have one sign, so that sums differ in the last bits alone.


def _table(form: Form, rng: np.random.Generator) -> Any:
    if form.row_format is None:
        return rng.integers(-4, 5, (NUM_ROWS, form.dim)).astype(form.dtype)
    rows = jnp.asarray(rng.integers(0, 9, (NUM_ROWS, form.dim)), jnp.float32)
    packed = PackedRows(form.row_format.pack(rows), form.row_format, form.dim)
    return jax.tree.map(np.asarray, packed)


def _row_lookup(form: Form, rng: np.random.Generator, _: int) -> Example:
    rows = rng.integers(-1, NUM_ROWS + 2, 100).astype(np.int32)
    return {"table": _table(form, rng), "rows": rows}, {}


def _batch(
    form: Form, rng: np.random.Generator, shortest: int, *, is_averaged: bool
) -> tuple[Arguments, BagLayout]:
    """Return a batch and its layout: bags of ``shortest`` to ``shortest + 6`` ids, one of 300."""
    each, half = BAGS_EACH, NUM_ROWS // 2
    lengths = shortest + rng.integers(0, 7, 2 * each).astype(np.int32)
    lengths[[3, each + 10]] = 0, 300
    capacities = int(lengths[:each].sum()) + 5, int(lengths[each:].sum()) + 5
    ids = rng.integers(0, half, sum(capacities)).astype(np.int32)
    ids[10] = NUM_ROWS
    weights = np.float32(2.0) ** rng.integers(-2, 3, ids.size)
    layout = BagLayout(
        (0, capacities[0]), capacities, (0, each), (each, each), (0, half), (half, half),
        (False, is_averaged),
    )  # fmt: skip
    return {"ids": ids, "lengths": lengths, "weights": weights if form.weighted else None}, layout


def _flatten_bags(form: Form, rng: np.random.Generator, shortest: int) -> Example:
    arrays, layout = _batch(form, rng, shortest, is_averaged=form.averaged)
    return arrays, {"layout": layout, "num_rows": NUM_ROWS}


def _pooled_lookup(form: Form, rng: np.random.Generator, shortest: int) -> Example:
    arrays, layout = _batch(form, rng, shortest, is_averaged=True)
    return {**arrays, "table": _table(form, rng)}, {"layout": layout, "dtype": form.other_dtype}


def _gradients(form: Form, rng: np.random.Generator, dtype: str) -> Arguments:
    rows = np.where(rng.random(NUM_LOOKUPS) < 0.9, 3, rng.integers(-1, NUM_ROWS + 2, NUM_LOOKUPS))
    rows[rows == 7] = NUM_ROWS  # A row that does not occur keeps its numbers.
    bags: Any = rng.integers(0, NUM_BAGS, NUM_LOOKUPS).astype(np.int32)
    scales: Any = np.float32(2.0) ** rng.integers(-1, 2, NUM_LOOKUPS)
    gradients = rng.integers(-4, 5, (NUM_BAGS, form.dim)).astype(dtype)
    lookups = Lookups(jnp.asarray(rows, jnp.int32), bags, scales if form.weighted else None)
    return {"lookups": lookups, "gradients": gradients}


def _sum_rows(form: Form, rng: np.random.Generator, _: int) -> Example:
    bound = 2.0 if form.bounded else None
    return _gradients(form, rng, form.dtype), {"num_rows": NUM_ROWS, "bound": bound}


def _fused_update(form: Form, rng: np.random.Generator, _: int) -> Example:
    assert form.optimizer is not None
    arrays = _gradients(form, rng, form.other_dtype) | {"table": _table(form, rng)}
    state = {}
    for name, array in _used_state(form.optimizer, form.dim, rng).items():
        row_format = state_format(form.optimizer, name, array.ndim)
        is_number = array.ndim == 1
        state[name] = array if is_number else as_table(row_format.pack(array), row_format, form.dim)
    state = jax.tree.map(np.asarray, state)
    static = {"optimizer": form.optimizer, "table_starts": (0, NUM_ROWS // 2)}
    return {**arrays, "state": state, "step": np.int32(3)}, static


def _used_state(optimizer: RowOptimizer, dim: int, rng: np.random.Generator) -> dict[str, Any]:
    """Return the state of rows after an update."""
    # New rows have equal state, mostly zeros: a kernel that loads another row's would pass.
    rows, gradients = rng.integers(-4, 5, (2, NUM_ROWS, dim)).astype(np.float32)

    def update(rows: Array, gradients: Array, state: Any, step: Array) -> Any:
        set_now, step = resolve(optimizer, step)
        return set_now.update(rows, gradients, state, step)[1]

    return jax.jit(update)(rows, gradients, optimizer.init(NUM_ROWS, dim), np.int32(2))


# Rows of attention: several blocks of 128 in one, several in one block, and one of targets alone.
_LENGTHS, _TARGETS = (5, 0, 300, 1, 90, 70), (0, 0, 40, 1, 89, 0)


def _attention(form: Form, rng: np.random.Generator, _: int) -> Example:
    ends = np.cumsum(_LENGTHS)
    row = np.repeat(np.arange(len(_LENGTHS)), _LENGTHS)
    place, count = np.arange(ends[-1]), ends[-1] + 9  # nine elements of padding
    first, last = (ends - _LENGTHS)[row], np.minimum(place, (ends - _TARGETS)[row] - 1)
    fields = [first, last, place, place] if form.grouped else [first, place, place]
    nothing = [np.iinfo(np.int32).max, -1, -1, np.iinfo(np.int32).max]
    ranges = [
        np.concatenate([field, np.full(9, value)])
        for field, value in zip(fields, nothing, strict=False)
    ]
    widths = {"query": form.dim, "key": form.dim, "value": form.value_dim}
    vectors = {
        name: rng.uniform(-1, 1, (count, 2, width)).astype(form.dtype)
        for name, width in widths.items()
    }
    arrays = {
        **vectors,
        "ranges": np.stack(ranges).astype(np.int32),
        "offsets": np.tile(np.append(0, ends), (2, 1)).astype(np.int32),
        "bias": np.zeros((0, 2), np.float32),
    }
    # Scores are about 1, and so are sums.
    return arrays, {"alpha": 3 * form.dim**-0.5, "scale": 0.25}


def _attention_gradients(form: Form, rng: np.random.Generator, _: int) -> Example:
    arrays, static = _attention(form, rng, 0)
    gradient = rng.uniform(-1, 1, arrays["value"].shape).astype(form.dtype)
    return {**arrays, "gradient": gradient}, static


_EXAMPLES: dict[str, Callable[[Form, np.random.Generator, int], Example]] = {
    "row_lookup": _row_lookup,
    "flatten_bags": _flatten_bags,
    "pooled_lookup": _pooled_lookup,
    "sum_rows": _sum_rows,
    "fused_update": _fused_update,
    "attention": _attention,
    "attention_gradients": _attention_gradients,
}


def _is_of_jaxrec(optimizer: RowOptimizer) -> bool:
    """Return whether an optimizer and those that it wraps are defined in jaxrec."""
    fields = (getattr(optimizer, field.name) for field in dataclasses.fields(optimizer))
    wrapped = (value for value in fields if isinstance(value, RowOptimizer))
    return _is_defined_in_jaxrec(optimizer) and all(_is_of_jaxrec(each) for each in wrapped)


def _is_defined_in_jaxrec(value: Any) -> bool:
    return type(value).__module__.startswith("jaxrec.")


def compare(form: Form, kernel: Callable[..., Any]) -> str | None:
    """Compare a kernel with the reference on a form's examples.

    Returns the first difference in words; None: there is none.
    """
    problems = (_compare(*example, form.primitive, kernel) for example in form.examples())
    return next((problem for problem in problems if problem is not None), None)


def _compare(
    arrays: Arguments, static: Arguments, primitive: str, kernel: Callable[..., Any]
) -> str | None:
    def run(function: Callable[..., Any]) -> list[Any]:
        results = jax.jit(lambda arrays: function(**arrays, **static))(arrays)
        return jax.tree.leaves(results, is_leaf=is_packed)

    try:
        expected = run(getattr(reference, primitive))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JAX warns that Pallas' Triton backend is deprecated.
            first, second = run(kernel), run(kernel)
    except Exception as error:
        return f"it fails: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    for wanted, found, again in zip(expected, first, second, strict=True):
        # Bytes, so that NaN equals NaN and -0.0 does not equal 0.0.
        if _bytes(found) != _bytes(again):
            return "it gives other bits when it is run again"
        if (problem := _difference(wanted, found, _ROUNDING.get(primitive))) is not None:
            return problem
    return None


def _bytes(array: Any) -> bytes:
    return np.asarray(array.stored if is_packed(array) else array).tobytes()


# By packed format, the largest distance of two numbers of a row, as a share of its largest one.
_STEPS = {
    "int8": 2 / 255,
    "bfloat16": 2.0**-8,
    "float8_e4m3": 2.0**-3,
    "float8_e5m2": 2.0**-2,
    "ufloat8_e5m3": 2.0**-3,
}


# Attention multiplies scores that were rounded to 16 bits.
_ROUNDING = {"attention": 0.01, "attention_gradients": 0.01}


def _difference(wanted: Any, found: Any, precision: float | None) -> str | None:
    """Return how a result differs from the reference's; None: it does not.

    ``precision`` is the error that a number may have. None: only the rounding of a result.
    """
    if is_packed(found):
        wide, narrow = np.asarray(wanted[:]), np.asarray(found[:])
        # Roundings of the optimizer's formula may differ. A few numbers are then rounded the other
        # way, and a row's scale in its last bit.
        largest = np.abs(wide).max(axis=1, keepdims=True, initial=0)
        error = np.abs(narrow - wide) - 1e-4 * largest - 1e-6
        is_other = error > 0
        step = 1.01 * _STEPS[found.row_format.name] * largest
        if not (error <= step).all() or np.mean(is_other) > 0.02:
            return f"{np.count_nonzero(is_other)} of its packed numbers are others"
        return None
    wanted, found = np.asarray(wanted), np.asarray(found)
    if jnp.issubdtype(found.dtype, jnp.integer):
        if np.array_equal(found, wanted):
            return None
        return f"{np.count_nonzero(found != wanted)} of its integers are others"
    # Sums are exact. Roundings of the optimizer's formula and of the results may differ.
    precision = precision or max(1e-5, float(jnp.finfo(found.dtype).eps))
    wide, narrow = wanted.astype(np.float32), found.astype(np.float32)
    if np.allclose(narrow, wide, rtol=precision, atol=precision, equal_nan=True):
        return None
    with np.errstate(invalid="ignore"):
        difference = np.nanmax(np.abs(narrow - wide))
    return f"its results differ from the reference's, by up to {difference:.3g}"


def cards() -> list[Any]:
    """Return this process's NVIDIA GPUs."""
    return _devices("cuda")


def tpus() -> list[Any]:
    """Return this process's TPUs."""
    return _devices("tpu")


def _devices(platform: str) -> list[Any]:
    try:
        return jax.local_devices(backend=platform)
    except RuntimeError:
        return []
