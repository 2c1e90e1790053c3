"""Publishing a model as versions in a folder, from which copies of it are updated."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import time
from typing import Any

import msgspec
from flax import nnx

from jaxrec.mesh.agree import on_process_zero
from jaxrec.tier.changes.change_tracker import ChangeTracker, HandOver
from jaxrec.tier.deltas.folder import VersionError, VersionFolder, VersionName
from jaxrec.tier.deltas.manifest import REMOVED, ROWS, Files, Manifest, TableFacts, num_bytes
from jaxrec.tier.deltas.tables import PublishedTable, published_tables
from jaxrec.tier.deltas.version_writer import VersionWriter
from jaxrec.tier.planning.tier import tier_of


@dataclasses.dataclass(frozen=True)
class PublishedVersion:
    """A version that was published.

    Attributes:
        version: Its number, from 1.
        is_full: Whether it has all rows, so that a new copy can begin with it.
        is_delta: Whether it has the changes since the version before.
        rows: Number of rows that changed, over all tables; 0 without a delta.
        removed: Number of ids that lost their rows, over all tables; 0 without a delta.
        bytes: Bytes of all its files.
    """

    version: int
    is_full: bool
    is_delta: bool
    rows: int
    removed: int
    bytes: int


def publish(
    model: nnx.Module,
    url: str | os.PathLike[str],
    *,
    tracker: ChangeTracker | None = None,
    consumer: str = "publisher",
    with_state: bool = False,
    step: int | None = None,
    full_every: int | None = None,
    keep: int = 2,
) -> PublishedVersion:
    """Publish a model as the next version of a folder, for copies that serve.

    The first version is full: it has all rows. Each later version has the changes that the tracker
    recorded since the one before: rows by id, ids that lost their rows (tombstones), and rows that
    ids without a row of their own read. Every version has all variables outside the tables. A
    `Subscriber` brings a copy to a version, and the copy is then equal to the model bit for bit.

    A version appears when it is complete. If publishing fails or the process is killed, the folder
    keeps the earlier versions, and the next version has all changes since these. A version is also
    full if it is the first of a run, if there is no tracker, or after another publisher's version
    or a change of the tables' shapes.

    Call it in the training thread, between two steps. It reads rows in parts, so that memory does
    not grow with the tables. Every process calls it, and process 0 writes. A folder has one
    publisher at a time.

    Args:
        model: The model: plain, over a mesh, with open vocabularies or caches.
        url: The folder: a path, ``file:///data/versions``, or in an object store that PyArrow
            reaches (`pyarrow.fs.FileSystem.from_uri`), such as ``s3://bucket/versions`` and
            ``gs://bucket/versions``.
        tracker: Tracks the changes of the model; None: every version is full.
        consumer: Name of the tracker's consumer that publishes to this folder.
        with_state: Whether the optimizer state of rows is published too, for copies that train.
        step: Number of training steps, for readers.
        full_every: Number of versions from one full version to the next. None: the next is full
            when the deltas since the last full version have as many bytes as that version. A new
            copy then reads at most about twice the tables, and publishing writes at most twice the
            deltas.
        keep: Number of full versions to keep, with all versions after the oldest of them. Older
            versions are removed.

    Returns:
        The published version.

    Raises:
        TypeError: An argument has another type.
        ValueError: The folder's URL is malformed, a number is below 1, or the tracker is another
            model's.
        KeyError: The tracker has no such consumer.
        BlockingIOError: Another process publishes to the folder.
        OSError: The folder cannot be read or written; the next version has the changes.

    Example:
        >>> import jaxrec, tempfile
        >>> import numpy as np
        >>> config = jaxrec.EmbeddingBagConfig("item", num_embeddings=100, embedding_dim=2)
        >>> def make_model():
        ...     return jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
        >>> model, copy, folder = make_model(), make_model(), tempfile.mkdtemp()
        >>> tracker = jaxrec.tier.ChangeTracker(model, consumers=["publisher"])
        >>> publish(model, folder, tracker=tracker).is_full
        True
        >>> model.load_rows("item", [7, 3], np.array([[1.0, 2.0], [3.0, 4.0]]))
        >>> tracker.mark("item", [7, 3])  # training steps are recorded by tracker.watch
        >>> publish(model, folder, tracker=tracker).rows
        2
        >>> subscriber = jaxrec.tier.Subscriber(copy, folder)
        >>> subscriber.update()
        2
        >>> copy.rows("item", [3])
        array([[3., 4.]], dtype=float32)
    """
    _check_arguments(tracker, full_every, keep)
    folder, tables, tier = VersionFolder(url), published_tables(model), tier_of(model)
    facts = {name: _facts(table, with_state) for name, table in tables.items()}
    with contextlib.ExitStack() as stack:
        # Lock, settle, then take the changes: errors up to here must leave the changes unread, and
        # rows must not move while they are read.
        on_process_zero(lambda: stack.enter_context(folder.locked()))
        if tier is not None:
            stack.enter_context(tier.settled(model))
        changes: HandOver | None = None
        if tracker is not None:
            tracker.check_model(model)
            changes = stack.enter_context(tracker.hand_over(consumer))
        position = None if changes is None else changes.position
        plan = _Plan(**on_process_zero(lambda: _plan(folder, position, facts, full_every)))
        writer = VersionWriter(folder, plan.name, with_state)
        dense = writer.write_dense(model)
        delta: Files | None = None
        full: Files | None = None
        if changes is not None and plan.base is not None:
            delta = {
                name: writer.write_delta(table, changes.ids[table.path, table.config.name])
                for name, table in tables.items()
            }
        if plan.is_full:
            full = {name: writer.write_full(table) for name, table in tables.items()}

        def commit() -> dict[str, Any]:
            writer.finish()
            full_versions = plan.full_versions + ([plan.version] if plan.is_full else [])
            manifest = Manifest(
                plan.version,
                plan.token,
                step,
                time.time(),
                facts,
                dense,
                delta,
                plan.base,
                full,
                full_versions[-keep:],
                delta_bytes=0 if full is not None else plan.delta_bytes + num_bytes(delta or {}),
                full_bytes=plan.full_bytes if full is None else num_bytes(full),
                deltas=0 if full is not None else plan.deltas + 1,
            )
            folder.commit(plan.name, manifest)
            if plan.is_full:
                # The new version is complete: old versions that cannot be removed now are removed
                # with later ones.
                with contextlib.suppress(OSError):
                    folder.remove_before(manifest.full_versions[0])
            return dataclasses.asdict(_summary(manifest))

        version = PublishedVersion(**on_process_zero(commit))
        if changes is not None:
            # Only after the commit. If the block raises before, the hand-over gives the changes
            # back.
            changes.position = plan.token
    return version


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Plan of the next version: its name, what it has, and totals of the manifest before it.

    ``base`` is the token of the version that its delta follows; None: it has no delta.
    """

    version: int
    token: str
    base: str | None
    is_full: bool
    full_versions: list[int]
    delta_bytes: int
    full_bytes: int
    deltas: int

    @property
    def name(self) -> VersionName:
        return VersionName(self.version, self.token)


