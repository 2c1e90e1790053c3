"""`Gradients` of a model with tables: those of parameters, and those of the rows of tables."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.random import define_prng_impl
from jaxtyping import Array, Bool, DTypeLike, Float, Int32, Shaped

from jaxrec.embed.kernels import BAD_ROW, BagLayout, Lookups
from jaxrec.embed.layout import Group
from jaxrec.embed.row_gradients import RowGradients
from jaxrec.embed.store import TableStore

Content = TypeVar("Content")

# Sealed arrays
#
# Row indices are numbers, but a sum of two of them is nonsense, and functions over pytrees do not
# know that: `jax.tree.map(lambda g: 2 * g, gradients)` would double the row indices together with
# the gradients, and the update would change other rows, without an error. JAX has one public kind
# of array without arithmetic, the random key, and any bits can be a key's data. So we dress row
# indices up as keys of a generator that cannot generate. `jax.jit`, `jax.lax.scan`, indexing,
# stacking and shardings take such arrays; any other operation is a TypeError.


def _refuse(*_: Any) -> Any:
    raise TypeError("sealed row indices of jaxrec.Gradients are not a random key")


# JAX prints the tag in its errors: "mul does not accept dtypes key<...>, float32".
_SEALED = define_prng_impl(
    key_shape=(1,),
    seed=_refuse,
    split=_refuse,
    random_bits=_refuse,
    fold_in=_refuse,
    name="jaxrec_sealed",
    tag="row indices of jaxrec.Gradients: use its map, scale, norm, clip, + and *",
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sealed(Generic[Content]):
    """A pytree of arrays whose leaves refuse arithmetic, until it is opened."""

    leaves: tuple[Any, ...]  # key arrays of the leaves' shapes
    dtypes: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    tree: Any = dataclasses.field(metadata={"static": True})

    def open(self) -> Content:
        """Return the pytree as it was sealed."""
        leaves = map(_open, self.leaves, self.dtypes)
        return jax.tree.unflatten(self.tree, leaves)


def seal(content: Content) -> Sealed[Content]:
    """Seal a pytree of arrays, of 32-bit numbers or booleans."""
    leaves, tree = jax.tree.flatten(content)
    arrays = [jnp.asarray(leaf) for leaf in leaves]
    dtypes = tuple(array.dtype.name for array in arrays)
    return Sealed(tuple(map(_seal, arrays)), dtypes, tree)


def _seal(array: Shaped[Array, "..."]) -> Any:
    if array.dtype == jnp.bool_:
        bits = array.astype(jnp.uint32)
    elif array.dtype.itemsize == 4:
        bits = jax.lax.bitcast_convert_type(array, jnp.uint32)
    else:
        raise TypeError(f"sealed arrays have 32 bits or are booleans, got {array.dtype}")
    return jax.random.wrap_key_data(bits[..., None], impl=_SEALED)


def _open(sealed: Any, dtype: str) -> Shaped[Array, "..."]:
    bits = jax.random.key_data(sealed)[..., 0]
    if dtype == "bool":
        return bits != 0
    return jax.lax.bitcast_convert_type(bits, jnp.dtype(dtype))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SealedRowGradients:
    """The gradient of one group's rows in one call of a collection.

    ``values``, ``[lines, dim]``, is the gradient of the embeddings that the call looked up, one
    line for each bag or id.
    """

    # A row's gradient is the sum over the lines that the row is part of. `sealed` has what says so:
    # the lookups, the route of the call and the bag of each line.
    values: Float[Array, "*_ lines dim"]
    sealed: Sealed[tuple[Lookups, Any, Int32[Array, " lines"] | None]]
    layouts: tuple[BagLayout, ...] = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, gradient: RowGradients) -> SealedRowGradients:
        """Seal all of a gradient except its values."""
        content = gradient.lookups, gradient.route, gradient.bag_of_line
        return cls(gradient.values, seal(content), gradient.layouts)

    def open(self) -> RowGradients:
        """Return the gradient in the form that the update takes."""
        lookups, route, bag_of_line = self.sealed.open()
        return RowGradients(lookups, self.values, self.layouts, route, bag_of_line)


Calls: TypeAlias = list[dict[str, RowGradients]]
SealedCalls: TypeAlias = list[dict[str, SealedRowGradients]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gradients:
    """The gradients that `value_and_grad` returns and `jaxrec.Optimizer.update` takes.

    Scale, add, cast, clip and measure them by the methods below and by ``+``, ``-``, ``*``, ``/``.
    They are a pytree and cross `jax.jit`, `jax.lax.scan` and the like. But arithmetic over their
    leaves, as of `jax.tree.map` or `optax.tree.norm`, is a TypeError, since row indices are among
    the leaves.

    Attributes:
        dense: Gradients of the parameters, as `nnx.grad` gives them.
        tables: By the collection's path in the model, a list with an entry for each call: the
            gradients of rows by group. No array here has the shape of a table, unless the loss
            reads a whole table.
        stores: By the collection's path, its store without arrays.
        loss_is_finite: Whether the loss is a finite number. If not, the update is skipped.

    Example:
        >>> import jaxrec
        >>> config = jaxrec.EmbeddingBagConfig("user", num_embeddings=3, embedding_dim=1)
        >>> model = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
        >>> batch = jaxrec.KeyedJaggedArray.from_lists({"user": [[1], [1], [1], [2]]})
        >>> loss_fn = lambda model: model(batch).values.sum()
        >>> _, gradients = jaxrec.value_and_grad(loss_fn)(model)
        >>> [round(float(g.norm()), 2) for g in (gradients, 2 * gradients, gradients.clip(1.0))]
        [3.16, 6.32, 1.0]
    """

    dense: nnx.State
    tables: dict[str, SealedCalls]
    stores: dict[str, TableStore]
    loss_is_finite: Sealed[Bool[Array, "..."]]

    @classmethod
    def of(
        cls,
        dense: nnx.State,
        tables: Mapping[str, Calls],
        stores: Mapping[str, TableStore],
        loss_is_finite: Bool[Array, ""],
    ) -> Gradients:
        """Join the gradients of parameters and of rows."""
        sealed = _map_calls(SealedRowGradients.of, tables)
        return cls(dense, sealed, dict(stores), seal(loss_is_finite))

    def rows(self) -> dict[str, Calls]:
        """Return ``tables`` with all gradients of rows opened."""
        return _map_calls(lambda gradient: gradient.open(), self.tables)

    def map(self, function: Callable[[Array], Array]) -> Gradients:
        """Apply a function to every array of gradients.

        Args:
            function: Returns an array of its argument's shape. It is called with the gradient of
                each parameter, and with ``[lines, dim]`` gradients of embeddings, which are not yet
                summed by row.

        Raises:
            ValueError: The function changes a shape.
        """

        def checked(array: Array) -> Array:
            new = jnp.asarray(function(array))
            if new.shape != array.shape:
                raise ValueError(
                    f"a function that maps gradients keeps their shapes, got {new.shape} for "
                    f"{array.shape}"
                )
            return new

        def mapped(gradient: SealedRowGradients) -> SealedRowGradients:
            return dataclasses.replace(gradient, values=checked(gradient.values))

        dense = jax.tree.map(checked, self.dense)
        return dataclasses.replace(self, dense=dense, tables=_map_calls(mapped, self.tables))

    def scale(self, factor: float | Float[Array, ""]) -> Gradients:
        """Multiply every gradient by a factor."""
        return self.map(lambda array: array * jnp.asarray(factor, array.dtype))

    def astype(self, dtype: DTypeLike) -> Gradients:
        """Cast every gradient to a floating-point type."""
        return self.map(lambda array: array.astype(dtype))

    def table_norms(self) -> dict[str, dict[str, Float[Array, ""]]]:
        """Return the Euclidean norm of each table's gradient, by collection and by table.

        The gradients of each row are first summed over all lines and calls. Over a mesh, that takes
        the same exchange of gradients as the update.
        """
        return {
            path: {name: jnp.sqrt(square) for name, square in squares.items()}
            for path, squares in self._table_squares().items()
        }

    def norm(self) -> Float[Array, ""]:
        """Return the Euclidean norm of all gradients together.

        Gradients of rows are summed by row, so the norm is that of `optax.tree.norm` if tables were
        parameters.
        """
        squares = [jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(self.dense)]
        squares += [s for tables in self._table_squares().values() for s in tables.values()]
        return jnp.sqrt(sum(squares, jnp.zeros((), jnp.float32)))

    def clip(self, max_norm: float | Float[Array, ""]) -> Gradients:
        """Scale the gradients down to a norm of at most ``max_norm``, tables included.

        Use it in place of `optax.clip_by_global_norm`, which sees no tables. If the norm is not
        finite, the gradients become NaN, so that the update is skipped.
        """
        norm = self.norm()
        factor = jnp.where(norm < max_norm, 1, max_norm / norm)
        return self.scale(jnp.where(jnp.isfinite(norm), factor, jnp.nan))

    def is_finite(self) -> Bool[Array, ""]:
        """Return whether the loss and all gradients are finite.

        If a row optimizer squares gradients, a gradient of embeddings also counts as infinite when
        its square exceeds float32 (`RowOptimizer.largest_gradient`).
        """
        finite = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(self.dense)]
        finite += [
            rows_are_finite(gradient, self.stores[path].groups[name])
            for path, calls in self.tables.items()
            for call in calls
            for name, gradient in call.items()
        ]
        return functools.reduce(operator.and_, finite, jnp.all(self.loss_is_finite.open()))

    def tied_to(self, value: Float[Array, ""]) -> Gradients:
        """Make the gradients of rows depend on a value, so that XLA computes the value first."""
        return dataclasses.replace(
            self, tables=_map_calls(SealedRowGradients.of, tie_to(value, self.rows()))
        )

    def __add__(self, other: Gradients) -> Gradients:
        """Return the gradients of the sum of two losses. The update still writes each row once."""
        # Parameters' gradients are added. Gradients of rows are listed as further calls, and the
        # update sums all calls by row.
        if not isinstance(other, Gradients):
            return NotImplemented
        if set(self.tables) != set(other.tables):
            raise ValueError(
                f"gradients of collections at {sorted(self.tables)} cannot be added to those at "
                f"{sorted(other.tables)}; both come from losses that look up the same collections"
            )
        is_finite = self.loss_is_finite.open() & other.loss_is_finite.open()
        return dataclasses.replace(
            self,
            dense=jax.tree.map(jnp.add, self.dense, other.dense),
            tables={path: calls + other.tables[path] for path, calls in self.tables.items()},
            loss_is_finite=seal(is_finite),
        )

    def __radd__(self, other: object) -> Gradients:
        return self if isinstance(other, int) and other == 0 else NotImplemented  # for `sum`

    def __sub__(self, other: Gradients) -> Gradients:
        return NotImplemented if not isinstance(other, Gradients) else self + -other

    def __mul__(self, factor: float | Float[Array, ""]) -> Gradients:
        return self.scale(factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float | Float[Array, ""]) -> Gradients:
        return self.map(lambda array: array / jnp.asarray(divisor, array.dtype))

    def __neg__(self) -> Gradients:
        return self.map(jnp.negative)

    def _table_squares(self) -> dict[str, dict[str, Float[Array, ""]]]:
        return {path: self.stores[path].table_squares(rows) for path, rows in self.rows().items()}


def rows_are_finite(gradient: SealedRowGradients, group: Group) -> Bool[Array, ""]:
    """Return whether a call's gradients are finite and within the row optimizer's limit."""
    largest = group.optimizer.largest_gradient
    if largest == math.inf:
        return jnp.all(jnp.isfinite(gradient.values))
    # A lookup adds its line times its factor, so the limit shrinks by the largest factor above 1.
    lookups = gradient.open().lookups
    limit = jnp.float32(largest)
    if lookups.scales is not None:
        is_row = (lookups.rows >= 0) & (lookups.rows < group.num_rows)
        sizes = jnp.where(is_row, jnp.abs(lookups.scales), 0)
        limit = limit / jnp.maximum(1, jnp.max(sizes, initial=0))
    return jnp.all(jnp.abs(gradient.values.astype(jnp.float32)) <= limit)


def mean_gradients(parts: Gradients | Sequence[Gradients]) -> Gradients:
    """Return the gradients of the mean loss of several micro-batches, to accumulate gradients.

    The update then writes each row once, in whatever number of micro-batches it occurs.

    Args:
        parts: The micro-batches' gradients: a sequence, or stacked along a leading axis as
            `jax.lax.scan` over micro-batches returns them.

    Raises:
        ValueError: There are none.
        TypeError: A part is not `Gradients`.

    Example:
        >>> import jax, jaxrec
        >>> from flax import nnx
        >>> config = jaxrec.EmbeddingBagConfig("user", num_embeddings=3, embedding_dim=1)
        >>> model = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
        >>> def gradient(ids):
        ...     batch = jaxrec.KeyedJaggedArray.from_lists({"user": ids})
        ...     return jaxrec.value_and_grad(lambda model: model(batch).values.sum())(model)[1]
        >>> both = mean_gradients([gradient([[1]]), gradient([[2]])])
        >>> [rows["float32_1"].values.tolist() for rows in both.tables[""]]
        [[[0.5]], [[0.5]]]
    """
    if isinstance(parts, Gradients):
        stacked, count = parts, parts.loss_is_finite.open().shape[0]
        parts = [jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(count)]
    parts = list(parts)
    if not parts:
        raise ValueError("the mean of no gradients: give at least one micro-batch's")
    if wrong := [part for part in parts if not isinstance(part, Gradients)]:
        raise TypeError(
            "the mean is that of gradients from jaxrec.value_and_grad, got "
            f"{type(wrong[0]).__name__}"
        )
    return functools.reduce(operator.add, parts) / len(parts)


# Bits of a NaN that no arithmetic produces: XLA cannot know that a loss never has them.
_NO_LOSS = 0x7FEDCBA9


def tie_to(value: Float[Array, ""], tables: Mapping[str, Calls]) -> dict[str, Calls]:
    """Make the row indices of gradients depend on a value, such as the loss."""
    # A table must be written after all lookups have read it, or XLA lets them read from a copy. If
    # a model's gradient depends on the embeddings, that orders the two. A loss that is linear in
    # them has no such dependence, so we add one: row indices are bad if the loss has bits that it
    # never has. An `optimization_barrier` would be plainer, but XLA removes it before it decides on
    # copies.
    bits = jax.lax.bitcast_convert_type(value.astype(jnp.float32), jnp.uint32)
    is_value = bits != _NO_LOSS

    def tie(gradient: RowGradients) -> RowGradients:
        def tied(indices: Array) -> Array:
            is_index = indices.dtype == jnp.int32
            return jnp.where(is_value, indices, BAD_ROW) if is_index else indices

        lookups = dataclasses.replace(gradient.lookups, rows=tied(gradient.lookups.rows))
        route = jax.tree.map(tied, gradient.route)
        return dataclasses.replace(gradient, lookups=lookups, route=route)

    return _map_calls(tie, tables)


def _map_calls(function: Callable[[Any], Any], tables: Mapping[str, Any]) -> dict[str, Any]:
    """Apply a function to each group's gradient in each call of each collection."""
    return {
        path: [{name: function(gradient) for name, gradient in call.items()} for call in calls]
        for path, calls in tables.items()
    }
