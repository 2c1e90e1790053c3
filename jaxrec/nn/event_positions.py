"""Embeddings of a token's place in its row and of its time, added to the token."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int32

from jaxrec.nn.arithmetic import promote
from jaxrec.ragged import complete_cumsum, lengths_range, segment_ids
from jaxrec.ragged.arrays import AnyArray, each_device, take
from jaxrec.ragged.offsets import without_padding

# Bucket of each time: the root or the logarithm of minutes, rounded down.
TimeScale = Literal["sqrt", "log"]


class EventPositions(nnx.Module):
    """Adds a learned vector of each token's position, and one of its time.

    ``sqrt(dim) x + positions[p] + times[b]``, of the authors' code for Zhai et al. 2024
    (arXiv:2402.17152). The first ``contextual_length`` tokens of a row are context and have
    positions 0, 1, ...; the last ``num_targets`` are targets, and history is in between.

    * ``count_from="end"``, as in that code: the newest token of the history has the position
      ``contextual_length + 1``, the one before it the next. The time of a token is the time from it
      to the row's last token. For context it is the time from 0 to the last token.
    * ``count_from="start"``: positions count up through context and history, and a token's time is
      that from the event before it. New events then leave older tokens as they are, so that a cache
      can grow (`HSTURanker.encode`).

    All targets of a row have one position. The bucket ``b`` of a time is the square root (or
    natural logarithm) of its minutes, rounded down. Positions and buckets past the last row of
    their table read the last row.

    Args:
        num_positions: Rows of the table of positions.
        dim: Columns.
        num_times: Rows of the table of times; 0: no times.
        contextual_length: Number of context tokens that each row begins with.
        time_scale: "sqrt" or "log".
        count_from: "end" or "start".
        dtype: Type of the result; None: the wider of the input's and ``param_dtype``.
        param_dtype: Type of the tables.
        rngs: Gives the random keys of the tables' first values (uniform, up to ``1 / sqrt(rows)``).

    Raises:
        ValueError: A size is too small, or a name is none of the above.

    Example:
        >>> import jax.numpy as jnp
        >>> positions = EventPositions(10, 8, num_times=4, rngs=nnx.Rngs(0))
        >>> times = jnp.array([0, 60, 600, 0])
        >>> positions(jnp.ones((4, 8)), jnp.array([1, 2]), times, jnp.array([0, 1])).shape
        (4, 8)
    """

    def __init__(
        self,
        num_positions: int,
        dim: int,
        *,
        num_times: int = 0,
        contextual_length: int = 0,
        time_scale: TimeScale = "sqrt",
        count_from: Literal["end", "start"] = "end",
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        if min(num_positions, dim) < 1 or min(num_times, contextual_length) < 0:
            raise ValueError(
                f"num_positions and dim are 1 or more, num_times and contextual_length 0 or more; "
                f"got {num_positions}, {dim}, {num_times} and {contextual_length}"
            )
        if time_scale not in ("sqrt", "log") or count_from not in ("end", "start"):
            raise ValueError(
                f"time_scale is 'sqrt' or 'log' and count_from 'end' or 'start'; got "
                f"{time_scale!r} and {count_from!r}"
            )

        def table(rows: int) -> nnx.Param[Array]:
            draw = nnx.initializers.uniform(2 * rows**-0.5)
            return nnx.Param(draw(rngs.params(), (rows, dim), param_dtype) - rows**-0.5)

        self.positions = table(num_positions)
        self.times = nnx.data(table(num_times) if num_times else None)
        self.contextual_length = contextual_length
        self.time_scale = time_scale
        self.count_from = count_from
        self.dtype = dtype

    def __call__(
        self,
        states: Float[AnyArray, "*devices capacity dim"],
        lengths: AnyArray,
        times: AnyArray | None = None,
        num_targets: AnyArray | None = None,
        *,
        last_times: AnyArray | None = None,
    ) -> Float[Array, "*devices capacity dim"]:
        """Add the vectors of positions and times to the tokens of a batch.

        Args:
            states: ``[capacity, dim]``, rows one after the other.
            lengths: ``[rows]``, tokens of each row.
            times: ``[capacity]`` integers, the time of each token in seconds; needed with
                ``num_times``. The times of context are not read.
            num_targets: ``[rows]``, the number of targets of each row; None: no targets.
            last_times: ``[rows]``, the time that ``count_from="end"`` counts to, in place of that
                of the row's last token.

        Raises:
            ValueError: Times are missing, or given without ``num_times``.
        """
        lengths = jnp.asarray(lengths)
        targets = jnp.zeros_like(lengths) if num_targets is None else jnp.asarray(num_targets)
        if times is None:
            capacity = states.shape[lengths.ndim - 1]
            places = each_device(
                lambda lengths, targets: self._places(lengths, targets, capacity), lengths, targets
            )
            elapsed = None
        else:
            places, elapsed = each_device(
                self._of_rows, lengths, targets, jnp.asarray(times), last_times
            )
        return self.add(without_padding(states, complete_cumsum(lengths)), places, elapsed)

    def add(
        self,
        states: Float[Array, "*axes dim"],
        places: Int32[Array, "*axes"],
        elapsed: Int32[Array, "*axes"] | None,
    ) -> Float[Array, "*axes dim"]:
        """Add the vectors of given positions, and of given times in seconds.

        Raises:
            ValueError: Times are missing, or given without ``num_times``.
        """
        if (elapsed is None) != (self.times is None):
            raise ValueError("times and num_times come together; give both or neither")
        states, vectors = promote(self.dtype, states, self.positions[...])
        last = vectors.shape[0] - 1
        out = states * states.shape[-1] ** 0.5 + take(vectors, jnp.minimum(places, last))
        if self.times is None or elapsed is None:
            return out
        (of_times,) = promote(out.dtype, self.times[...])
        return out + take(of_times, _bucket(elapsed, of_times.shape[0], self.time_scale))

    def _of_rows(
        self, lengths: Array, targets: Array, times: Array, last_times: Array | None
    ) -> tuple[Array, Array]:
        """Return the position of each token, and its time in seconds."""
        capacity = times.shape[0]
        offsets = jnp.asarray(complete_cumsum(lengths))
        row, place = segment_ids(offsets, capacity), lengths_range(lengths, capacity)
        history_end = (offsets[1:] - targets)[row]
        if self.count_from == "end":
            times = jnp.where(place < self.contextual_length, 0, times)
            last = times[offsets[1:] - 1] if last_times is None else last_times
            elapsed = last[row] - times
        else:
            element = jnp.arange(capacity, dtype=jnp.int32)
            # The event before a target is the newest of the history.
            before = jnp.minimum(element, history_end) - 1
            is_first = before < offsets[row] + self.contextual_length
            elapsed = jnp.where(is_first, 0, times - times[before])
        return self._places(lengths, targets, capacity), elapsed

    def _places(self, lengths: Array, targets: Array, capacity: int) -> Array:
        row = segment_ids(complete_cumsum(lengths), capacity)
        place, history_end = lengths_range(lengths, capacity), (lengths - targets)[row]
        forward = jnp.minimum(place, history_end)
        if self.count_from == "start":
            return forward
        backward = history_end - forward + self.contextual_length
        return jnp.where(place < self.contextual_length, place, backward)


def _bucket(elapsed: Array, rows: int, time_scale: TimeScale) -> Int32[Array, "*axes"]:
    minutes = jnp.maximum(elapsed.astype(jnp.float32), 1e-6) / 60
    scaled = jnp.sqrt(minutes) if time_scale == "sqrt" else jnp.maximum(jnp.log(minutes), 0)
    return jnp.minimum(scaled, rows - 1).astype(jnp.int32)
