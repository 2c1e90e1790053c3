"""Row stores of a model in its checkpoints."""

from __future__ import annotations

import pathlib
import urllib.parse
import warnings
from collections.abc import Mapping, Sequence

import numpy as np

from jaxrec.tier.model_tables import TableVocabulary
from jaxrec.tier.stores import snapshots


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


def snapshot_stores(vocabularies: Sequence[TableVocabulary], directory: pathlib.Path) -> None:
    """Write the records of durable stores; call it within `jaxrec.tier.tier.Tier.settled`.

    Args:
        vocabularies: The vocabularies of a model.
        directory: Directory of the snapshots, made if there is a durable store.

    Raises:
        OSError: It cannot be written.
    """
    for each in vocabularies:
        if each.transfer is not None and each.transfer.store.is_durable:
            directory.mkdir(exist_ok=True)
            each.transfer.store.snapshot(directory / _file_name(each))


def check_stores(
    vocabularies: Sequence[TableVocabulary],
    state: Mapping[str, Mapping[str, np.ndarray]],
    directory: pathlib.Path,
) -> None:
    """Check that a model can take over the state of vocabularies and the records of stores.

    Args:
        vocabularies: The vocabularies of the model.
        state: Result of `jaxrec.tier.tier.Tier.state`.
        directory: Directory of the snapshots; it need not exist.

    Raises:
        ValueError: A snapshot is damaged; the records of evicted rows are those of other tables; or
            a table with a cache had another number of rows.
    """
    for each in vocabularies:
        _check_num_ids(each, int(state[each.name]["num_ids"][0]))
        if each.transfer is None:
            continue
        records = state[each.name].get("stored_records")
        if records is not None and records.shape[1] != each.transfer.layout.width:
            raise ValueError(
                f"evicted rows of table {each.name} were saved with {records.shape[1]} bytes "
                "each, with their optimizer state, but the model's have "
                f"{each.transfer.layout.width}"
            )
        if (path := directory / _file_name(each)).exists():
            snapshots.check(path, each.transfer.store.format)


def load_stores(
    vocabularies: Sequence[TableVocabulary],
    state: Mapping[str, Mapping[str, np.ndarray]],
    directory: pathlib.Path,
) -> None:
    """Replace the records of all stores by those of a state or of snapshots.

    Args:
        vocabularies: The vocabularies of the model.
        state: Result of `jaxrec.tier.tier.Tier.state`, which has the records of stores in memory.
        directory: Directory of the snapshots; it need not exist.

    Raises:
        ValueError: A snapshot is damaged.
        OSError: A record cannot be read or written.
    """
    for each in vocabularies:
        if each.transfer is None:
            continue
        if (path := directory / _file_name(each)).exists():
            each.transfer.load_snapshot(path)
        else:
            each.transfer.load_state(state[each.name])


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
