"""The HSTU ranker: predicts what a user does with each of several candidates, from a history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Num

from jaxrec.embed import EmbeddingCollection
from jaxrec.nn.chunks import sum_in_chunks
from jaxrec.nn.event_positions import EventPositions, TimeScale
from jaxrec.nn.event_tokens import (
    ActionEncoder,
    ContextTokens,
    EventTokens,
    TokenForm,
    TokenMLP,
    TokenRows,
    interleaved,
)
from jaxrec.nn.history_cache import HistoryCache
from jaxrec.nn.ranker_features import Events, RankerFeatures, look_up, read_events, widths_of
from jaxrec.nn.ranker_serving import append_events, encode_histories, score_candidates
from jaxrec.nn.row_pieces import cut_rows, join_rows
from jaxrec.nn.target_tasks import TargetNorm, TargetTask, TargetTasks
from jaxrec.nn.tiled_attention import BLOCK
from jaxrec.nn.transduction_stack import TransductionStack
from jaxrec.ragged import JaggedArray, KeyedJaggedArray
from jaxrec.ragged.arrays import AnyArray


class HSTURanker(nnx.Module):
    """Predicts a user's actions on each of several targets from the user's history.

    The ranker of Zhai et al. 2024, "Actions speak louder than words: Trillion-parameter sequential
    transducers for generative recommendations" (arXiv:2402.17152), as in the authors' code, which
    MLPerf's DLRMv4 trains. A row has context tokens, the tokens of events and those of targets
    (`EventTokens`, `ContextTokens`), to which `EventPositions` adds positions and times. A stack of
    `TransductionUnit` follows. `TargetTasks` computes logits from each target's state and item.
    Targets see context, history and themselves, but not each other.

    Args:
        embeddings: Tables of all features of ids.
        features: Names of the batch's features.
        tasks: Tasks to predict for each target.
        dim: Columns of a token.
        num_layers: Number of units.
        num_heads: Heads of each unit.
        qk_dim: Columns of a head's queries and keys; None: ``dim / num_heads``.
        value_dim: Columns of a head's values and gates; None: ``dim / num_heads``.
        norm: "layer" or "group", see `GatedNorm`.
        max_length: Divisor of the attention: the most tokens of a row. None: that of the longest
            row of the batch, as in the authors' code, which makes a row's result depend on its
            batch; `encode` then refuses.
        form: "sum" or "interleaved", see `EventTokens`.
        action_bits: Bits of the actions of events, see `ActionEncoder`.
        action_dim: Columns of each bit's vector.
        watch_thresholds: See `ActionEncoder`.
        num_positions: Rows of the table of positions.
        num_times: Rows of the table of times, if the features have times.
        time_scale: See `EventPositions`.
        count_from: "end" or "start", see `EventPositions`. With "start" a cache can grow.
        contextual_mask: Whether context tokens see the whole history. False, as in the authors'
            ranker: they see only earlier tokens.
        max_attention_length: Number of tokens before it that a token sees; 0: all.
        min_full_attention_length: See `TransductionUnit`.
        truncation: Pair ``(layers, events)``: after that many layers only the newest events stay,
            beside context and targets. None: all stay.
        output: Last norm of a target's state, see `TargetNorm`.
        token_hidden_dim: Hidden columns of the tokens' MLPs.
        item_hidden_dim: Hidden columns of the MLP of a target's item.
        task_hidden_sizes: Hidden layers of `TargetTasks`.
        dropout_rate: Share of a unit's gated result that is dropped in training.
        input_dropout_rate: Share of the tokens' columns that is dropped in training.
        remat: Whether the backward pass computes each unit again, to keep only its input.
        block_size: See `hstu_attention`.
        dtype: Type that the dense part computes in; None: the wider of the embeddings' and
            ``param_dtype``.
        param_dtype: Type of the dense parameters.
        rngs: Gives the random keys of first values, and of dropout.

    Raises:
        ValueError: No table or several read a feature, the tables of a pair differ in width, those
            of the context do, or an option does not fit another one.

    Example:
        >>> import jaxrec, optax
        >>> rngs = nnx.Rngs(0)
        >>> item = jaxrec.EmbeddingConfig("item", 100, 8, feature_names=("history", "candidate"))
        >>> tables = [item, jaxrec.EmbeddingConfig("user", 10, 8)]
        >>> model = HSTURanker(
        ...     jaxrec.EmbeddingCollection(tables, rngs=rngs),
        ...     RankerFeatures({"history": "candidate"}, context={"user": 1},
        ...                    actions=("action", "label")),
        ...     [TargetTask("click", bit=1)], dim=16, num_layers=2, num_heads=2, max_length=8,
        ...     rngs=rngs)
        >>> batch = jaxrec.KeyedJaggedArray.from_lists({
        ...     "user": [[3], [4]], "history": [[1, 2, 3], [4]], "action": [[1, 0, 1], [0]],
        ...     "candidate": [[7], [8, 9]], "label": [[1], [0, 1]]})
        >>> loss, logits = model.loss(batch)
        >>> logits.shape  # three targets in a capacity of 8, one task
        (8, 1)
    """

    def __init__(
        self,
        embeddings: EmbeddingCollection,
        features: RankerFeatures,
        tasks: Sequence[TargetTask],
        *,
        dim: int,
        num_layers: int = 3,
        num_heads: int = 4,
        qk_dim: int | None = None,
        value_dim: int | None = None,
        norm: Literal["layer", "group"] = "layer",
        max_length: int | None,
        form: TokenForm = "sum",
        action_bits: Sequence[int] = (1,),
        action_dim: int = 8,
        watch_thresholds: Sequence[tuple[int, int]] = (),
        num_positions: int = 8192,
        num_times: int = 2049,
        time_scale: TimeScale = "sqrt",
        count_from: Literal["end", "start"] = "end",
        contextual_mask: bool = False,
        max_attention_length: int = 0,
        min_full_attention_length: int = 0,
        truncation: tuple[int, int] | None = None,
        output: Literal["l2", "layer_norm", "time"] = "layer_norm",
        token_hidden_dim: int = 256,
        item_hidden_dim: int = 512,
        task_hidden_sizes: Sequence[int] = (512,),
        dropout_rate: float = 0.0,
        input_dropout_rate: float = 0.0,
        remat: bool = False,
        block_size: int = BLOCK,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        pairs = {**features.items, **features.additional}
        widths = widths_of(embeddings, [*pairs, *pairs.values(), *features.context], pairs)
        of_context = {name: widths[name] for name in features.context}
        if len(set(of_context.values())) > 1:
            raise ValueError(f"the tables of the context are of one width; got {of_context}")
        if output == "time" and features.times is None:
            raise ValueError("output='time' needs the features times=")
        if watch_thresholds and features.watch_times is None:
            raise ValueError("watch_thresholds need the features watch_times=")
        self.embeddings = embeddings
        self.features = features
        content_dim = sum(widths[name] for name in features.items)
        additional_dim = sum(widths[name] for name in features.additional)
        self.context = nnx.data(
            ContextTokens(
                next(iter(of_context.values())),
                dim,
                features.context,
                min_lengths=features.min_lengths,
                **types,
            )
            if features.context
            else None
        )
        actions = None
        if features.actions is not None:
            actions = ActionEncoder(
                action_bits, action_dim, watch_thresholds=watch_thresholds, **types
            )
        self.tokens = EventTokens(
            content_dim,
            dim,
            hidden_dim=token_hidden_dim,
            additional_dim=additional_dim,
            actions=actions,
            form=form,
            **types,
        )
        self.positions = EventPositions(
            num_positions,
            dim,
            num_times=0 if features.times is None else num_times,
            contextual_length=self.num_context,
            time_scale=time_scale,
            count_from=count_from,
            **types,
        )
        self.stack = TransductionStack(
            dim,
            num_layers,
            num_heads,
            # A pair counts events, of which some have two tokens.
            truncation=truncation and (truncation[0], truncation[1] * self.tokens.tokens_per_event),
            num_context=self.num_context,
            remat=remat,
            max_length=max_length,
            qk_dim=qk_dim,
            value_dim=value_dim,
            norm=norm,
            contextual_length=self.num_context if contextual_mask else 0,
            max_attention_length=max_attention_length,
            min_full_attention_length=min_full_attention_length,
            dropout_rate=dropout_rate,
            block_size=block_size,
            **types,
        )
        self.output = TargetNorm(dim, output, **types)
        self.item_mlp = TokenMLP(content_dim + additional_dim, item_hidden_dim, dim, **types)
        self.tasks = TargetTasks(tasks, dim, hidden_sizes=task_hidden_sizes, **types)
        self.input_dropout = nnx.Dropout(input_dropout_rate, rngs=rngs)
        self.max_length = max_length

    @property
    def num_context(self) -> int:
        """Number of context tokens that each row begins with."""
        return 0 if self.context is None else self.context.num_slots

    def __call__(self, features: KeyedJaggedArray) -> Float[Array, "*devices capacity tasks"]:
        """Return the logits of a batch's targets.

        Args:
            features: The batch, with the features of history, context and targets.

        Returns:
            ``[capacity, tasks]``, in the order of the first target feature's values; a regression's
            prediction itself. `TargetTasks.predictions` gives probabilities.

        Raises:
            KeyError: The batch lacks a feature.
            ValueError: The features of history, or of targets, differ in their lengths. Under jit
                the logits become NaN instead.
        """
        return self.tasks(*self.states(features))

    def states(
        self, features: KeyedJaggedArray
    ) -> tuple[Float[Array, "*devices capacity dim"], Float[Array, "*devices capacity dim"]]:
        """Return each target's state and its item's embedding, which `TargetTasks` reads.

        Raises:
            KeyError, ValueError: As for calls of the model.
        """
        tokens, targets = self.assemble(features)
        # The attention's divisor is that of the whole batch, on whichever device a row lies.
        longest = None
        if self.max_length is None:
            most = (tokens.lengths - tokens.num_targets).max() + tokens.num_targets.max()
            longest = jnp.maximum(most, 1)
        states = self.positions(tokens.states, tokens.lengths, tokens.times, tokens.num_targets)
        states = self.input_dropout(states)
        per_target = self._tokens_per_target
        capacity = targets.capacity * per_target
        states, lengths = self.stack(
            states,
            tokens.lengths,
            tokens.num_targets,
            longest=longest,
            target_capacity=capacity,
        )
        last = (lengths - tokens.num_targets, tokens.num_targets)
        states = cut_rows(lengths, [last], states, capacity=capacity)
        # A target may have two tokens, item and action. The item's token comes first and cannot
        # see the action, which is what we predict.
        states = states[..., ::per_target, :]
        return self.output(states, targets.times), self.item_embeddings(targets)

    def assemble(self, features: KeyedJaggedArray) -> tuple[TokenRows, Events]:
        """Return the tokens of a batch before positions and times, and its targets.

        Raises:
            KeyError, ValueError: As for calls of the model.
        """
        embedded = look_up(self.embeddings, features)
        history = read_events(self.features, "history", features, embedded, with_actions=True)
        targets = read_events(self.features, "targets", features, embedded, with_actions=False)
        per_target = self._tokens_per_target
        with_actions = self.tokens.form == "sum" or per_target == 2
        parts = [
            self.history_tokens(history),
            self.target_tokens(targets, with_actions=with_actions),
        ]
        lengths = [
            history.lengths * self.tokens.tokens_per_event,
            targets.lengths * per_target,
        ]
        if self.context is not None:
            total = history.lengths + targets.lengths
            parts.insert(0, self.context_tokens(features, embedded, total))
            lengths.insert(0, jnp.full_like(history.lengths, self.num_context))
        states, times = join_rows(lengths, parts)
        return TokenRows(states, sum(lengths[1:], lengths[0]), lengths[-1], times), targets

    @property
    def _tokens_per_target(self) -> int:
        # In training an interleaved target is two tokens, as an event is.
        is_training = not self.input_dropout.deterministic
        return 2 if self.tokens.form == "interleaved" and is_training else 1

    def labels(self, features: KeyedJaggedArray) -> Float[Array, "*devices capacity tasks"]:
        """Return the labels of a batch's targets, from its actions and watch times.

        Raises:
            KeyError: The batch lacks a feature.
            ValueError: The model was made without the feature that a task needs.
        """

        def values(name: str | None) -> Array | None:
            return (
                None
                if name is None
                else jnp.asarray(features.select([name]).expanded()[name].values)
            )

        return self.tasks.labels(
            values(self.features.number("targets", "actions")),
            values(self.features.number("targets", "watch_times")),
        )

    def weights(self, features: KeyedJaggedArray) -> Float[Array, "*devices capacity tasks"]:
        """Return 1 for each target and task, and 0 at padding."""
        name = self.features.of("targets", "items")[0]
        column = features.select([name]).expanded()[name]
        used = jnp.asarray(column.lengths).sum(-1, keepdims=True)
        exists = jnp.arange(column.capacity).reshape((1,) * (used.ndim - 1) + (-1,)) < used
        ones = jnp.broadcast_to(exists[..., None], (*exists.shape, len(self.tasks.tasks)))
        return ones.astype(jnp.float32)

    def losses(
        self,
        logits: Float[AnyArray, "*devices capacity tasks"],
        features: KeyedJaggedArray,
        weights: Num[AnyArray, "*devices capacity tasks"] | None = None,
    ) -> Float[Array, " tasks"]:
        """Return the loss of each task, over all targets of a batch.

        Args:
            logits: Result of a call of the model.
            features: The batch, whose target features have the labels.
            weights: ``[capacity, tasks]`` weight of each target in each task; None: ones.

        Raises:
            KeyError, ValueError: As for `labels`.
        """
        return self.tasks.losses(
            logits, self.labels(features), self._all_weights(features, weights)
        )

    def loss(
        self,
        features: KeyedJaggedArray,
        weights: Num[AnyArray, "*devices capacity tasks"] | None = None,
        *,
        samples: int | None = None,
    ) -> tuple[Float[Array, ""], Float[Array, "*devices capacity tasks"]]:
        """Return the sum of all tasks' losses, and the logits.

        Args:
            features: The batch.
            weights: As for `losses`.
            samples: Compute the MLP of the tasks for this many targets at once, forward and
                backward (`sum_in_chunks`); a divisor of the capacity of all targets. None: for all
                at once.

        Raises:
            KeyError, ValueError: As for calls of the model and for `labels`; ``samples`` is no
                divisor.
        """
        user, item = self.states(features)
        labels, weights = self.labels(features), self._all_weights(features, weights)
        if samples is None:
            logits = self.tasks(user, item)
            return self.tasks.losses(logits, labels, weights).sum(), jax.lax.stop_gradient(logits)

        def losses(tasks: TargetTasks, *arrays: Array) -> tuple[Array, Array]:
            user, item, labels, shares = arrays
            logits = tasks(user, item)
            return tasks.target_losses(logits, labels, shares).sum(-1), logits

        arrays = [user, item, labels, self.tasks.shares(weights)]
        flat = [array.reshape(-1, array.shape[-1]) for array in arrays]
        total, logits = sum_in_chunks(losses, self.tasks, *flat, samples=samples)
        return total, logits.reshape(labels.shape)

    def encode(
        self,
        features: KeyedJaggedArray,
        cache: HistoryCache | None = None,
        *,
        capacity: int | None = None,
        request_times: AnyArray | None = None,
        longest: int | None = None,
    ) -> HistoryCache:
        """Encode histories once, so that `score` only computes candidates.

        M-FALCON in section 3.4 of the paper. Scores equal those of one pass over history and
        candidates. Call it in evaluation mode.

        Args:
            features: History and context; with ``cache`` only the events after those of the cache,
                and no context. Each user is a row.
            cache: An earlier result, which the new events are appended to. The model must count
                positions from the start and have neither ``contextual_mask`` nor ``truncation``.
            capacity: Tokens that the cache has space for in each row; None: ``max_length``. Not
                with ``cache``.
            request_times: ``[rows]``, time of the last candidate that will be scored; needed where
                the model has times and counts from the end. Each request then needs a new cache.
            longest: With ``cache``, a static bound on the number of new events of a row; None: the
                features' capacity.

        Returns:
            The cache. A row that exceeds its capacity has a length above it, and `score` returns
            NaN for it.

        Raises:
            ValueError: The model cannot encode histories apart from targets, or cannot append; or
                an argument is missing. Outside of jit also: a row exceeds a bound.
        """
        if cache is None:
            return encode_histories(self, features, capacity, request_times)
        if capacity is not None or request_times is not None:
            raise ValueError("capacity and request_times are those of the cache; leave them out")
        return append_events(self, features, cache, longest)

    def score(
        self, cache: HistoryCache, features: KeyedJaggedArray, *, longest: int | None = None
    ) -> Float[Array, "*devices capacity tasks"]:
        """Return the logits of candidates, for the histories of a cache.

        Args:
            cache: Result of `encode`; row ``b`` is the user of row ``b`` of the candidates.
            features: The targets' features, their actions and watch times aside.
            longest: Static bound on the number of candidates of a row; None: the features'
                capacity. The attention takes memory for ``rows * longest`` candidates.

        Returns:
            As a call of the model. Candidates of a row with more than ``longest``, or whose cache
            is too small, get NaN.

        Raises:
            KeyError: The batch lacks a feature.
            ValueError: Outside of jit, a row has more candidates than ``longest``, or more tokens
                than the cache has space for.
        """
        return score_candidates(self, cache, features, longest)

    def context_tokens(
        self, features: KeyedJaggedArray, embedded: dict[str, JaggedArray], row_lengths: Array
    ) -> tuple[Array, Array | None]:
        """Return the context tokens of all rows, and their times, zeros."""
        assert self.context is not None
        if missing := [name for name in self.features.context if name not in features.keys]:
            raise KeyError(f"the batch lacks {missing}, features of the context")
        states = self.context(embedded, row_lengths)
        if self.features.times is None:
            return states, None
        return states, jnp.zeros(states.shape[:-1], jnp.int32)

    def history_tokens(self, events: Events) -> tuple[Array, Array | None]:
        """Return the tokens of events, ``[tokens, dim]``, and their times; None without times."""
        states = self.tokens(
            events.content,
            events.additional,
            actions=events.actions,
            watch_times=events.watch_times,
        )
        return states, interleaved(events.times, self.tokens.tokens_per_event)

    def target_tokens(self, events: Events, *, with_actions: bool) -> tuple[Array, Array | None]:
        """Return the tokens of targets, ``[tokens, dim]``, and their times; None without times."""
        states = self.tokens.targets(events.content, events.additional, with_actions=with_actions)
        return states, interleaved(events.times, states.shape[-2] // max(events.capacity, 1))

    def item_embeddings(self, targets: Events) -> Float[Array, "*devices capacity dim"]:
        """Return the embeddings of the targets' items, which their states are multiplied by."""
        parts = [targets.content]
        if targets.additional is not None:
            parts.append(targets.additional)
        return self.item_mlp(jnp.concatenate(parts, axis=-1))

    def _all_weights(self, features: KeyedJaggedArray, weights: Any) -> Array:
        exists = self.weights(features)
        return exists if weights is None else jnp.where(exists > 0, jnp.asarray(weights), 0)
