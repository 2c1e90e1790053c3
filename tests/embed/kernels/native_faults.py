"""Calls of the native library with one wrong operand, result or attribute each.

`CALLS` has a right call of each function. A fault changes one thing of it and gives words of the
error. `run` makes such calls in a process of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrec.embed.kernels import cpu
from jaxrec.embed.kernels.native_call import target_name

# Two features: the start and number of their ids, lengths and rows, whether they are averaged, and
# the first row and the step of their bags.
LAYOUT = np.array([[0, 3, 0, 2, 0, 5, 0, 0, 2], [3, 3, 2, 2, 5, 5, 1, 1, 2]], np.int64)


@dataclasses.dataclass(frozen=True)
class Call:
    """Operands and results by name, as shapes with types or as arrays."""

    operands: Mapping[str, Any]
    results: Mapping[str, Any]
    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    in_place: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __call__(self, target: str) -> list[np.ndarray]:
        names, results = list(self.operands), list(self.results)
        aliases = {
            names.index(name): results.index(result)
            for name, result in self.in_place.items()
            if name in names
        }
        call = jax.ffi.ffi_call(target, list(self.results.values()), input_output_aliases=aliases)
        operands = [
            jnp.zeros(each.shape, each.dtype) if isinstance(each, jax.ShapeDtypeStruct) else each
            for each in self.operands.values()
        ]
        outputs = call(*operands, **self.attributes)
        return [np.asarray(each) for each in jax.block_until_ready(outputs)]

    def but(self, **changes: Any) -> Call:
        """Return the call with other operands, results or attributes; None: without one."""
        fields = {"in_place": changes.pop("in_place", self.in_place)}
        for field in ("operands", "results", "attributes"):
            values = dict(getattr(self, field))
            for name in values.keys() & changes.keys():
                values[name] = changes.pop(name)
            fields[field] = {name: each for name, each in values.items() if each is not None}
        assert not changes, f"there are no {sorted(changes)}"
        return dataclasses.replace(self, **fields)


def ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def floats(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def bytes_(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.uint8)


def layout(feature: int, field: int, number: int) -> np.ndarray:
    """Return the numbers of `LAYOUT` with one changed."""
    numbers = LAYOUT.copy()
    numbers[feature, field] = number
    return numbers.reshape(-1)


_BATCH = {
    "ids": jnp.array([1, 4, 0, 2, -1, 9], jnp.int32),
    "lengths": jnp.array([2, 1, -5, 2**31 - 1], jnp.int32),
    "weights": floats(0),
}
_LAYOUT = {"layout": LAYOUT.reshape(-1)}
_LOOKUPS = {
    "rows": jnp.array([3, -1, 99, 2**31 - 1, 3], jnp.int32),
    "bags": jnp.array([0, 1, 0, 1, -7], jnp.int32),
    "scales": floats(0),
}
_UPDATE: dict[str, Any] = dict.fromkeys(
    ("eps", "b1", "b2", "rest1", "rest2", "log_b1", "log_b2", "weight_decay"), np.float32(0.5)
) | {
    "rule": np.int32(3),
    "counts_rows": True,
    "decay": np.int32(0),
    "max_norm": np.float32(9),
    "bound": np.float32(9),
    "stochastic": False,
    "parts": np.int64(2),
}

_ATTENTION = {
    "query": floats(5, 2, 4),
    "key": floats(6, 2, 4),
    "value": floats(6, 2, 3),
    "ranges": ints(4, 5),
    "offsets": ints(2, 3),
    "bias": floats(7, 2),
}

CALLS = {
    "new_rows": Call({"row": floats(3)}, {"result": floats(5, 3)}),
    "pooled_lookup": Call({**_BATCH, "table": floats(10, 4)}, {"result": floats(4, 4)}, _LAYOUT),
    "flatten_bags": Call(
        _BATCH,
        {"out_rows": ints(6), "out_bags": ints(6), "out_scales": floats(6)},
        {**_LAYOUT, "num_rows": np.int64(10)},
    ),
    "row_lookup": Call(
        {"rows": _LOOKUPS["rows"], "table": floats(10, 4)}, {"result": floats(5, 4)}
    ),
    "packed_pooled_lookup": Call(
        {**_BATCH, "packed": bytes_(10, 8)},
        {"result": floats(4, 4)},
        {**_LAYOUT, "code": np.int32(0)},
    ),
    "packed_row_lookup": Call(
        {"rows": _LOOKUPS["rows"], "packed": bytes_(10, 8)},
        {"result": floats(5, 4)},
        {"code": np.int32(0)},
    ),
    "max_lookup": Call(
        {"ids": _BATCH["ids"], "lengths": _BATCH["lengths"], "table": floats(10, 4)},
        {"result": floats(4, 4), "winners": ints(4, 4)},
        _LAYOUT,
    ),
    "packed_max_lookup": Call(
        {"ids": _BATCH["ids"], "lengths": _BATCH["lengths"], "packed": bytes_(10, 8)},
        {"result": floats(4, 4), "winners": ints(0, 4)},
        {**_LAYOUT, "code": np.int32(0)},
    ),
    "max_gradients": Call(
        {"winners": ints(4, 3), "gradients": floats(4, 3), "bags": jnp.int32([0, 0, 3, -1, 4, 2])},
        {"result": floats(6, 3)},
    ),
    "drop_ids": Call(
        {"ids": _BATCH["ids"], "lengths": _BATCH["lengths"]},
        {"new_ids": ints(6), "new_lengths": ints(4), "sources": ints(6)},
        {"features": np.array([0, 3, 0, 2, 4, 3, 3, 2, 2, 0], np.int64)},
    ),
    "build_runs": Call(
        {"rows": _LOOKUPS["rows"]},
        {"order": ints(5), "segments": ints(5), "unique": ints(5), "inverse": ints(5)},
        {"num_rows": np.int64(10)},
    ),
    "bucket": Call({"owners": _LOOKUPS["rows"]}, {"order": ints(5), "counts": ints(4)}),
    "shift_rows": Call(
        {"rows": _LOOKUPS["rows"]},
        {"result": ints(5)},
        {
            "starts": np.int64([0, 5]),
            "shifts": np.int64([100, -5]),
            "num_rows": np.int64(10),
            "outside": np.int64(99),
        },
    ),
    "sum_rows": Call(
        {**_LOOKUPS, "gradients": floats(2, 4)}, {"result": floats(10, 4)}, {"bound": np.float32(9)}
    ),
    "fused_update": Call(
        {
            **_LOOKUPS,
            "rates": floats(3),
            "number": ints(),
            "part_1": floats(1, 4),
            "part_2": floats(1, 4),
            "table": floats(10, 4),
            "first": floats(10, 4),
            "second": floats(10, 4),
            "counts": floats(10),
        },
        {
            "new_table": floats(10, 4),
            "new_first": floats(10, 4),
            "new_second": floats(10, 4),
            "new_counts": floats(10),
        },
        _UPDATE,
        {name: f"new_{name}" for name in ("table", "first", "second", "counts")},
    ),
    "pair_products": Call({"vectors": floats(2, 3, 4)}, {"result": floats(2, 3)}),
    "pair_gradients": Call(
        {"vectors": floats(2, 3, 4), "gradient": floats(2, 3)}, {"result": floats(2, 3, 4)}
    ),
    "attention": Call(_ATTENTION, {"result": floats(5, 2, 3)}, {"alpha": np.float32(1)}),
    "attention_gradients": Call(
        _ATTENTION | {"gradient": floats(5, 2, 3)},
        {
            "of_query": floats(5, 2, 4),
            "of_key": floats(6, 2, 4),
            "of_value": floats(6, 2, 3),
            "of_bias": floats(7, 2),
        },
        {"alpha": np.float32(1)},
    ),
}

_NO_COUNTS = {"counts_rows": False, "counts": None, "new_counts": None}


def _state(name: str, *shape: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Return an array of `fused_update`, as operand and as result."""
    return {name: floats(*shape), f"new_{name}": floats(*shape)}


