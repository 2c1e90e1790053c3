"""Row stores of a model in its checkpoints."""

from __future__ import annotations

import pathlib
import urllib.parse
import warnings
from collections.abc import Mapping, Sequence

import numpy as np

from jaxrec.tier.model_tables import TableVocabulary
from jaxrec.tier.stores import snapshots
from jaxrec.tier.stores.changes_snapshot import apply_changes, is_changes, write_changes


def warn_of_earlier_rows(vocabularies: Sequence[TableVocabulary]) -> None:
    """Warn of stores that had rows when they were opened, and were not restored since; once."""
    for each in vocabularies:
        if each.transfer is not None and each.transfer.num_earlier:
            warnings.warn(
                f"table {each.name} begins with {each.transfer.num_earlier:,} rows of an earlier "
                f"run, which {each.transfer.store!r} has; restore the checkpoint of that run, or "
                "train with an empty store",
                stacklevel=4,
            )
            each.transfer.num_earlier = 0


def snapshot_stores(
    vocabularies: Sequence[TableVocabulary],
    directory: pathlib.Path,
    written: Mapping[str, np.ndarray | None],
) -> None:
    """Write the records of the row stores; call it within `jaxrec.tier.tier.Tier.settled`.

    Args:
        vocabularies: The vocabularies of a model.
        directory: Directory of the snapshots, made if there is a store.
        written: Ids whose records changed since the checkpoint before, by vocabulary: only these
            are written. All records are written for a vocabulary without an entry or with None.

    Raises:
        OSError: A snapshot cannot be written.
    """
    for each in vocabularies:
        if each.transfer is None:
            continue
        directory.mkdir(exist_ok=True)
        path, store = directory / _file_name(each), each.transfer.store
        if (ids := written.get(each.name)) is None:
            store.snapshot(path)
        else:
            write_changes(path, store, ids)


def check_stores(
    vocabularies: Sequence[TableVocabulary],
    state: Mapping[str, Mapping[str, np.ndarray]],
    directories: Sequence[pathlib.Path],
) -> None:
    """Check that a model can take over the state of vocabularies and the records of stores.

    Args:
        vocabularies: The vocabularies of the model.
        state: Result of `jaxrec.tier.tier.Tier.state`.
        directories: Directories of the snapshots of a full checkpoint and of the incremental ones
            after it; they need not exist.

    Raises:
        ValueError: A snapshot is damaged; the records of evicted rows are those of other tables; or
            a table with a cache had another number of rows.
    """
    for each in vocabularies:
        _check_num_ids(each, int(state[each.name]["num_ids"][0]))
        if each.transfer is not None:
            for path in _snapshots(each, directories):
                snapshots.check(path, each.transfer.store.format)


def load_stores(
    vocabularies: Sequence[TableVocabulary], directories: Sequence[pathlib.Path]
) -> None:
    """Replace the records of all stores by those of snapshots.

    Args:
        vocabularies: The vocabularies of the model.
        directories: As for `check_stores`.

    Raises:
        ValueError: A snapshot is damaged.
        OSError: A record cannot be read or written.
    """
    for each in vocabularies:
        if each.transfer is None:
            continue
        store, paths = each.transfer.store, _snapshots(each, directories)
        if paths:
            store.load_snapshot(paths[0])
        else:
            store.replace([])
        for path in paths[1:]:
            apply_changes(path, store)
        each.transfer.replaced()


def _snapshots(each: TableVocabulary, directories: Sequence[pathlib.Path]) -> list[pathlib.Path]:
    """Return the last whole snapshot of a store, and those of changes after it."""
    paths = [path for each_one in directories if (path := each_one / _file_name(each)).exists()]
    while len(paths) > 1 and not all(map(is_changes, paths[1:])):
        del paths[0]
    return paths


def _check_num_ids(each: TableVocabulary, saved: int) -> None:
    wanted = each.num_ids or 0
    if saved != wanted:
        saved_as, is_now = (
            f"jaxrec.tier.Cached and num_embeddings={num_ids}" if num_ids else "jaxrec.tier.Dynamic"
            for num_ids in (saved, wanted)
        )
        raise ValueError(
            f"table {each.name} was saved with {saved_as}, but the model's has {is_now}"
        )


def _file_name(each: TableVocabulary) -> str:
    return urllib.parse.quote(each.name, safe="+")
