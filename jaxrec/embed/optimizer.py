"""The optimizer of a model with tables."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax
from flax import nnx

from jaxrec.embed.gradients import Gradients
from jaxrec.embed.tables import put_beside
from jaxrec.embed.taps import tapped_modules


class Optimizer(nnx.Optimizer):
    """optax for the dense parameters, each table's own row optimizer for its rows.

    Use it as `nnx.Optimizer`, with the gradients of `jaxrec.value_and_grad`.

    Args:
        model: The model; its dense parameters' optimizer state is made from it.
        tx: The optax transformation of the dense parameters.
        wrt: Filter of the dense parameters; the same as `jaxrec.value_and_grad`'s.

    Attributes:
        step: Number of updates made, what learning-rate schedules of tables are given.

    Example:
        >>> import jax, jaxrec, optax
        >>> from flax import nnx
        >>> config = jaxrec.EmbeddingBagConfig("user", num_embeddings=3, embedding_dim=1)
        >>> model = jaxrec.EmbeddingBagCollection(
        ...     [config], optimizer=jaxrec.optim.sgd(0.5), rngs=nnx.Rngs(0))
        >>> model.load_table("user", jax.numpy.ones((3, 1)))
        >>> optimizer = Optimizer(model, optax.adam(1e-3))
        >>> batch = jaxrec.KeyedJaggedArray.from_lists({"user": [[1, 1], [2]]})
        >>> loss_fn = lambda model: model(batch).values.sum()
        >>> loss, gradients = jaxrec.value_and_grad(loss_fn)(model)
        >>> optimizer.update(model, gradients)
        >>> model.table("user")[:, 0].tolist()
        [1.0, 0.0, 0.5]
    """

    def __init__(
        self, model: nnx.Module, tx: optax.GradientTransformation, *, wrt: Any = nnx.Param
    ):
        super().__init__(model, tx, wrt=wrt)
        # On a mesh from the start, or the second step, with what the first returns, compiles anew.
        for module in tapped_modules(model).values():
            nnx.update(self, put_beside(module.tables.get_value(), nnx.state(self)))

    def update(  # type: ignore[override]  # takes the gradients of tables along
        self, model: nnx.Module, grads: Gradients, **kwargs: Any
    ) -> None:
        """Advances the dense parameters and the rows that were looked up, by one step.

        Args:
            model: The model.
            grads: Its gradients, from `jaxrec.value_and_grad`.
            **kwargs: Passed on to the optax transformation.

        Raises:
            TypeError: If the gradients are not from `jaxrec.value_and_grad`.
            ValueError: If they are of a model with other collections.
        """
        if not isinstance(grads, Gradients):
            raise TypeError(
                "gradients come from jaxrec.value_and_grad, which carries those of the tables; "
                f"got {type(grads).__name__}"
            )
        found = tapped_modules(model)
        if unknown := set(grads.tables) - set(found):
            raise ValueError(
                f"gradients of collections at {sorted(unknown)}, but the model has collections "
                f"at {sorted(found)}; pass the model that was differentiated"
            )
        step = self.step.get_value().astype(jnp.int32)
        super().update(model, grads.dense, **kwargs)
        for path, gradients in grads.tables.items():
            found[path].apply_gradients(gradients, step)
