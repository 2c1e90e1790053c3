"""PEPNet: gates that fit embeddings to a domain, and hidden layers to a user and an item."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from jaxrec.embed import EmbeddingBagCollection
from jaxrec.nn.click_model import ClickModel, num_columns, with_dense
from jaxrec.nn.input_vectors import FeatureColumns
from jaxrec.nn.mlp import MLP, Perceptron
from jaxrec.ragged import KeyedJaggedArray
from jaxrec.ragged.arrays import AnyArray


class GateNU(nnx.Module):
    """A gate unit: ``scale * sigmoid(relu(x W + b) W' + b')``.

    Chang et al. 2023, "PEPNet: Parameter and embedding personalized network for infusing with
    personalized prior information" (arXiv:2302.01115), equations 3 and 4.

    For ``n`` columns it has ``(n + 1) * hidden + (hidden + 1) * out`` parameters and
    ``2 * hidden * (n + out)`` FLOPs per sample in its products.

    Args:
        in_features: Columns of the input.
        hidden_size: Hidden columns.
        out_features: Columns of the output.
        scale: Largest value of the output; the paper's is 2.
        dtype: Type that it computes in; None: the wider of the input's and ``param_dtype``.
        param_dtype: Type of the parameters.
        rngs: Gives the random keys of first values.

    Example:
        >>> import jax.numpy as jnp
        >>> GateNU(6, 4, 3, rngs=nnx.Rngs(0))(jnp.zeros((2, 6))).tolist()
        [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    """

    def __init__(
        self,
        in_features: int,
        hidden_size: int,
        out_features: int,
        *,
        scale: float = 2.0,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.mlp = MLP(
            in_features,
            (hidden_size, out_features),
            activation_on_last=False,
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        self.scale = scale

    def __call__(self, x: Float[AnyArray, "batch n"]) -> Float[Array, "batch out"]:
        """Map ``[batch, in_features]`` to ``[batch, out_features]``."""
        return self.scale * nnx.sigmoid(self.mlp(x))


class PEPNet(ClickModel):
    """Predicts tasks over many domains: gates personalize the embeddings and each task's layers.

    Chang et al. 2023 (arXiv:2302.01115), figure 3. For the embeddings and dense features ``E``::

        O = GateNU(domain, stop(E)) * E                            EPNet
        H_0 = O;  H_l = GateNU_l(prior, stop(O)) * relu(H_{l-1} W_l + b_l)   PPNet, for each task
        logit = H_L w + b

    ``domain`` are embeddings of features such as the page or the country, ``prior`` those of the
    user, the item and its author. No gradient goes through ``stop``. Embeddings may differ in
    width.

    Args:
        embeddings: The tables.
        num_dense: Number of dense features.
        domain: Names of the features of the domain; none: the gate follows from ``stop(E)`` alone.
        prior: Names of the features of ``prior``; none: ``stop(O)`` alone.
        num_tasks: Number of tasks.
        hidden_sizes: Columns of each task's hidden layers. The gate of a layer has as many hidden
            columns as the layer.
        domain_hidden_size: Hidden columns of the domain's gate.
        dtype: Type that the dense part computes in; None: float32, unless inputs are wider.
        logit_dtype: Type of the last layers' arithmetic and of the logits; None: ``dtype``.
        param_dtype: Type of the dense parameters.
        rngs: Gives the random keys of first values.

    Raises:
        ValueError: No table reads a feature of ``domain`` or ``prior``, there is no hidden layer,
            or a size is below 1.

    Example:
        >>> import jax.numpy as jnp
        >>> import jaxrec
        >>> rngs = nnx.Rngs(0)
        >>> tables = [jaxrec.EmbeddingBagConfig(name, 100, 8) for name in ("user", "item", "page")]
        >>> model = PEPNet(jaxrec.EmbeddingBagCollection(tables, rngs=rngs), domain=("page",),
        ...                prior=("user", "item"), num_tasks=2, hidden_sizes=(16, 8),
        ...                domain_hidden_size=8, rngs=rngs)
        >>> ids = jaxrec.KeyedJaggedArray.from_lists(
        ...     {"user": [[1], [2]], "item": [[3, 4], []], "page": [[5], [6]]})
        >>> model(None, ids).shape
        (2, 2)
    """

    def __init__(
        self,
        embeddings: EmbeddingBagCollection,
        *,
        num_dense: int = 0,
        domain: Sequence[str] = (),
        prior: Sequence[str] = (),
        num_tasks: int = 1,
        hidden_sizes: Sequence[int],
        domain_hidden_size: int,
        dtype: DTypeLike | None = None,
        logit_dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        if num_tasks < 1 or not hidden_sizes:
            raise ValueError(
                "PEPNet has a task and a hidden layer or more; got "
                f"num_tasks={num_tasks}, hidden_sizes={tuple(hidden_sizes)}"
            )
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        columns = num_columns(embeddings) + num_dense
        self.embeddings = embeddings
        self.num_dense = num_dense
        self.dtype = dtype
        self.domain = FeatureColumns.of("domain", embeddings, domain)
        self.prior = FeatureColumns.of("prior", embeddings, prior)
        self.domain_gate = GateNU(self.domain.size + columns, domain_hidden_size, columns, **types)
        of_gates = self.prior.size + columns
        gates, layers, heads = [], [], []
        for _ in range(num_tasks):
            sizes = (columns, *hidden_sizes)
            layers.append(
                nnx.List(Perceptron(*pair, **types) for pair in itertools.pairwise(sizes))
            )
            gates.append(nnx.List(GateNU(of_gates, x, x, **types) for x in hidden_sizes))
            of_head = types | ({} if logit_dtype is None else {"dtype": logit_dtype})
            heads.append(nnx.Linear(hidden_sizes[-1], 1, **of_head))
        self.gates, self.layers = nnx.List(gates), nnx.List(layers)
        self.heads = nnx.List(heads)

    def __call__(
        self, dense: Float[AnyArray, "batch num_dense"] | None, features: KeyedJaggedArray
    ) -> Float[Array, "batch tasks"]:
        """Return the logits of a batch, ``[batch, num_tasks]``.

        Args:
            dense: ``[batch, num_dense]`` dense features; None if the model has none.
            features: The batch's ids, of every feature that the tables read.

        Raises:
            ValueError: As for other click models.
        """
        return self.logits(dense, self.lookup(features))

    def logits(
        self,
        dense: Float[AnyArray, "batch num_dense"] | None,
        embedded: Float[Array, "batch columns"],
    ) -> Float[Array, "batch tasks"]:
        inputs = with_dense(embedded, dense, self.num_dense, self.dtype)

        def gate_inputs(columns: Array, stopped: Array) -> Array:
            stopped = jax.lax.stop_gradient(stopped)
            return jnp.concatenate([columns.astype(stopped.dtype), stopped], axis=1)

        # The gates adjust what the embeddings mean; without the stops they would also train it.
        gated = self.domain_gate(gate_inputs(self.domain(embedded), inputs)) * inputs
        of_gates = gate_inputs(self.prior(embedded), gated)
        outputs = []
        for layers, gates, head in zip(self.layers, self.gates, self.heads, strict=True):
            hidden = gated
            for layer, gate in zip(layers, gates, strict=True):
                hidden = gate(of_gates) * layer(hidden)
            outputs.append(head(hidden))
        return jnp.concatenate(outputs, axis=1)
