"""Saving a model's row stores in its checkpoints, and restoring them.

A checkpoint has a snapshot for each vocabulary with a store: one for all processes, or one for each
if the store is divided. An incremental checkpoint has the changed records alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np

from jaxrec.mesh.agree import in_all_processes
from jaxrec.tier.planning.model_tables import TableVocabulary
from jaxrec.tier.rows.transfer import RowTransfer
from jaxrec.tier.stores import snapshots
from jaxrec.tier.stores.row_store import apply_changes, is_changes, write_changes
from jaxrec.tier.stores.urls import Division


def snapshot_stores(
    vocabularies: Sequence[TableVocabulary],
    directory: pathlib.Path,
    written: Mapping[str, np.ndarray | None],
) -> None:
    """Write a snapshot of each row store into a directory, in all processes.

    ``written`` has, by vocabulary, the ids whose records changed since the previous checkpoint:
    their records are written. All records are written for a vocabulary without an entry or with
    None. Call it within `Tier.settled`.
    """

    def write() -> None:
        for each in vocabularies:
            if each.transfer is None:
                continue
            division = each.transfer.division
            if division is None and jax.process_index() != 0:
                continue  # stores that are not divided are equal in all processes
            directory.mkdir(exist_ok=True)
            path, store = directory / _file_name(each), each.transfer.store
            if division is not None:
                path /= _part_name(division.process, division.num_processes)
            if (ids := written.get(each.name)) is None:
                store.snapshot(path)
            else:
                write_changes(path, store, ids)

    _together(vocabularies, write)


def vocabulary_difference(each: TableVocabulary, saved: Mapping[str, np.ndarray]) -> str:
    """Return how the kind of a saved vocabulary differs from the model's; empty: it does not."""
    wanted, num_ids = each.num_ids or 0, int(saved["num_ids"][0])
    if num_ids == wanted:
        return ""
    saved_as, is_now = (
        f"jaxrec.tier.Cached and num_embeddings={number}" if number else "jaxrec.tier.Dynamic"
        for number in (num_ids, wanted)
    )
    return f"was saved with {saved_as}, but the model's has {is_now}"


def check_stores(
    vocabularies: Sequence[TableVocabulary], directories: Sequence[pathlib.Path]
) -> None:
    """Raise a ValueError if a snapshot is damaged or is of other tables; call it in all processes.

    ``directories`` are those of a full checkpoint and of the incremental ones after it; they need
    not exist. Each process checks the snapshots that it will read.
    """

    def check() -> None:
        for each in vocabularies:
            if each.transfer is not None:
                for part in _read_parts(each, directories):
                    snapshots.check(part.path, each.transfer.store.format)

    _together(vocabularies, check)


def load_stores(
    vocabularies: Sequence[TableVocabulary], directories: Sequence[pathlib.Path]
) -> None:
    """Replace the records of all stores by those of snapshots; call it in all processes.

    Each process takes the records that it owns, whatever number of processes saved them.
    """

    def load() -> None:
        for each in vocabularies:
            if each.transfer is not None:
                _load(each.transfer, _read_parts(each, directories))
                each.transfer.replaced()

    _together(vocabularies, load)


@dataclasses.dataclass(frozen=True)
class _Part:
    """A snapshot that one of ``num_processes`` processes wrote."""

    path: pathlib.Path
    process: int  # 0 if one process had all records
    num_processes: int
    is_changes: bool  # whether it has only the changes since the previous snapshot

    def is_own(self, ids: np.ndarray, num_ids: int | None) -> np.ndarray:
        """Return whether the process that wrote the snapshot owns each id, bool ``[n]``."""
        # A store that was undivided before may still hold records of other processes' ids.
        return Division(self.process, self.num_processes, num_ids).is_own(ids)


def _load(transfer: RowTransfer, parts: Sequence[_Part]) -> None:
    """Replace the records of a store by those in snapshots of ids that this process owns."""
    store, division = transfer.store, transfer.division
    num_processes = 1 if division is None else division.num_processes
    whole = [part for part in parts if not part.is_changes]
    changes = [part for part in parts if part.is_changes]

    def records(part: _Part) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for ids, of_ids in snapshots.read(part.path):
            is_own = part.is_own(ids, store.format.num_ids) & transfer.is_own(ids)
            if is_own.any():
                yield ids[is_own], of_ids[is_own]

    # With as many processes as before the snapshot is the store's: no record needs to be filtered.
    if len(whole) == 1 and whole[0].num_processes == num_processes:
        store.load_snapshot(whole[0].path)
    else:
        store.replace(itertools.chain.from_iterable(map(records, whole)))
    for part in changes:
        apply_changes(part.path, store, None if division is None else division.is_own)


def _read_parts(each: TableVocabulary, directories: Sequence[pathlib.Path]) -> list[_Part]:
    """Return the snapshots that this process reads: whole ones, then those of changes, in order."""
    links = [parts for directory in directories if (parts := _parts(directory, each))]
    # An incremental checkpoint may have a whole snapshot, too: those before it are obsolete.
    while len(links) > 1 and not all(part.is_changes for link in links[1:] for part in link):
        del links[0]
    division = None if each.transfer is None else each.transfer.division
    # After a change of their number, each process reads all parts and filters them.
    return [
        part
        for link in links
        for part in link
        if division is None
        or part.num_processes != division.num_processes
        or part.process == division.process
    ]


def _parts(directory: pathlib.Path, each: TableVocabulary) -> list[_Part]:
    """Return the snapshots of a vocabulary's store in one checkpoint, of all processes."""
    path = directory / _file_name(each)
    names = sorted(part.name for part in path.glob(_part_name("*", "*")))
    if not names:
        return [_Part(path, 0, 1, is_changes(path))] if path.exists() else []
    num_processes = int(names[0].rpartition("-")[2])
    parts = []
    for process in range(num_processes):
        part = path / _part_name(process, num_processes)
        if part.name not in names:
            raise ValueError(
                f"the snapshot is damaged: {part} is missing, which has the records of process "
                f"{process} of {num_processes}"
            )
        parts.append(_Part(part, process, num_processes, is_changes(part)))
    return parts


def _part_name(process: int | str, num_processes: int | str) -> str:
    return f"process-{process}-of-{num_processes}"


def _together(vocabularies: Sequence[TableVocabulary], action: Callable[[], None]) -> None:
    """Carry out an action on row stores; if they are divided, raise its error in all processes."""
    # A process that raised alone would leave the others waiting in their next collective.
    if any(each.transfer and each.transfer.division for each in vocabularies):
        in_all_processes(action)
    else:
        action()


def _file_name(each: TableVocabulary) -> str:
    return urllib.parse.quote(each.name, safe="+")
