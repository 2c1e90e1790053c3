"""Functions of rows, such as an optimizer's `update`, computed inside a kernel.

Mosaic spreads an array over threads by a layout, and the layouts that it finds for arrays such as
``[rows, 1]`` do not agree. It lacks some operations, too. So a function is traced, and `evaluate`
runs its operations one by one on numbers in three forms whose layouts are known:

* a scalar,
* a *line*, ``[groups]``: one number for each row of a tile,
* a *full* array, ``[groups, columns]``: one number for each element.

Columns of padding take part in operations on elements, and in no sum over a row.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jaxtyping import Array, Int32

from jaxrec.embed.kernels.mosaic.lanes import Lanes
from jaxrec.embed.kernels.mosaic.programs import interpreted

# Number of rows with which functions are traced: no width of a table, so that a traced shape tells
# rows from columns.
_ROWS = 999_983


class Form(enum.IntEnum):
    """Form of a number in a kernel; each can be broadcast to the next."""

    SCALAR = 0
    LINE = 1
    FULL = 2


@dataclasses.dataclass(frozen=True)
class RowShape:
    """Shapes of the three forms, and the columns that a function sees."""

    lanes: Lanes
    groups: int  # rows of the tile
    first: int  # the tile's column that is the function's first
    dim: int  # columns that the function sees

    def form(self, traced_shape: tuple[int, ...]) -> Form:
        """Return the form of an array, given its shape in the traced function."""
        match tuple(size for size in traced_shape if size != 1):
            case ():
                return Form.SCALAR
            case (size,) if size == _ROWS:
                # If rows have one column, ``[rows, 1]`` is a whole tile, not a number a row.
                return Form.FULL if self.dim == 1 and len(traced_shape) > 1 else Form.LINE
            # A number for each column is kept once a row.
            case (size,) if size == self.dim:
                return Form.FULL
            case (rows, size) if (rows, size) == (_ROWS, self.dim):
                return Form.FULL
        raise UnsupportedError(f"an array of shape {traced_shape}")

    def traced(self, value: Any) -> jax.ShapeDtypeStruct:
        """Return the shape and type with which a value is traced."""
        shape = (_ROWS, self.dim)[: jnp.ndim(value)]
        return jax.ShapeDtypeStruct(shape, jnp.result_type(value))

    def broadcast(self, value: Any, form: int) -> Any:
        """Broadcast a value to ``form``, which is its own or a later one."""
        if jnp.ndim(value) == form:
            return value
        if jnp.ndim(value) == Form.LINE:
            return self.lanes.spread(value)
        shape = (self.groups, self.lanes.columns)[: int(form)]
        return lax.broadcast_in_dim(value, shape, ())

    def together(self, values: Sequence[Any]) -> list[Any]:
        """Broadcast values to the latest of their forms."""
        form = max(map(jnp.ndim, values))
        return [self.broadcast(each, form) for each in values]

    def column_ids(self) -> Int32[Array, "groups columns"]:
        """Return the number of each of the tile's columns."""
        return self.lanes.column_ids(self.groups)

    def fill_others(self, value: Any, fill: Any) -> Any:
        """Put ``fill`` into the columns of a full array that the function does not see."""
        if self.dim == self.lanes.columns:
            return value
        columns = self.column_ids()
        is_seen = (columns >= self.first) & (columns < self.first + self.dim)
        return lax.select(is_seen, value, self.broadcast(fill, Form.FULL))


class UnsupportedError(ValueError):
    """Error of a function that kernels cannot compute; the message names the operation."""


def evaluate(function: Callable[..., Any], shape: RowShape, *arguments: Any) -> Any:
    """Return the function's results, given scalars, lines and full arrays in trees.

    ``function`` sees arrays of rows: a line as ``[rows]``, a full array as ``[rows, dim]``. It must
    treat each row by itself.

    Raises:
        UnsupportedError: The function has an operation that kernels cannot compute.
    """
    traced = jax.tree.map(shape.traced, arguments)
    jaxpr, results = jax.make_jaxpr(function, return_shape=True)(*traced)
    values = _run(jaxpr, jax.tree.leaves(arguments), shape)
    # A function may return a scalar for a number that is the same in all rows.
    wanted = map(lambda result: shape.form(result.shape), jax.tree.leaves(results))
    return jax.tree.unflatten(
        jax.tree.structure(results),
        [shape.broadcast(value, form) for value, form in zip(values, wanted, strict=True)],
    )