BIG = 2**31 - 1
_OF_BATCHES = [
    ("layout_short", "17 numbers", {"layout": LAYOUT.reshape(-1)[:17]}),
    ("no_features", "has 0 bags|`rows` has 6 elements, not 0", {"layout": np.zeros(0, np.int64)}),
    ("ids_short", "reads ids 3 to 6 of 5", {"ids": ints(5)}),
    ("ids_square", r"`ids` has the shape \[2, 3\]", {"ids": ints(2, 3)}),
    ("ids_floats", "Wrong buffer dtype", {"ids": floats(6)}),
    ("lengths_short", "reads lengths 2 to 4 of 3", {"lengths": ints(3)}),
    ("weights_short", "`weights` has 5 elements, not 6", {"weights": floats(5)}),
    ("first_id", "reads ids 4 to 7 of 6", {"layout": layout(1, 0, 4)}),
    ("negative_id", "number 0 of feature 1 .* is -1", {"layout": layout(1, 0, -1)}),
    ("huge_capacity", "number 1 of feature 0", {"layout": layout(0, 1, 2**63 - 1)}),
    ("capacity", "reads ids 0 to 2147483647 of 6", {"layout": layout(0, 1, BIG)}),
    ("first_length", "reads lengths 3 to 5 of 4", {"layout": layout(1, 2, 3)}),
    ("stride", "reads lengths 0 to 5 of 4", {"layout": layout(0, 3, 5)}),
    ("row_offset", "reads rows 6 to 11 of 10", {"layout": layout(1, 4, 6)}),
    ("row_count", "reads rows 5 to 11 of 10", {"layout": layout(1, 5, 6)}),
    ("mean", "pooling 2", {"layout": layout(0, 6, 2)}),
    ("out_row", "writes 2 rows from 3", {"layout": layout(1, 7, 3)}),
    ("out_step", "writes 2 rows from 1 in steps of 1000", {"layout": layout(1, 8, 1000)}),
    ("no_layout", "Wrong number of attributes", {"layout": None}),
    ("layout_int32", "expected S64 but got S32", {"layout": LAYOUT.reshape(-1).astype(np.int32)}),
]

