"""A stack of transduction units, with truncation of long histories and rematerialization."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxrec.nn.row_pieces import cut_rows
from jaxrec.nn.transduction import TransductionUnit
from jaxrec.ragged.arrays import AnyArray


class TransductionStack(nnx.Module):
    """Transduction units one after the other.

    Long histories cost most in the first layers. With ``truncation`` later layers only have the
    newest tokens of a history, as ULTRA-HSTU does (alibaba/TorchEasyRec, ``ultra_hstu``). These
    already know the older ones from the layers before. Context and targets always stay.

    Args:
        dim: Columns of a token.
        num_layers: Number of units.
        num_heads: Heads of each unit.
        truncation: Pair ``(layers, tokens)``: after that many layers only the newest tokens of the
            history stay. None: all stay.
        num_context: Number of context tokens that each row begins with, which truncation keeps.
        remat: Whether the backward pass computes each unit again, to keep only its input.
        options: Further options of each `TransductionUnit`.

    Raises:
        ValueError: ``truncation`` does not come between two layers, or keeps no token.

    Example:
        >>> import jax.numpy as jnp
        >>> stack = TransductionStack(8, 2, 2, truncation=(1, 2), max_length=5, rngs=nnx.Rngs(0))
        >>> states, lengths = stack(jnp.ones((6, 8)), jnp.array([4, 2]), jnp.array([1, 0]))
        >>> lengths.tolist()  # of three tokens before a target two stay
        [3, 2]
    """

    def __init__(
        self,
        dim: int,
        num_layers: int,
        num_heads: int,
        *,
        truncation: tuple[int, int] | None = None,
        num_context: int = 0,
        remat: bool = False,
        **options: Any,
    ):
        if num_layers < 1:
            raise ValueError(f"num_layers is 1 or more, got {num_layers}")
        if truncation is not None and not (0 < truncation[0] < num_layers and truncation[1] > 0):
            raise ValueError(
                f"truncation is a number of layers, from 1 to {num_layers - 1}, and a number of "
                f"tokens or events, 1 or more; got {truncation}"
            )
        self.units = nnx.List(
            TransductionUnit(dim, num_heads, **options) for _ in range(num_layers)
        )
        self.truncation = truncation
        self.num_context = num_context
        self.remat = remat

    def __call__(
        self,
        states: Float[AnyArray, "*devices capacity dim"],
        lengths: AnyArray,
        num_targets: AnyArray | None = None,
        *,
        longest: Array | int | None = None,
        target_capacity: int | None = None,
    ) -> tuple[Float[Array, "*devices new_capacity dim"], Int32[Array, "*devices rows"]]:
        """Transform the tokens of a batch.

        Args:
            states: ``[capacity, dim]``, rows one after the other: context, history, targets.
            lengths: ``[rows]``, the number of tokens of each row.
            num_targets: ``[rows]``, the number of targets at the end of each row; None: none.
            longest: Divisor of the attention, in place of the units' ``max_length``.
            target_capacity: Static bound on the targets of all rows, with which truncation makes
                the arrays of later layers smaller. None: they keep their capacity.

        Returns:
            States, and the lengths of their rows, which truncation shortens.
        """
        lengths = jnp.asarray(lengths)
        targets = jnp.zeros_like(lengths) if num_targets is None else jnp.asarray(num_targets)
        states = jnp.asarray(states)

        def run(unit: TransductionUnit, *arguments: Any) -> Array:
            states, lengths, longest = arguments
            given = None if num_targets is None else targets
            return unit(states, lengths, given, longest=longest)

        for layer, unit in enumerate(self.units):
            states, lengths = self.truncate(layer, states, lengths, targets, target_capacity)
            states = (nnx.remat(run) if self.remat else run)(unit, states, lengths, longest)
        return states, lengths

    def truncate(
        self,
        layer: int,
        states: Float[Array, "*devices capacity dim"],
        lengths: Array,
        num_targets: Array,
        target_capacity: int | None,
    ) -> tuple[Float[Array, "*devices new_capacity dim"], Int32[Array, "*devices rows"]]:
        """Cut rows to their newest tokens if truncation comes before this layer."""
        if self.truncation is None or layer != self.truncation[0]:
            return states, lengths
        history = lengths - self.num_context - num_targets
        kept = jnp.minimum(history, self.truncation[1])
        context = jnp.full_like(lengths, self.num_context)
        pieces: list[tuple[Array | int, Array]] = [
            (0, context),
            (lengths - num_targets - kept, kept + num_targets),
        ]
        capacity = states.shape[-2]
        if target_capacity is not None:
            most = lengths.shape[-1] * (self.num_context + self.truncation[1]) + target_capacity
            capacity = min(capacity, most)
        return cut_rows(lengths, pieces, states, capacity=capacity), context + kept + num_targets

    def capacity_of(self, layer: int, capacity: int) -> int:
        """Return the largest number of context and history tokens that a row has in a layer."""
        if self.truncation is None or layer < self.truncation[0]:
            return capacity
        return min(capacity, self.num_context + self.truncation[1])