def unsupported(function: Callable[..., Any], *arguments: Any) -> str | None:
    """Return an operation of a function that kernels cannot compute; None: they can compute all.

    ``arguments`` are trees of `jax.ShapeDtypeStruct`: scalars, ``[rows]`` or ``[rows, dim]``.
    """
    rows, dim = next(x.shape for x in jax.tree.leaves(arguments) if len(x.shape) == 2)
    shape = RowShape(Lanes(1, 1, dim, dim), rows, 0, dim)
    try:
        with interpreted():
            jax.eval_shape(functools.partial(evaluate, function, shape), *arguments)
    except UnsupportedError as error:
        return str(error)
    return None


def _run(traced: Any, arguments: list[Any], shape: RowShape) -> list[Any]:
    """Run the operations of a traced function, which may have constants."""
    has_constants = hasattr(traced, "consts")
    jaxpr, constants = (traced.jaxpr, traced.consts) if has_constants else (traced, [])
    if large := [np.shape(each) for each in constants if np.size(each) != 1]:
        raise UnsupportedError(f"a constant array of shape {large[0]}")
    values = dict(zip(jaxpr.constvars, map(_scalar, constants), strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: Any) -> Any:
        if isinstance(atom, core.Literal):
            aval: Any = atom.aval
            return _scalar(atom.val, aval.dtype)
        return values[atom]

    for equation in _needed(jaxpr):
        operands = [read(atom) for atom in equation.invars]
        name = equation.primitive.name
        if name in _CALLS:
            inner = next(equation.params[key] for key in _CALLED if key in equation.params)
            results = _run(inner, operands, shape)
        elif name in _FORMULAS:
            inner = jax.make_jaxpr(_FORMULAS[name])(*map(shape.traced, operands))
            results = _run(inner, operands, shape)
        elif name in _RULES:
            results = [_RULES[name](shape, equation, *operands)]
        elif name in _OF_ELEMENTS:
            results = [_on_elements(shape, equation, *operands)]
        else:
            raise UnsupportedError(f"the operation {name}")
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _scalar(value: Any, dtype: Any = None) -> Any:
    return np.asarray(value, dtype).reshape(())[()]


def _needed(jaxpr: Any) -> list[Any]:
    """Return the operations that a traced function's results depend on, in order."""
    # Mosaic does not lower what is computed in vain.
    needed = set(map(id, jaxpr.outvars))
    equations = []
    for equation in reversed(jaxpr.eqns):
        if not needed.isdisjoint(map(id, equation.outvars)):
            needed.update(map(id, equation.invars))
            equations.append(equation)
    return equations[::-1]


# Functions within functions, which are run in place, and the parameters that hold them.
_CALLS = {"jit", "closed_call", "eval_jaxpr", "custom_jvp_call", "custom_vjp_call", "remat2"}
_CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr")

# Operations that Mosaic has, and that treat each element by itself.
_OF_ELEMENTS = {
    "abs", "add", "and", "bitcast_convert_type", "clamp", "copy", "cos", "div", "eq", "exp", "exp2",
    "ge", "gt", "integer_pow", "le", "log", "log2", "logistic", "lt", "max", "min", "mul", "ne",
    "neg", "or", "rem", "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sin", "sqrt", "square", "sub", "tanh", "xor",
}  # fmt: skip


def _on_elements(shape: RowShape, equation: Any, *operands: Any) -> Any:
    """Apply an operation to elements, after all operands have one form."""
    operands = tuple(shape.together(operands))
    params = dict(equation.params)
    if equation.primitive.name == "integer_pow" and params["y"] in (0, 1):
        return operands[0] if params["y"] else lax.full_like(operands[0], 1)
    if equation.primitive.name == "bitcast_convert_type":
        old, new = (jnp.dtype(each.aval.dtype) for each in (*equation.invars, *equation.outvars))
        if old.itemsize != new.itemsize:
            raise UnsupportedError("a bitcast to another size")
    return equation.primitive.bind(*operands, **params)


def _reshape(shape: RowShape, equation: Any, operand: Any, *_: Any) -> Any:
    """Broadcast to the form of the result; only axes longer than 1 make a form."""
    form = shape.form(equation.outvars[0].aval.shape)
    if jnp.ndim(operand) == Form.FULL and form == Form.LINE:  # rows of one column
        return _column(shape, operand, 0)
    return shape.broadcast(operand, form)


def _convert(shape: RowShape, equation: Any, operand: Any) -> Any:
    # Mosaic does not convert to bool.
    if jnp.issubdtype(equation.params["new_dtype"], jnp.bool):
        return operand != shape.broadcast(_scalar(0, operand.dtype), jnp.ndim(operand))
    return equation.primitive.bind(operand, **equation.params)


def _column_numbers(shape: RowShape, equation: Any) -> Any:
    params = equation.params
    size = params["shape"][params["dimension"]]
    if size == 1:
        return _scalar(0, params["dtype"])
    if size == _ROWS:
        raise UnsupportedError("the number of a row in the batch")
    return (shape.column_ids() - shape.first).astype(params["dtype"])


def _reduce(
    reduce: Callable[..., Array], identity: Callable[[Any], Any]
) -> Callable[[RowShape, Any, Any], Any]:
    """Return the rule of a reduction over a row's columns."""

    def rule(shape: RowShape, equation: Any, operand: Any) -> Any:
        sizes = {equation.invars[0].aval.shape[axis] for axis in equation.params["axes"]} - {1}
        forms = jnp.ndim(operand), shape.form(equation.outvars[0].aval.shape)
        if not sizes and forms[0] == forms[1]:
            return operand
        if not sizes <= {shape.dim} or forms != (Form.FULL, Form.LINE):
            raise UnsupportedError(f"{equation.primitive.name} over rows")
        fill = _scalar(identity(operand.dtype), operand.dtype)
        return reduce(shape.fill_others(operand, fill), axis=1)

    return rule


def _lowest(dtype: Any) -> Any:
    return -np.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def _highest(dtype: Any) -> Any:
    return np.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max


def _one_column(shape: RowShape, equation: Any, operand: Any) -> Any:
    """Take one column of a full array as a line."""
    if equation.outvars[0].aval.shape == equation.invars[0].aval.shape:
        return operand
    start, stop = (equation.params[name][-1] for name in ("start_indices", "limit_indices"))
    if jnp.ndim(operand) != Form.FULL or stop - start != 1:
        raise UnsupportedError("a slice of several columns")
    return _column(shape, operand, start)


def _column(shape: RowShape, operand: Array, column: int) -> Array:
    """Return a column of a full array as a line."""
    is_column = shape.column_ids() == shape.first + column
    zeros = shape.broadcast(_scalar(0, operand.dtype), Form.FULL)
    # Sums of whole numbers are exact, and so is the sum of one number and zeros.
    return _sum(lax.select(is_column, operand, zeros), axis=1)


def _sum(values: Array, axis: int) -> Array:
    return jnp.sum(values, axis=axis, dtype=values.dtype)


_RULES: dict[str, Callable[..., Any]] = {
    "broadcast_in_dim": _reshape,
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "convert_element_type": _convert,
    "iota": _column_numbers,
    "slice": _one_column,
    "reduce_sum": _reduce(_sum, lambda dtype: 0),
    "reduce_max": _reduce(jnp.max, _lowest),
    "reduce_min": _reduce(jnp.min, _highest),
}


def _floor(x: Array) -> Array:
    nearest = lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)
    return jnp.where(nearest > x, nearest - 1, nearest)


