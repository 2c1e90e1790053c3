"""Arrow tables and Parquet files of a generated log of listens, in the columns of Yambda."""

from __future__ import annotations

import os
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jaxrec.data.generated_events import GeneratedEvents, Listens, Requests
from jaxrec.files.atomic import write_atomically

# Types of Yambda's columns, in its order (huggingface.co/datasets/yandex/yambda).
_TYPES = {
    "uid": pa.uint32(),
    "timestamp": pa.uint32(),
    "item_id": pa.uint32(),
    "is_organic": pa.uint8(),
    "played_ratio_pct": pa.uint16(),
    "track_length_seconds": pa.uint32(),
}
_EVENT_TYPES = pa.array(["listen", "like"])

Form = Literal["flat", "rows"]


def flat_events(requests: Requests) -> pa.Table:
    """Return the events of all users as Yambda's ``flat/*/multi_event.parquet`` has them.

    An event is a row: ``uid``, ``timestamp``, ``item_id``, ``is_organic``, ``event_type``,
    ``played_ratio_pct`` and ``track_length_seconds``, sorted by user and time. Events of the
    history are organic, candidates are not. A "like" is an event of its own, beside its "listen",
    and the last two columns are null there.

    Example:
        >>> from jaxrec.data import GeneratedEvents
        >>> table = flat_events(GeneratedEvents(10).requests(0, 10))
        >>> table.column_names[:4], table["event_type"].unique().to_pylist()
        (['uid', 'timestamp', 'item_id', 'is_organic'], ['listen', 'like'])
    """
    each = np.full(len(requests), requests.num_candidates)
    sides = [(requests.history, requests.lengths, 1), (requests.candidates, each, 0)]
    parts = []
    for listens, lengths, is_organic in sides:
        columns = {"uid": np.repeat(requests.users, lengths)} | _columns(listens, is_organic)
        liked = np.flatnonzero(listens.liked)
        parts.append(columns | {"event": np.zeros(len(listens.items), np.int8)})
        parts.append({name: column[liked] for name, column in columns.items()})
        parts[-1]["event"] = np.ones(len(liked), np.int8)
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    event = columns.pop("event")
    order = np.lexsort((event, columns["timestamp"], columns["uid"]))
    is_like = event[order] == 1
    arrays = {
        # Only a listen has a share and a length.
        name: pa.array(column[order], _TYPES[name], mask=is_like if place > 3 else None)
        for place, (name, column) in enumerate(columns.items())
    }
    names = list(arrays)
    event_types = pa.DictionaryArray.from_arrays(event[order], _EVENT_TYPES)
    return pa.table(arrays).add_column(names.index("played_ratio_pct"), "event_type", event_types)


def request_rows(requests: Requests) -> pa.Table:
    """Return a row for each request: lists of the history, and lists of the candidates.

    The history's lists have Yambda's names, as in its ``sequential`` files, oldest first, and
    ``action`` with the bits 1, played, and 2, liked. Those of the candidates have the same names
    behind ``candidate_``.

    Example:
        >>> from jaxrec.data import GeneratedEvents
        >>> table = request_rows(GeneratedEvents(10, num_candidates=2).requests(0, 10))
        >>> table.num_rows, len(table["candidate_action"][0])
        (10, 2)
    """
    each = np.full(len(requests), requests.num_candidates)
    sides = {
        "": (requests.history, requests.lengths, 1),
        "candidate_": (requests.candidates, each, 0),
    }
    columns = {"uid": pa.array(requests.users, _TYPES["uid"])}
    for prefix, (listens, lengths, is_organic) in sides.items():
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        values = _columns(listens, is_organic) | {"action": listens.actions}
        for name, column in values.items():
            array = pa.array(column, _TYPES.get(name, pa.uint8()))
            columns[prefix + name] = pa.ListArray.from_arrays(pa.array(offsets), array)
    return pa.table(columns)


def write_events(
    log: GeneratedEvents,
    path: str | os.PathLike[str],
    *,
    form: Form = "flat",
    start: int = 0,
    stop: int | None = None,
) -> None:
    """Write the users of a log to a Parquet file, chunk by chunk.

    Args:
        log: The log.
        path: The file, which is replaced.
        form: "flat": a row for each event, see `flat_events`. "rows": a row for each request, see
            `request_rows`.
        start: First user.
        stop: User after the last one; None: all.

    Raises:
        OSError: The file cannot be written.
        ValueError: ``form`` is neither, or the log does not have these users.

    Example:
        >>> import pathlib, tempfile
        >>> from jaxrec.data import GeneratedEvents
        >>> path = pathlib.Path(tempfile.mkdtemp(), "listens.parquet")
        >>> write_events(GeneratedEvents(50), path, form="rows")
        >>> pq.read_table(path).num_rows
        50
    """
    tables = {"flat": flat_events, "rows": request_rows}
    stop = log.num_users if stop is None else stop
    if form not in tables:
        raise ValueError(f"form is 'flat' or 'rows', got {form!r}")
    parts = map(tables[form], log.chunks(start, stop))
    first = next(parts)
    with (
        write_atomically(path) as unfinished,
        pq.ParquetWriter(unfinished, first.schema, write_page_checksum=True) as writer,
    ):
        writer.write_table(first)
        for part in parts:
            writer.write_table(part)


def _columns(listens: Listens, is_organic: int) -> dict[str, np.ndarray]:
    """Return Yambda's columns of listens but the user."""
    return {
        "timestamp": listens.times,
        "item_id": listens.items,
        "is_organic": np.full(len(listens.items), is_organic, np.uint8),
        "played_ratio_pct": listens.played_percent,
        "track_length_seconds": listens.track_seconds,
    }
