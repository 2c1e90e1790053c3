"""Programs of one's own, exported by `jax.export` with the calls of jaxrec's native library."""

from __future__ import annotations

from jax import export as jax_export

from jaxrec.embed.kernels import cpu


def native_calls() -> list[jax_export.DisabledSafetyCheck]:
    """Return the ``disabled_checks`` with which `jax.export` takes jaxrec's native functions.

    On a CPU lookups, updates and dot products call jaxrec's library, and JAX exports calls only
    that it knows. A program with such calls runs where jaxrec was imported, and its first lookup of
    any kind, or ``native_calls()``, has loaded the library. Later versions of jaxrec serve the
    lookups; the other calls are those of this version. Within
    ``jaxrec.embed.kernels.use_kernels("reference")`` programs are exported without native calls.

    `jaxrec.serve.export` needs none of this.

    Returns:
        One check for each function of the library.

    Example:
        >>> import jax, jaxrec, numpy as np
        >>> from flax import nnx
        >>> config = jaxrec.EmbeddingBagConfig("user", num_embeddings=10, embedding_dim=4)
        >>> model = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
        >>> batch = jaxrec.KeyedJaggedArray.from_lists({"user": [[3, 5], [7]]})
        >>> exported = jax.export.export(
        ...     jax.jit(lambda batch: model(batch).values), disabled_checks=native_calls())(batch)
        >>> exported.call(batch).shape
        (2, 4)
    """
    cpu.missing()  # loads the library, where there is one
    return [jax_export.DisabledSafetyCheck.custom_call(name) for name in cpu.library_targets()]