def _log1p(x: Array) -> Array:
    # Goldberg 1991, "What every computer scientist should know about floating-point arithmetic",
    # theorem 4: the error of 1 + x cancels in the quotient. Infinity has no such quotient.
    sum_ = 1 + x
    is_itself = (sum_ == 1) | (x == jnp.inf)
    return jnp.where(is_itself, x, x * (jnp.log(sum_) / jnp.where(is_itself, 1.0, sum_ - 1)))


def _sign(x: Array) -> Array:
    zero, one = (x.dtype.type(value) for value in (0, 1))
    return jnp.where(x != x, x, jnp.where(x > zero, one, jnp.where(x < zero, -one, zero)))


# Operations that Mosaic lacks, by those that it has.
_FORMULAS: dict[str, Callable[[Array], Array]] = {
    "floor": _floor,
    "ceil": lambda x: -_floor(-x),
    # exp(x) - 1 = (exp(x) + 1) tanh(x / 2), which loses no digits near zero.
    "expm1": lambda x: (jnp.exp(x) + 1) * jnp.tanh(x * 0.5),
    "log1p": _log1p,
    "is_finite": lambda x: jnp.abs(x) < jnp.inf,
    "not": lambda x: x ^ np.invert(np.zeros((), x.dtype)),
    "sign": _sign,
}
