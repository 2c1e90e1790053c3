"""Batches whose ids have their rows, planned a few batches ahead of the training loop."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxrec.data.pipeline import Pipeline
from jaxrec.mesh.agree import fail_together, gather_id_lists
from jaxrec.mesh.batch import shard_batch
from jaxrec.tier.planning.batch_ids import BatchIds
from jaxrec.tier.planning.batch_order import PlannedBatch, foresee
from jaxrec.tier.planning.model_tables import collections_of
from jaxrec.tier.planning.tier import tier_of


def ahead(
    model: nnx.Module,
    batches: Iterable[Any],
    look_ahead: int = 4,
    *,
    is_training: bool = True,
    accumulate: int = 1,
    place: Callable[[Any], Any] | None = None,
) -> Generator[Any, None, None]:
    """Iterate over batches with row indices in place of ids, for the training loop.

    A thread reads batches and assigns rows to their ids, in the order of the batches. Before it
    yields a batch, `ahead` changes the model's tables in place: rows of new ids get their first
    values, and with a row store evicted rows go to the store and others return. So take a batch,
    train with it, then take the next, in the thread that calls `ahead`.

    A loop may end early, or the process may be killed and restarted from a checkpoint. A later
    `ahead` that begins with the same batches then continues as if there had been no break.

    Args:
        model: A model of `jaxrec.tier.make`.
        batches: Host batches, any pytrees with `KeyedJaggedArray`s. Features with an open
            vocabulary hold raw ids (``id_bits=64``) or 32-bit ids. Batches that were not made by a
            `jaxrec.Packer` get capacities that are remembered for the model, so that few steps
            compile.
        look_ahead: Number of batches that wait, ready, for the training loop. A batch does not
            evict the rows of the ``look_ahead + 2 * accumulate`` batches before it. If a table is
            too small for that, fewer batches wait. With the policy `farthest` more batches are
            read, and wait without rows.
        is_training: Whether new ids get rows. False, for evaluation: ids whose rows are in a store
            read these rows, and other ids without a row read the rows of `Dynamic.unknown`. No row
            changes its values.
        accumulate: Number of batches whose gradients one update sums.
        place: Function that puts a batch with rows on the devices; None: `jaxrec.mesh.shard_batch`
            if the tables are on a mesh, otherwise the batch stays on the host.

    Yields:
        The batches with row indices in place of ids.

    Raises:
        TypeError: The model has no table of `jaxrec.tier.make`, or a batch has no ids on the host.
        ValueError: ``look_ahead`` or ``accumulate`` is below 1; a batch and the
            ``2 * accumulate`` batches before it have more distinct ids than a table has rows; an id
            is outside a table of fixed size.
        RuntimeError: Another thread takes a batch; another loop over `ahead` trains the model; a
            row store failed; another process has an error in its part of a batch.

    Example:
        >>> import jaxrec
        >>> from flax import nnx
        >>> config = jaxrec.EmbeddingBagConfig("item", num_embeddings=100, embedding_dim=4)
        >>> model = jaxrec.tier.make(
        ...     lambda: jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0)),
        ...     {"item": jaxrec.tier.Dynamic()})
        >>> batch = jaxrec.KeyedJaggedArray.from_lists({"item": [[2**60, 7], []]}, id_bits=64)
        >>> [model(features).values.shape for features in ahead(model, [batch])]
        [(2, 4)]
    """
    tier = tier_of(model)
    if tier is None:
        raise TypeError(
            "the model has no table with an open vocabulary or a cache; make it with "
            "jaxrec.tier.make(model, {table: jaxrec.tier.Dynamic()})"
        )
    for name, number in {"look_ahead": look_ahead, "accumulate": accumulate}.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"{name} is an integer of 1 or more, got {number!r}")
    if place is None:
        mesh = _mesh(model)
        place = (lambda batch: batch) if mesh is None else functools.partial(shard_batch, mesh=mesh)
    is_shared = jax.process_count() > 1 and _mesh(model) is not None
    gather = gather_id_lists if is_shared else None
    # A step may be dispatched after the batches of the next one were taken.
    undispatched = 2 * accumulate
    read_ids = functools.partial(BatchIds.of, vocabularies=tier.vocabularies, gather=gather)

    def put(batch: Any, place: Callable[[Any], Any] = place) -> Any:
        return place(tier.packer.fit(batch))

    def with_ids(batches: Iterable[Any]) -> Iterable[Any]:
        return foresee(batches, read_ids, tier.foresight) if is_training else batches

    def read(pipeline: Pipeline) -> Iterator[Any]:
        """Yield the batches of ``pipeline``; if one process cannot read its part, all stop."""
        while True:
            try:
                batch = next(pipeline)
            except StopIteration:
                return
            except Exception as error:
                if is_training or tier.has_stores:  # the other processes wait for ids in `gather`
                    fail_together(error, len(tier.vocabularies))
                raise
            yield batch

    def prepare(batch: Any) -> tuple[PlannedBatch, Any]:
        if is_training:
            planned = tier.plan(batch, look_ahead + undispatched)
        else:
            planned = tier.lookup(batch, gather if tier.has_stores else None)
        return planned, put(planned.batch)

    # Several processes gather ids and run steps: both are collectives, which all processes must
    # begin in the same order. So batches are then planned in the thread that trains.
    stages = () if is_shared else (prepare,)

    def take(pipeline: Pipeline) -> Iterator[Any]:
        for planned, placed in map(prepare, with_ids(read(pipeline))) if is_shared else pipeline:
            _check_thread(thread)
            batch = tier.apply(model, planned)
            # `apply` gives another batch if an evaluation's was planned anew.
            yield placed if batch is planned.batch else put(batch)

    def iterate() -> Generator[Any, None, None]:
        _check_thread(thread)
        on_close = None
        if is_training:
            on_close = functools.partial(tier.end, tier.begin(undispatched))
        source = batches if is_shared else with_ids(batches)
        pipeline = Pipeline(source, *stages, ahead=look_ahead, on_close=on_close)
        try:
            yield from take(pipeline)
        finally:
            # A global iterator is closed while Python exits, when modules may be gone already;
            # hence also the local name of `sys.is_finalizing`.
            if not is_finalizing():
                pipeline.close()
                if is_training:
                    tier.settle(model)

    is_finalizing = sys.is_finalizing
    thread = threading.get_ident()
    return iterate()


def _check_thread(thread: int) -> None:
    if threading.get_ident() != thread:
        raise RuntimeError(
            "jaxrec.tier.ahead changes the model's tables between two steps, so that only the "
            "thread that called it may take batches; let other threads make the batches that are "
            "given to it"
        )


def _mesh(model: nnx.Module) -> Mesh | None:
    """Return the mesh of the tables, or None."""
    for collection in collections_of(model).values():
        if (mesh := collection.tables.get_value().devices.mesh) is not None:
            return mesh
    return None
