"""Tokens of a ranker's rows: embeddings of actions, of context, and of events and candidates."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int, Int32

from jaxrec.nn.arithmetic import promote
from jaxrec.nn.mlp import MLP
from jaxrec.ragged import JaggedArray
from jaxrec.ragged.arrays import AnyArray, each_device
from jaxrec.ragged.fbgemm import jagged_to_padded_dense
from jaxrec.ragged.offsets import complete_cumsum

TokenForm = Literal["sum", "interleaved"]


class TokenMLP(nnx.Module):
    """A dense layer, `SwishLayerNorm`, a dense layer and a layer norm."""

    def __init__(self, in_features: int, hidden: int, dim: int, **types: Any):
        self.mlp = MLP(
            in_features,
            (hidden, dim),
            activation="swish_layernorm",
            activation_on_last=False,
            **types,
        )
        self.norm = nnx.LayerNorm(dim, epsilon=1e-5, use_fast_variance=False, **types)

    def __call__(self, x: Float[AnyArray, "*axes in_features"]) -> Float[Array, "*axes dim"]:
        return self.norm(self.mlp(x))


@dataclasses.dataclass(frozen=True)
class TokenRows:
    """The tokens of a batch: in each row context, history, targets.

    Attributes:
        states: ``[capacity, dim]``, rows one after the other.
        lengths: ``[rows]``, tokens of each row.
        num_targets: ``[rows]``, tokens of targets at the end of each row.
        times: ``[capacity]`` seconds, 0 for context; or None.
    """

    states: Float[Array, "*devices capacity dim"]
    lengths: Int32[Array, "*devices rows"]
    num_targets: Int32[Array, "*devices rows"]
    times: Int[Array, "*devices capacity"] | None


class ActionEncoder(nnx.Module):
    """Embeds the actions of an event, which are bits of a number.

    Each bit has a learned vector. An event's embedding is the concatenation of the vectors of the
    bits that are set, with zeros for the others. The actions of a target are unknown: all targets
    share one learned embedding, ``target``. From the authors' code for Zhai et al. 2024
    (arXiv:2402.17152).

    Args:
        bits: The bits, such as ``(1, 2, 4)`` for click, like and share.
        dim: Columns of each bit's vector.
        watch_thresholds: Pairs ``(seconds, bit)``: events watched for that time or longer have that
            bit, too. These bits follow ``bits`` in the embedding.
        dtype: Type of the result; None: ``param_dtype``.
        param_dtype: Type of the parameters.
        rngs: Gives the random keys of first values (normal, standard deviation 0.1).

    Raises:
        ValueError: ``bits`` and ``watch_thresholds`` name no bit, or a bit is not a positive int32.

    Example:
        >>> import jax.numpy as jnp
        >>> encoder = ActionEncoder((1, 2), 3, watch_thresholds=((30, 4),), rngs=nnx.Rngs(0))
        >>> encoder(jnp.array([0, 3]), jnp.array([10, 60])).shape
        (2, 9)
    """

    def __init__(
        self,
        bits: Sequence[int],
        dim: int,
        *,
        watch_thresholds: Sequence[tuple[int, int]] = (),
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.watch_thresholds = tuple((seconds, bit) for seconds, bit in watch_thresholds)
        self.bits = (*bits, *(bit for _, bit in self.watch_thresholds))
        if not self.bits or min(self.bits) < 1 or max(self.bits) >= 1 << 31 or dim < 1:
            raise ValueError(
                f"actions are one bit or more, each from 1 to 2**31 - 1, of one column or more; "
                f"got bits {self.bits}, dim={dim}"
            )
        draw = nnx.initializers.normal(0.1)
        self.vectors = nnx.Param(draw(rngs.params(), (len(self.bits), dim), param_dtype))
        self.target = nnx.Param(draw(rngs.params(), (len(self.bits) * dim,), param_dtype))
        self.dtype = dtype

    @property
    def columns(self) -> int:
        """Columns of an embedding."""
        return self.target.shape[0]

    def __call__(
        self, actions: Int[AnyArray, "*axes"], watch_times: Int[AnyArray, "*axes"] | None = None
    ) -> Float[Array, "*axes columns"]:
        """Return the embeddings of events.

        Args:
            actions: ``[...]`` integers whose bits are the events' actions.
            watch_times: ``[...]`` seconds; needed with ``watch_thresholds``.

        Raises:
            ValueError: Watch times are missing.
        """
        (vectors,) = promote(self.dtype, self.vectors[...])
        actions = jnp.asarray(actions)
        if self.watch_thresholds:
            if watch_times is None:
                raise ValueError("actions with watch_thresholds need watch_times")
            for seconds, bit in self.watch_thresholds:
                actions = actions | jnp.where(jnp.asarray(watch_times) >= seconds, bit, 0)
        bits = jnp.asarray(self.bits, actions.dtype).reshape((1,) * actions.ndim + (-1,))
        is_set = (actions[..., None] & bits) > 0
        embedded = jnp.where(is_set[..., None], vectors.reshape((*bits.shape, -1)), 0)
        return embedded.reshape(*actions.shape, -1)


class ContextTokens(nnx.Module):
    """Turns embeddings of context, such as the user's, into the tokens that a row begins with.

    A feature has one slot or more, and each slot a dense layer of its own. A slot without an
    embedding (a row with fewer ids than slots) has its layer's bias.

    Args:
        in_features: Columns of the embeddings.
        dim: Columns of a token.
        slots: Number of slots of each feature, by name.
        min_lengths: By name, the number of events and targets that a row needs for the feature to
            be read. A feature of a shorter row counts as zeros.
        dtype: Type that it computes in; None: the wider of the input's and ``param_dtype``.
        param_dtype: Type of the parameters.
        rngs: Gives the random keys of first values (Glorot's uniform).

    Raises:
        ValueError: ``slots`` is empty, or ``min_lengths`` names a feature that it lacks.

    Example:
        >>> import jax.numpy as jnp
        >>> tokens = ContextTokens(4, 8, {"user": 1, "tags": 2}, rngs=nnx.Rngs(0))
        >>> embedded = {"user": JaggedArray(jnp.ones((2, 4)), jnp.array([1, 1])),
        ...             "tags": JaggedArray(jnp.ones((3, 4)), jnp.array([0, 3]))}
        >>> tokens(embedded, jnp.array([5, 7])).shape  # two rows of three tokens
        (6, 8)
    """

    def __init__(
        self,
        in_features: int,
        dim: int,
        slots: Mapping[str, int],
        *,
        min_lengths: Mapping[str, int] | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        if not slots or min(slots.values()) < 1:
            raise ValueError(f"each feature of the context has 1 slot or more, got {dict(slots)}")
        if unknown := sorted(set(min_lengths or {}) - set(slots)):
            raise ValueError(f"min_lengths name {unknown}, but the context is {list(slots)}")
        self.slots = tuple(slots.items())
        self.min_lengths = tuple((min_lengths or {}).items())
        draw = nnx.initializers.glorot_uniform(batch_axis=0)
        shape = (self.num_slots, in_features, dim)
        self.kernels = nnx.Param(draw(rngs.params(), shape, param_dtype))
        self.biases = nnx.Param(jnp.zeros((self.num_slots, dim), param_dtype))
        self.dtype = dtype

    @property
    def num_slots(self) -> int:
        """Number of tokens of each row."""
        return sum(count for _, count in self.slots)

    def __call__(
        self, embedded: Mapping[str, JaggedArray], row_lengths: AnyArray
    ) -> Float[Array, "*devices tokens dim"]:
        """Return the context tokens of all rows, one row after the other.

        Args:
            embedded: Embeddings of each feature, ``[capacity, in_features]`` values. More ids in a
                row than its slots are cut.
            row_lengths: ``[rows]``, events and targets of each row, for ``min_lengths``.
        """
        least, parts = dict(self.min_lengths), []
        for name, count in self.slots:
            column = embedded[name]

            def padded(lengths: Array, values: Array, count: int = count) -> Array:
                return jagged_to_padded_dense(values, complete_cumsum(lengths), count)

            dense = each_device(padded, jnp.asarray(column.lengths), jnp.asarray(column.values))
            if name in least:
                is_long = jnp.asarray(row_lengths) >= least[name]
                dense = jnp.where(is_long[..., None, None], dense, 0)
            parts.append(dense)
        slots, kernels, biases = promote(
            self.dtype, jnp.concatenate(parts, axis=-2), self.kernels[...], self.biases[...]
        )
        tokens = jnp.einsum("...si,sio->...so", slots, kernels)
        tokens = tokens + biases.reshape((1,) * (tokens.ndim - 2) + biases.shape)
        return tokens.reshape(*tokens.shape[:-3], -1, tokens.shape[-1])


class EventTokens(nnx.Module):
    """Makes the tokens of events and of targets from their items' embeddings and actions.

    * ``form="sum"``: one token an event, the sum of an MLP of its item, one of its additional
      features and one of its actions.
    * ``form="interleaved"``: two tokens an event, first an MLP of its item and additional features,
      then one of its actions.

    An MLP is a dense layer, `SwishLayerNorm`, a dense layer and a layer norm. Zhai et al. 2024
    (arXiv:2402.17152), section 2.2, and the authors' code.

    Args:
        content_dim: Columns of an item's embedding.
        dim: Columns of a token.
        hidden_dim: Hidden columns of the MLPs.
        additional_dim: Columns of the additional features.
        target_dim: Columns of features that only targets have. Events have a learned vector in
            their place.
        actions: The encoder of actions; None: events have no actions.
        form: "sum" or "interleaved".
        dtype: Type that it computes in; None: the wider of the input's and ``param_dtype``.
        param_dtype: Type of the parameters.
        rngs: Gives the random keys of first values.

    Raises:
        ValueError: ``form`` is none of the two, or interleaved events have no actions.

    Example:
        >>> import jax.numpy as jnp
        >>> actions = ActionEncoder((1, 2), 3, rngs=nnx.Rngs(0))
        >>> tokens = EventTokens(4, 8, hidden_dim=16, actions=actions, form="interleaved",
        ...                      rngs=nnx.Rngs(0))
        >>> tokens(jnp.ones((5, 4)), actions=jnp.arange(5)).shape  # five events
        (10, 8)
    """

    def __init__(
        self,
        content_dim: int,
        dim: int,
        *,
        hidden_dim: int,
        additional_dim: int = 0,
        target_dim: int = 0,
        actions: ActionEncoder | None = None,
        form: TokenForm = "sum",
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        if form not in ("sum", "interleaved"):
            raise ValueError(f"form is 'sum' or 'interleaved', got {form!r}")
        if form == "interleaved" and actions is None:
            raise ValueError("interleaved tokens are items and actions; give the encoder actions=")
        columns = content_dim + target_dim + (additional_dim if form == "interleaved" else 0)
        self.content_mlp = TokenMLP(columns, hidden_dim, dim, **types)
        self.additional_mlp = nnx.data(
            TokenMLP(additional_dim, hidden_dim, dim, **types)
            if additional_dim and form == "sum"
            else None
        )
        self.actions = actions
        self.action_mlp = nnx.data(
            None if actions is None else TokenMLP(actions.columns, hidden_dim, dim, **types)
        )
        draw = nnx.initializers.normal(0.1)
        self.no_target = nnx.data(
            nnx.Param(draw(rngs.params(), (target_dim,), param_dtype)) if target_dim else None
        )
        self.form = form

    @property
    def tokens_per_event(self) -> int:
        """Tokens of an event: 1 or 2."""
        return 2 if self.form == "interleaved" else 1

    def columns(
        self,
        content: Float[AnyArray, "*axes content_dim"],
        additional: Float[AnyArray, "*axes additional_dim"] | None = None,
        of_targets: Float[AnyArray, "*axes target_dim"] | None = None,
    ) -> Float[Array, "*axes columns"]:
        """Concatenate the inputs of the content's MLP: content and other features side by side.

        Without ``of_targets`` the elements are events, which have a learned vector in their place.
        """
        parts = [jnp.asarray(content)]
        if additional is not None and self.additional_mlp is None:
            parts.append(jnp.asarray(additional))
        if self.no_target is not None:
            if of_targets is None:
                of_targets = _spread(self.no_target[...], parts[0][..., :1])
            parts.append(jnp.asarray(of_targets))
        return parts[0] if len(parts) == 1 else jnp.concatenate(promote(None, *parts), axis=-1)

    def __call__(
        self,
        content: Float[AnyArray, "*devices capacity content_dim"],
        additional: Float[AnyArray, "*devices capacity additional_dim"] | None = None,
        *,
        actions: Int[AnyArray, "*devices capacity"] | None = None,
        watch_times: Int[AnyArray, "*devices capacity"] | None = None,
    ) -> Float[Array, "*devices tokens dim"]:
        """Return the tokens of events, ``tokens_per_event`` for each.

        Raises:
            ValueError: The model has an encoder of actions and they are missing.
        """
        items = self._items(self.columns(content, additional), additional)
        if self.actions is None or self.action_mlp is None:
            return items
        if actions is None:
            raise ValueError("the events have no actions, which the model reads")
        return self._with_actions(items, self.action_mlp(self.actions(actions, watch_times)))

    def targets(
        self,
        content: Float[AnyArray, "*devices capacity content_dim"],
        additional: Float[AnyArray, "*devices capacity additional_dim"] | None = None,
        *,
        of_targets: Float[AnyArray, "*devices capacity target_dim"] | None = None,
        with_actions: bool = True,
    ) -> Float[Array, "*devices tokens dim"]:
        """Return the tokens of targets, whose actions are unknown.

        Args:
            content: ``[capacity, content_dim]`` embeddings of the items.
            additional: ``[capacity, additional_dim]`` additional features.
            of_targets: ``[capacity, target_dim]`` features that only targets have.
            with_actions: Whether an interleaved target has its second token, as in training.

        Raises:
            ValueError: Features that only targets have are missing.
        """
        if (of_targets is None) != (self.no_target is None):
            raise ValueError("of_targets and target_dim come together; give both or neither")
        items = self._items(self.columns(content, additional, of_targets), additional)
        if self.actions is None or self.action_mlp is None:
            return items
        if self.form == "interleaved" and not with_actions:
            return items
        unknown = self.action_mlp(promote(self.actions.dtype, self.actions.target[...])[0])
        return self._with_actions(items, _spread(unknown, items))

    def _items(self, columns: Array, additional: Any) -> Array:
        items = self.content_mlp(columns)
        if self.additional_mlp is not None:
            items = items + self.additional_mlp(jnp.asarray(additional))
        return items

    def _with_actions(self, items: Array, actions: Array) -> Array:
        if self.form == "sum":
            return items + actions
        pairs = jnp.stack([items, actions], axis=-2)
        return pairs.reshape(*items.shape[:-2], -1, items.shape[-1])


def _spread(vector: Float[Array, " dim"], like: Array) -> Float[Array, "*axes dim"]:
    """Return a vector for each element of ``like``."""
    # A choice, and not a broadcast, has the sharding of ``like``. XLA folds it.
    return jnp.where(False, like, vector.reshape((1,) * (like.ndim - 1) + vector.shape))


def interleaved(array: Any, count: int) -> Any:
    """Repeat each element of the last axis ``count`` times, once for each token of its event."""
    return jax.tree.map(lambda x: x if count == 1 else jnp.repeat(x, count, axis=-1), array)
