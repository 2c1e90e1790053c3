"""The transduction unit of HSTU rankers, and the gate at its end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from jaxrec.nn.arithmetic import dot_general, promote
from jaxrec.nn.tiled_attention import BLOCK, hstu_attention
from jaxrec.ragged import complete_cumsum
from jaxrec.ragged.arrays import AnyArray
from jaxrec.ragged.offsets import without_padding

GateActivation = Literal["silu", "sigmoid"]

_ACTIVATIONS: dict[str | None, Callable[[Array], Array]] = {
    None: lambda x: x,
    "silu": nnx.silu,
    "sigmoid": nnx.sigmoid,
}


class GatedNorm(nnx.Module):
    """Normalises the attention's result and multiplies it by a gate.

    The product is ``f(gate) * norm(attended)``. ``concat`` puts the gate, the attention's result or
    both in front of it: ``[gate, attended, f(gate) * norm(attended)]``. From the authors' code for
    Zhai et al. 2024 (arXiv:2402.17152).

    Args:
        num_heads: Number of heads.
        value_dim: Columns of a head.
        norm: "layer": a layer norm over the columns of all heads. "group": each head is normalised
            by itself, with one weight and one bias a head.
        activation: ``f``: "silu", "sigmoid" or None.
        concat: What comes before the product: "gate", "attended", both or neither.
        concat_activation: Activation of the gate that comes before the product.
        epsilon: Added to the variance.
        dtype: Type that it computes in; None: the wider of the input's and ``param_dtype``.
        param_dtype: Type of the parameters.
        rngs: Not drawn from: weights start as ones and biases as zeros.

    Raises:
        ValueError: A name is none of the above.

    Example:
        >>> import jax.numpy as jnp
        >>> gate = GatedNorm(2, 4, concat=("gate", "attended"), rngs=nnx.Rngs(0))
        >>> gate(jnp.ones((3, 8)), jnp.ones((3, 8))).shape
        (3, 24)
    """

    def __init__(
        self,
        num_heads: int,
        value_dim: int,
        *,
        norm: Literal["layer", "group"] = "layer",
        activation: GateActivation | None = None,
        concat: Sequence[Literal["gate", "attended"]] = (),
        concat_activation: GateActivation | None = None,
        epsilon: float = 1e-6,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        if norm not in ("layer", "group") or not set(concat) <= {"gate", "attended"}:
            raise ValueError(
                "norm is 'layer' or 'group' and concat of 'gate' and 'attended'; got "
                f"{norm!r} and {tuple(concat)}"
            )
        if activation not in _ACTIVATIONS or concat_activation not in _ACTIVATIONS:
            raise ValueError(
                "a gate's activation is 'silu', 'sigmoid' or None; got "
                f"{activation!r} and {concat_activation!r}"
            )
        self.heads = (num_heads, value_dim)
        size = num_heads * value_dim if norm == "layer" else num_heads
        self.weight = nnx.Param(jnp.ones(size, param_dtype))
        self.bias = nnx.Param(jnp.zeros(size, param_dtype))
        self.norm = norm
        self.activation = activation
        self.concat = tuple(name for name in ("gate", "attended") if name in concat)
        self.concat_activation = concat_activation
        self.epsilon = epsilon
        self.dtype = dtype

    @property
    def columns(self) -> int:
        """Columns of the result."""
        return (1 + len(self.concat)) * self.heads[0] * self.heads[1]

    def __call__(
        self, attended: Float[AnyArray, "*axes columns"], gate: Float[AnyArray, "*axes columns"]
    ) -> Float[Array, "*axes all_columns"]:
        """Map two arrays ``[..., num_heads * value_dim]`` to ``[..., columns]``."""
        attended, gate, weight, bias = promote(
            self.dtype, attended, gate, self.weight[...], self.bias[...]
        )
        shape = (1, -1) if self.norm == "layer" else (*self.heads[:1], -1)
        # Means of many numbers lose their digits in 16 bits.
        wide = attended.astype(jnp.promote_types(attended.dtype, jnp.float32))
        grouped = wide.reshape(*attended.shape[:-1], *shape)
        centred = grouped - grouped.mean(-1, keepdims=True)
        variance = (centred * centred).mean(-1, keepdims=True)
        normal = (centred / jnp.sqrt(variance + self.epsilon)).astype(attended.dtype)
        # One weight a column, or one a head.
        weight, bias = (
            x.reshape((1,) * (attended.ndim - 1) + (shape[0], -1)) for x in (weight, bias)
        )
        product = _ACTIVATIONS[self.activation](gate) * (normal * weight + bias).reshape(gate.shape)
        before = {
            "gate": _ACTIVATIONS[self.concat_activation](gate),
            "attended": attended,
        }
        parts = [before[name] for name in self.concat]
        return jnp.concatenate([*parts, product], axis=-1) if parts else product


@dataclasses.dataclass(frozen=True)
class Projections:
    """Linear projections of tokens: the gate, and attention's queries, keys and values.

    Attributes:
        gate: ``[..., num_heads * value_dim]``.
        query: ``[..., num_heads, qk_dim]``.
        key: The same.
        value: ``[..., num_heads, value_dim]``.
    """

    gate: Float[Array, "*axes columns"]
    query: Float[Array, "*axes heads qk_dim"]
    key: Float[Array, "*axes heads qk_dim"]
    value: Float[Array, "*axes heads value_dim"]


class TransductionUnit(nnx.Module):
    """One layer of an HSTU ranker.

    ``u, v, q, k = split(f1(norm(x)))`` with SiLU on ``u``, ``a`` is `hstu_attention` of q, k and v,
    and the output ``x + f2(dropout([u, a, u * norm(a)]))``. From the authors' code for Zhai et al.
    2024 (arXiv:2402.17152); the paper's unit is `HSTUBlock`. A token sees earlier tokens of its
    row and itself. Targets do not see each other.

    Args:
        dim: Columns of input and output.
        num_heads: Number of heads.
        max_length: Divisor of the attention, the length of the longest row. None: each call says
            it.
        qk_dim: Columns of a head's queries and keys; None: ``dim / num_heads``.
        value_dim: Columns of a head's values and gates; None: ``dim / num_heads``.
        norm: "layer" or "group", see `GatedNorm`.
        concat: What the output layer reads beside the gated result, see `GatedNorm`.
        alpha: Factor of the scores; None: ``1 / sqrt(qk_dim)``.
        contextual_length: Number of tokens in front of each row that see all context and history,
            and are not ordered among themselves; 0: all tokens see only what is before them.
        max_attention_length: Number of tokens before it that a token sees; 0: all. Targets count
            from the end of the history.
        min_full_attention_length: Number of last events that, like all targets then,
            ``max_attention_length`` does not limit.
        dropout_rate: Share of the output layer's input that is dropped in training.
        block_size: See `hstu_attention`.
        dtype: Type that it computes in; None: the wider of the input's and ``param_dtype``.
        param_dtype: Type of the parameters.
        rngs: Gives the random keys of first values (Glorot's uniform), and of dropout.

    Raises:
        ValueError: A size is too small.

    Example:
        >>> import jax.numpy as jnp
        >>> unit = TransductionUnit(8, 2, max_length=5, rngs=nnx.Rngs(0))
        >>> unit(jnp.ones((4, 8)), jnp.array([1, 2]), jnp.array([0, 1])).shape
        (4, 8)
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        max_length: int | None = None,
        qk_dim: int | None = None,
        value_dim: int | None = None,
        norm: Literal["layer", "group"] = "layer",
        concat: Sequence[Literal["gate", "attended"]] = ("gate", "attended"),
        alpha: float | None = None,
        contextual_length: int = 0,
        max_attention_length: int = 0,
        min_full_attention_length: int = 0,
        dropout_rate: float = 0.0,
        block_size: int = BLOCK,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.num_heads = num_heads
        # 0 heads are refused below, with the other sizes.
        columns = dim // num_heads if num_heads else 0
        self.qk_dim = columns if qk_dim is None else qk_dim
        self.value_dim = columns if value_dim is None else value_dim
        sizes = (num_heads, self.qk_dim, self.value_dim, 1 if max_length is None else max_length)
        if min(sizes) < 1 or min(contextual_length, max_attention_length) < 0:
            raise ValueError(
                "a transduction unit's sizes are 1 or more, its contextual_length and "
                f"max_attention_length 0 or more; got num_heads={num_heads}, qk_dim={self.qk_dim}, "
                f"value_dim={self.value_dim}, max_length={max_length}, "
                f"contextual_length={contextual_length}, "
                f"max_attention_length={max_attention_length}"
            )
        values, queries = num_heads * self.value_dim, num_heads * self.qk_dim
        self.norm = nnx.LayerNorm(dim, epsilon=1e-6, use_fast_variance=False, **types)
        self.inputs = nnx.Linear(
            dim,
            2 * values + 2 * queries,
            kernel_init=nnx.initializers.glorot_uniform(),
            dot_general=dot_general,
            **types,
        )
        self.gated_norm = GatedNorm(num_heads, self.value_dim, norm=norm, concat=concat, **types)
        self.out = nnx.Linear(
            self.gated_norm.columns,
            dim,
            use_bias=False,
            kernel_init=nnx.initializers.glorot_uniform(),
            dot_general=dot_general,
            **types,
        )
        self.dropout = nnx.Dropout(dropout_rate, rngs=rngs)
        self.max_length = max_length
        self.alpha = self.qk_dim**-0.5 if alpha is None else alpha
        self.contextual_length = contextual_length
        self.max_attention_length = max_attention_length
        self.min_full_attention_length = min_full_attention_length
        self.block_size = block_size
        self.dtype = dtype

    def __call__(
        self,
        states: Float[AnyArray, "*devices capacity dim"],
        lengths: AnyArray,
        num_targets: AnyArray | None = None,
        *,
        longest: Array | int | None = None,
    ) -> Float[Array, "*devices capacity dim"]:
        """Transform the tokens of a batch; the output has the same shape.

        Args:
            states: ``[capacity, dim]``, rows one after the other: context, history, targets.
            lengths: ``[rows]``, the number of tokens of each row.
            num_targets: ``[rows]``, the number of targets at the end of each row; None: none.
            longest: Divisor of the attention, one number, in place of ``max_length``.

        Raises:
            ValueError: Neither ``max_length`` nor ``longest`` is given.
        """
        (states,) = promote(self.dtype, without_padding(states, complete_cumsum(lengths)))
        projected = self.project(states)
        return self.finish(states, projected, self.attend(projected, lengths, num_targets, longest))

    def project(self, states: Float[Array, "*axes dim"]) -> Projections:
        """Return gates, queries, keys and values of tokens, each token by itself."""
        values, queries = self.num_heads * self.value_dim, self.num_heads * self.qk_dim
        # One product for all four. The order is that of the authors' code.
        gate, value, query, key = jnp.split(
            self.inputs(self.norm(states)), (values, 2 * values, 2 * values + queries), axis=-1
        )
        heads = (*states.shape[:-1], self.num_heads, -1)
        return Projections(nnx.silu(gate), *(x.reshape(heads) for x in (query, key, value)))

    def attend(
        self,
        projected: Projections,
        lengths: AnyArray,
        num_targets: AnyArray | None,
        longest: Array | int | None = None,
    ) -> Float[Array, "*devices capacity heads value_dim"]:
        """Return the attention's result of ragged rows."""
        return hstu_attention(
            projected.query,
            projected.key,
            projected.value,
            lengths,
            num_targets=num_targets,
            contextual_length=self.contextual_length,
            max_attention_length=self.max_attention_length,
            min_full_attention_length=self.min_full_attention_length,
            alpha=self.alpha,
            scale=self.scale(longest),
            block_size=self.block_size,
        )

    def scale(self, longest: Array | int | None = None) -> Array | float:
        """Return the factor of the attention's weights, one over its divisor."""
        divisor = self.max_length if longest is None else longest
        if divisor is None:
            raise ValueError("the unit has no max_length; a call then gives longest=")
        return 1 / divisor

    def finish(
        self,
        states: Float[Array, "*axes dim"],
        projected: Projections,
        attended: Float[Array, "*axes heads value_dim"],
    ) -> Float[Array, "*axes dim"]:
        """Return the output of tokens from the attention's result, each token by itself."""
        gated = self.gated_norm(attended.reshape(projected.gate.shape), projected.gate)
        return states + self.out(self.dropout(gated))
