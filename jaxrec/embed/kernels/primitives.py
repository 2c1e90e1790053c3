"""The primitives as the layers above call them; what they compute is said in `base`."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int32, Shaped

from jaxrec.embed.kernels import dispatch
from jaxrec.embed.kernels.base import BagLayout, Buckets, Lookups, Runs
from jaxrec.optim.base import RowOptimizer
from jaxrec.optim.hyperparameter import Step


def new_rows(row: Shaped[Array, "*shape"], num_rows: int) -> Shaped[Array, "num_rows *shape"]:
    """A new array of rows that are all alike, in memory that suits reading it at random places.

    Args:
        row: What each row is.
        num_rows: How many.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxrec.embed import kernels
        >>> kernels.new_rows(jnp.array([1.0, 2.0]), 2).tolist()
        [[1.0, 2.0], [1.0, 2.0]]
    """
    return dispatch.call("new_rows", {"row": row}, num_rows=num_rows)


def pooled_lookup(
    table: Float[Array, "rows dim"],
    ids: Int32[Array, " ids"],
    lengths: Int32[Array, " all_bags"],
    weights: Float[Array, " ids"] | None,
    layout: BagLayout,
    dtype: DTypeLike,
    parts_in: int = 1,
    parts_out: int = 1,
) -> Float[Array, "bags dim"]:
    """The sum or mean of each bag's rows.

    Args:
        table: The group's rows.
        ids: The ids of all keys of a batch.
        lengths: The lengths of all its bags.
        weights: The weight of each id; None: 1.
        layout: Where the group's features lie in these.
        dtype: Type of the result.
        parts_in: In how many equal parts the table was received.
        parts_out: In how many equal parts the result is sent on; no feature's bags are in two.

    Returns:
        One row for each bag, where `BagLayout.bag_rows` says; NaN for a bag with an id outside its
        table.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxrec.embed import kernels
        >>> layout = kernels.BagLayout((0,), (4,), (0,), (2,), (0,), (3,), (False,))
        >>> table = jnp.array([[1.0], [10.0], [100.0]])
        >>> ids, lengths = jnp.array([2, 0, 1, 0]), jnp.array([2, 1])
        >>> kernels.pooled_lookup(table, ids, lengths, None, layout, "float32").tolist()
        [[101.0], [10.0]]
    """
    arrays = {"table": table, "ids": ids, "lengths": lengths, "weights": weights}
    hints = {"parts_in": parts_in, "parts_out": parts_out}
    return dispatch.call("pooled_lookup", arrays, hints, layout=layout, dtype=jnp.dtype(dtype))


def flatten_bags(
    ids: Int32[Array, " ids"],
    lengths: Int32[Array, " all_bags"],
    weights: Float[Array, " ids"] | None,
    layout: BagLayout,
    num_rows: int,
) -> Lookups:
    """The batch as flat lookups into a table of ``num_rows`` rows; else as `pooled_lookup`."""
    arrays = {"ids": ids, "lengths": lengths, "weights": weights}
    return dispatch.call("flatten_bags", arrays, layout=layout, num_rows=num_rows)


def row_lookup(
    table: Float[Array, "rows dim"],
    rows: Int32[Array, " n"],
    parts_in: int = 1,
    parts_out: int = 1,
) -> Float[Array, "n dim"]:
    """The rows themselves: zeros where ``rows`` is ``num_rows``, NaN where it lies outside.

    Args:
        table: The rows.
        rows: Which of them.
        parts_in: In how many equal parts the table was received.
        parts_out: In how many equal parts the result is sent on.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxrec.embed import kernels
        >>> kernels.row_lookup(jnp.array([[1.0], [2.0]]), jnp.array([1, 2, 3])).tolist()
        [[2.0], [0.0], [nan]]
    """
    hints = {"parts_in": parts_in, "parts_out": parts_out}
    return dispatch.call("row_lookup", {"table": table, "rows": rows}, hints)


def build_runs(rows: Int32[Array, " n"], num_rows: int) -> Runs:
    """Sorts lookups by row, cut into runs of equal rows.

    Args:
        rows: Row of each lookup; one outside ``[0, num_rows)`` counts as ``num_rows``.
        num_rows: Rows of the table.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxrec.embed import kernels
        >>> runs = kernels.build_runs(jnp.array([5, 2, 5]), num_rows=8)
        >>> runs.order.tolist(), runs.unique.tolist(), runs.inverse.tolist()
        ([1, 0, 2], [2, 5, 8], [1, 0, 1])
    """
    return dispatch.call("build_runs", {"rows": rows}, num_rows=num_rows)


def bucket(owners: Int32[Array, " n"], num_owners: int) -> Buckets:
    """Groups lookups by the device that owns their row.

    Args:
        owners: Owner of each lookup's row; one outside ``[0, num_owners)`` is none.
        num_owners: Number of devices.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxrec.embed import kernels
        >>> buckets = kernels.bucket(jnp.array([1, 2, 0, 1]), num_owners=2)
        >>> buckets.order.tolist(), buckets.counts.tolist()
        ([2, 0, 3, 1], [1, 2])
    """
    return dispatch.call("bucket", {"owners": owners}, num_owners=num_owners)


def shift_rows(
    rows: Int32[Array, " n"],
    starts: tuple[int, ...],
    shifts: tuple[int, ...],
    num_rows: int,
    outside: int,
) -> Int32[Array, " n"]:
    """Rows in another numbering.

    Args:
        rows: Any numbers.
        starts: First row of each stretch of rows, ascending from 0.
        shifts: What is added to the rows of each stretch.
        num_rows: Where the last stretch ends.
        outside: What numbers outside ``[0, num_rows)`` become.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxrec.embed import kernels
        >>> rows = jnp.array([0, 4, 5, 9, -1])
        >>> kernels.shift_rows(rows, (0, 5), (100, -5), num_rows=8, outside=999).tolist()
        [100, 104, 0, 999, 999]
    """
    return dispatch.call(
        "shift_rows",
        {"rows": rows},
        starts=starts,
        shifts=shifts,
        num_rows=num_rows,
        outside=outside,
    )


def sum_rows(
    lookups: Lookups,
    gradients: Float[Array, "bags dim"],
    num_rows: int,
    bound: float | None = None,
    parts_out: int = 1,
) -> Float[Array, "num_rows dim"]:
    """The sum of the gradients of each row's lookups; `pooled_lookup` transposed.

    Args:
        lookups: Which row belongs to which gradient, and its factor; rows outside are left out.
        gradients: The gradient of each bag.
        num_rows: Rows of the result.
        bound: On the absolute value of an element of a bag's gradient; None: none.
        parts_out: In how many equal parts the result is sent on.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxrec.embed import kernels
        >>> lookups = kernels.Lookups(jnp.array([1, 1, 5]), jnp.array([0, 1, 1]), None)
        >>> kernels.sum_rows(lookups, jnp.array([[1.0], [10.0]]), num_rows=2).tolist()
        [[0.0], [11.0]]
    """
    if gradients.shape[0] == 0:  # a batch without samples
        return jnp.zeros((num_rows, gradients.shape[1]), jnp.float32)
    arrays = {"lookups": lookups, "gradients": gradients}
    hints = {"parts_out": parts_out}
    return dispatch.call("sum_rows", arrays, hints, num_rows=num_rows, bound=bound)


def fused_update(
    table: Float[Array, "rows dim"],
    state: dict[str, Array],
    lookups: Lookups,
    gradients: Float[Array, "bags dim"],
    optimizer: RowOptimizer,
    step: Step,
    table_starts: tuple[int, ...] = (0,),
    parts_in: int = 1,
) -> tuple[Float[Array, "rows dim"], dict[str, Array]]:
    """One optimizer step on the rows that occur; in place where the table and state are donated.

    Args:
        table: The group's rows.
        state: Their optimizer state.
        lookups: Which row belongs to which gradient, and its factor.
        gradients: The gradient of each bag.
        optimizer: How rows change.
        step: Number of updates made before this one, and the hyperparameters that are set.
        table_starts: First row of each table of the group, for bounds on a table's gradient.
        parts_in: In how many equal parts the gradients were received.

    Returns:
        The new rows and the new state.
    """
    if gradients.shape[0] == 0:  # a batch without samples
        return table, state
    arrays = {"table": table, "state": state, "lookups": lookups, "gradients": gradients}
    return dispatch.call(
        "fused_update",
        arrays | {"step": step},
        {"parts_in": parts_in},
        optimizer=optimizer,
        table_starts=table_starts,
    )