def _plan(
    folder: VersionFolder,
    position: str | None,
    facts: dict[str, TableFacts],
    full_every: int | None,
) -> dict[str, Any]:
    """Plan the next version and make its folder; return the fields of a `_Plan`.

    ``position`` is the token of the version at which the tracker's last changes ended.
    """
    names = folder.names()
    newest: Manifest | None = None
    if names:
        # After a damaged manifest the next version is full.
        with contextlib.suppress(VersionError):
            newest = folder.read_manifest(names[-1])
    version, token = (names[-1].version if names else 0) + 1, secrets.token_hex(8)
    plan = _Plan(version, token, None, True, [], 0, 0, 0)
    if newest is not None:
        # Another publisher, or an earlier run, wrote the newest version if its token is not the one
        # at which this run's last changes ended.
        follows = position == newest.token and newest.tables == facts
        is_due = (
            newest.delta_bytes >= newest.full_bytes
            if full_every is None
            else newest.deltas + 1 >= full_every
        )
        plan = dataclasses.replace(
            plan,
            base=newest.token if follows else None,
            is_full=is_due or not follows,
            full_versions=newest.full_versions,
            delta_bytes=newest.delta_bytes,
            full_bytes=newest.full_bytes,
            deltas=newest.deltas,
        )
    folder.begin(plan.name)
    return dataclasses.asdict(plan)


def _facts(table: PublishedTable, with_state: bool) -> TableFacts:
    return table.facts if with_state else msgspec.structs.replace(table.facts, state=None)


def _summary(manifest: Manifest) -> PublishedVersion:
    delta, full = manifest.delta or {}, manifest.full or {}

    def count(kind: str) -> int:
        return sum(files[kind].rows for files in delta.values() if kind in files)

    return PublishedVersion(
        manifest.version,
        manifest.full is not None,
        manifest.delta is not None,
        count(ROWS),
        count(REMOVED),
        manifest.dense.bytes + num_bytes(delta) + num_bytes(full),
    )


def _check_arguments(tracker: object, full_every: int | None, keep: int) -> None:
    if not isinstance(tracker, ChangeTracker | None):
        raise TypeError(f"publish: tracker is a jaxrec.tier.ChangeTracker, got {tracker!r}")
    every = {} if full_every is None else {"full_every": full_every}
    for name, number in {**every, "keep": keep}.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"publish: {name} is an integer of 1 or more, got {number!r}")