FAULTS = {
    f"{target}-{name}": (target, words, changes)
    for target, faults in {
        "new_rows": [
            ("columns", r"\[5, 2\], not that of rows \[3\]", {"result": floats(5, 2)}),
            ("rank", r"shape \[15\]", {"result": floats(15)}),
            ("type", "`row` is F32, the result F16", {"result": floats(5, 3, dtype="float16")}),
        ],
        "pooled_lookup": [
            *_OF_BATCHES,
            ("table_short", "reads rows 5 to 10 of 9", {"table": floats(9, 4)}),
            ("table_empty", "`table` has no rows", {"table": floats(0, 4)}),
            ("table_narrow", r"\[4, 4\], not \[4, 3\]", {"table": floats(10, 3)}),
            ("table_without_columns", "has no columns", {"table": floats(10, 0)}),
            ("table_wide", "at most 4096 columns", {"table": floats(10, 5000)}),
            ("table_cube", r"shape \[10, 4, 1\]", {"table": floats(10, 4, 1)}),
            ("table_int", "`table` is S32", {"table": ints(10, 4)}),
            ("no_table", "`table` is missing", {"table": None}),
            ("result_short", "4 bags, the result 3", {"result": floats(3, 4)}),
            ("result_long", "4 bags, the result 5", {"result": floats(5, 4)}),
            ("result_flat", r"shape \[16\]", {"result": floats(16)}),
            ("result_int", "`result` is S32", {"result": ints(4, 4)}),
        ],
        "flatten_bags": [
            *_OF_BATCHES,
            ("num_rows", "reads rows 5 to 10 of 9", {"num_rows": np.int64(9)}),
            ("negative_rows", "`num_rows` is -1", {"num_rows": np.int64(-1)}),
            ("rows_short", "`rows` has 5 elements, not 6", {"out_rows": ints(5)}),
            ("bags_short", "`bags` has 5 elements, not 6", {"out_bags": ints(5)}),
            ("scales_short", "`scales` has 5 elements, not 6", {"out_scales": floats(5)}),
            ("no_scales", "`scales` has 0 elements, not 6", {"out_scales": floats(0)}),
        ],
        "row_lookup": [
            ("rows_square", r"`rows` has the shape \[5, 1\]", {"rows": ints(5, 1)}),
            ("result_short", r"\[4, 4\], not \[5, 4\]", {"result": floats(4, 4)}),
            ("result_wide", r"\[5, 5\], not \[5, 4\]", {"result": floats(5, 5)}),
            ("result_type", "another type", {"result": floats(5, 4, dtype="bfloat16")}),
            ("table_empty", "no rows", {"table": floats(0, 4)}),
            ("table_flat", r"shape \[40\]", {"table": floats(40)}),
        ],
        "packed_pooled_lookup": [
            *_OF_BATCHES,
            ("code", "`code` is 7", {"code": np.int32(7)}),
            ("negative_code", "`code` is -1", {"code": np.int32(-1)}),
            ("other_code", "8 bytes; .* 6", {"code": np.int32(1)}),
            ("packed_narrow", "7 bytes; .* 8", {"packed": bytes_(10, 7)}),
            ("packed_short", "reads rows 5 to 10 of 9", {"packed": bytes_(9, 8)}),
            ("packed_flat", r"`packed` has the shape \[80\]", {"packed": bytes_(80)}),
            ("result_wide", "8 bytes; .* 9", {"result": floats(4, 5)}),
            ("result_short", "4 bags, the result 3", {"result": floats(3, 4)}),
            ("result_int", "`result` is S32", {"result": ints(4, 4)}),
        ],
        "packed_row_lookup": [
            ("code", "`code` is 9", {"code": np.int32(9)}),
            ("packed_narrow", "7 bytes; .* 8", {"packed": bytes_(10, 7)}),
            ("result_short", r"\[4, 4\], not \[5, 4\]", {"result": floats(4, 4)}),
            ("result_wide", "8 bytes; .* 12", {"result": floats(5, 8)}),
            ("result_int", "`result` is S32", {"result": ints(5, 4)}),
        ],
        "max_lookup": [
            ("ids_short", "reads ids 3 to 6 of 5", {"ids": ints(5)}),
            ("winners_short", r"`winners` has the shape \[3, 4\]", {"winners": ints(3, 4)}),
            ("winners_wide", r"`winners` has the shape \[4, 5\]", {"winners": ints(4, 5)}),
            ("table_wide", r"\[4, 4\], not \[4, 5\]", {"table": floats(10, 5)}),
            ("no_table", "`table` is missing", {"table": None}),
            ("result_short", "4 bags, the result 3", {"result": floats(3, 4)}),
        ],
        "packed_max_lookup": [
            ("code", "`code` is 7", {"code": np.int32(7)}),
            ("packed_narrow", "7 bytes; .* 8", {"packed": bytes_(10, 7)}),
            ("winners_short", r"`winners` has the shape \[1, 4\]", {"winners": ints(1, 4)}),
            ("result_short", "4 bags, the result 3", {"result": floats(3, 4)}),
        ],
        "max_gradients": [
            ("gradients_short", r"gradients \[3, 3\], the result", {"gradients": floats(3, 3)}),
            ("result_wide", r"the result \[6, 4\]", {"result": floats(6, 4)}),
            ("bags_short", "`bags` has 5 elements, not 6", {"bags": ints(5)}),
        ],
        "drop_ids": [
            ("new_ids", "`new ids` has 5 elements, not 6", {"new_ids": ints(5)}),
            ("new_lengths", "`new lengths` has 5 elements, not 4", {"new_lengths": ints(5)}),
            ("sources", "`sources` has 7 elements, not 6", {"sources": ints(7)}),
            ("four", "not five for each", {"features": np.int64([0, 3, 0, 2])}),
            ("ids", "has ids 0 to 7 of 6", {"features": np.int64([0, 7, 0, 2, 1])}),
            ("lengths", "has lengths 0 to 5 of 4", {"features": np.int64([0, 3, 0, 5, 1])}),
            ("overlap", "has ids 2 to 5", {"features": np.int64([0, 3, 0, 2, 1, 2, 3, 2, 2, 1])}),
            ("negative", "`features` is -1", {"features": np.int64([0, 3, 0, 2, -1])}),
        ],
        "build_runs": [
            ("num_rows", "`num_rows` is -2", {"num_rows": np.int64(-2)}),
            ("huge_num_rows", "`num_rows` is 4294967296", {"num_rows": np.int64(2**32)}),
            *(
                (f"{name}_short", f"`{name}` has 4 elements, not 5", {name: ints(4)})
                for name in ("order", "segments", "unique", "inverse")
            ),
        ],
        "bucket": [
            ("order_short", "`order` has 4 elements, not 5", {"order": ints(4)}),
            ("counts_square", r"`counts` has the shape \[2, 2\]", {"counts": ints(2, 2)}),
        ],
        "shift_rows": [
            ("result_short", "`result` has 4 elements, not 5", {"result": ints(4)}),
            ("shifts_short", "`starts` has 2 elements, `shifts` 1", {"shifts": np.int64([1])}),
            ("no_starts", "no elements", {"starts": np.int64([]), "shifts": np.int64([])}),
            ("first_start", "`starts` is 1, not 0 to 0", {"starts": np.int64([1, 5])}),
            ("descending", "`starts` is -5, not 0 to", {"starts": np.int64([0, -5])}),
            ("shift", "`shifts` is 4294967296", {"shifts": np.int64([0, 2**32])}),
            ("num_rows", "`num_rows` is -1", {"num_rows": np.int64(-1)}),
            ("outside", "`outside` is 4294967296", {"outside": np.int64(2**32)}),
        ],
        "sum_rows": [
            ("bags_short", "`bags` has 4 elements, not 5", {"bags": ints(4)}),
            ("no_bags", "without `bags`; `gradients` has 2 rows", {"bags": ints(0)}),
            ("scales_short", "`scales` has 4 elements, not 5", {"scales": floats(4)}),
            ("gradients_wide", r"\[10, 4\], not \[10, 5\]", {"gradients": floats(2, 5)}),
            ("gradients_flat", r"`gradients` has the shape \[8\]", {"gradients": floats(8)}),
            ("gradients_int", "`gradients` is S32", {"gradients": ints(2, 4)}),
            ("result_type", "another type", {"result": floats(10, 4, dtype="float16")}),
        ],
        "fused_update": [
            ("rule", "`rule` is 5", {"rule": np.int32(5)}),
            ("decay", "`decay` is -1", {"decay": np.int32(-1)}),
            ("other_rule", "2 arrays of .* has 1", {"rule": np.int32(1), **_NO_COUNTS}),
            ("counts", "`counts_rows` is set", {"rule": np.int32(4)}),
            ("no_counts", "3 arrays of state; the rule has 2", {"counts_rows": False}),
            ("rates", "`rates` has 2 elements, not 3", {"rates": floats(2)}),
            ("number", "number of the step has 2", {"number": ints(2)}),
            ("no_parts", "not 0 parts", {"parts": np.int64(0)}),
            ("more_parts", "not 7 parts", {"parts": np.int64(7)}),
            ("huge_parts", "parts", {"parts": np.int64(2**63 - 1)}),
            ("negative_parts", "not -1 parts", {"parts": np.int64(-1)}),
            ("other_parts", "differ in their shapes", {"part_2": floats(2, 4)}),
            ("wide_parts", r"\[2, 5\], not", dict.fromkeys(("part_1", "part_2"), floats(1, 5))),
            ("bags_short", "`bags` has 4 elements, not 5", {"bags": ints(4)}),
            ("scales_short", "`scales` has 4 elements, not 5", {"scales": floats(4)}),
            ("first_short", "array 0 of the state has 36", _state("first", 9, 4)),
            ("second_vector", "array 1 of the state has 10", _state("second", 10)),
            ("counts_short", "array 2 of the state has 9", _state("counts", 9)),
            ("table_int", "`table` is S32", {"table": ints(10, 4), "new_table": ints(10, 4)}),
            ("no_bound", "bound", {"bound": None}),
            ("not_in_place", "not updated in place", {"in_place": {}}),
        ],
        "pair_products": [
            ("short", r"products have the shape \[2, 2\]", {"result": floats(2, 2)}),
            ("samples", r"products have the shape \[1, 3\]", {"result": floats(1, 3)}),
            ("vector", r"`vectors` has the shape \[4\]", {"vectors": floats(4)}),
        ],
        "attention": [
            ("matrix", "rank", {"query": floats(5, 8)}),
            ("key_heads", r"`key` has the shape \[6, 1, 4\]", {"key": floats(6, 1, 4)}),
            ("key_short", r"`key` has the shape \[5, 2, 4\]", {"key": floats(5, 2, 4)}),
            ("wide", "more than 4096 columns", {"query": floats(5, 2, 5000)}),
            ("two_ranges", r"`ranges` has the shape \[2, 5\]", {"ranges": ints(2, 5)}),
            ("ranges_short", r"`ranges` has the shape \[4, 4\]", {"ranges": ints(4, 4)}),
            ("offsets", r"`offsets` has the shape \[2, 0\]", {"offsets": ints(2, 0)}),
            ("bias_heads", r"`bias` has the shape \[7, 1\]", {"bias": floats(7, 1)}),
            ("result", r"the result` has the shape \[5, 2, 4\]", {"result": floats(5, 2, 4)}),
            ("no_alpha", "number of attributes", {"alpha": None}),
        ],
        "attention_gradients": [
            ("gradient", r"`gradient` has the shape \[6, 2, 3\]", {"gradient": floats(6, 2, 3)}),
            ("of_query", r"queries' gradient` has the shape", {"of_query": floats(6, 2, 4)}),
            ("of_key", r"keys' gradient` has the shape", {"of_key": floats(5, 2, 4)}),
            ("of_value", r"values' gradient` has the shape", {"of_value": floats(6, 2, 4)}),
            ("of_bias", r"bias's gradient has the shape \[6, 2\]", {"of_bias": floats(6, 2)}),
        ],
        "pair_gradients": [
            ("gradient_short", r"products have the shape \[2, 2\]", {"gradient": floats(2, 2)}),
            ("result", r"result has the shape \[2, 3, 3\]", {"result": floats(2, 3, 3)}),
            ("vector", r"`vectors` has the shape \[4\]", {"vectors": floats(4)}),
        ],
    }.items()
    for name, words, changes in faults
}  # fmt: skip


def run(connection, names: list[str]) -> None:
    """Make calls, one after another, and send the error of each; None: there is none."""
    cpu.missing()  # loads the library
    for name in names:
        target, _, changes = FAULTS.get(name, (name, "", {}))
        try:
            CALLS[target].but(**changes)(target_name(target))
        except Exception as error:
            connection.send(f"{type(error).__name__}: {error}")
        else:
            connection.send(None)
