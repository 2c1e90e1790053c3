"""The end of a model's row stores."""

from __future__ import annotations

from flax import nnx

from jaxrec.tier.planning.tier import tier_of


def close(model: nnx.Module) -> None:
    """Close the row stores of a model, so that another model or process may open them.

    Rows that are on their way to the stores arrive first. The model is not trained or evaluated
    afterwards. The end of the process closes the stores, too.

    Args:
        model: A model of `jaxrec.tier.make`; one without row stores stays as it is.

    Raises:
        RuntimeError: Rows could not be written.

    Example:
        >>> import jaxrec, tempfile
        >>> config = jaxrec.EmbeddingBagConfig("user", num_embeddings=1000, embedding_dim=4)
        >>> store = f"file://{tempfile.mkdtemp()}/users"
        >>> def make():
        ...     embeddings = lambda: jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
        ...     return jaxrec.tier.make(embeddings, {"user": jaxrec.tier.Cached(100, store)})
        >>> first = make()
        >>> jaxrec.tier.close(first)
        >>> second = make()
    """
    if (tier := tier_of(model)) is not None:
        tier.close(model)
