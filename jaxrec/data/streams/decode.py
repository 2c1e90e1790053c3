"""Payloads of messages as tables: JSON, Arrow, or whatever a function makes of them."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.json

from jaxrec.data.files import DataError
from jaxrec.data.formats.json_lines import check_digits
from jaxrec.data.streams.numbers import WholeNumbers
from jaxrec.data.structs import with_types

Decode: TypeAlias = Literal["json", "arrow"] | Callable[[list[bytes]], pa.Table]
"""Way to decode payloads: objects of JSON, one a line; Arrow IPC streams or files; or a function
that makes a table with a row of each payload."""

Decoded: TypeAlias = tuple[pa.Table, np.ndarray]
"""A table, and the number of its rows that each payload has, int64 ``[payloads]``."""


class Decoder:
    """Decodes payloads into tables whose columns keep their types.

    ``schema`` gives the columns and types of JSON; None: the first payloads that have a field give
    its type, and integers become floats from the first fraction on.
    """

    def __init__(self, decode: Decode, schema: pa.Schema | None = None) -> None:
        self._known = schema
        self._is_open = schema is None
        ways = {"json": self._json, "arrow": self._arrow}
        if isinstance(decode, str) and decode not in ways:
            raise ValueError(f'decode is "json", "arrow" or a function of payloads, got {decode!r}')
        self._decode = ways[decode] if isinstance(decode, str) else self._call
        self._function = decode

    def __call__(
        self, payloads: Sequence[bytes], on_bad: Callable[[int, Exception], None], first: int = 0
    ) -> Decoded:
        """Decode payloads; ``on_bad`` gets the index and the error of each bad one.

        A bad payload has no rows if ``on_bad`` raises no error. ``first`` is added to the indices.
        """
        if not payloads:
            return self._empty(0)
        try:
            return self._decode(list(payloads))
        except Exception as error:
            if len(payloads) == 1:
                on_bad(first, error)
                return self._empty(1)
        # Halves find the bad ones: the good ones are then decoded about twice.
        middle = len(payloads) // 2
        parts = [
            self(payloads[:middle], on_bad, first),
            self(payloads[middle:], on_bad, first + middle),
        ]
        tables = [table for table, _ in parts]
        return (
            pa.concat_tables(tables, promote_options="permissive"),
            np.concatenate([counts for _, counts in parts]),
        )

    def _empty(self, payloads: int) -> Decoded:
        table = pa.table({}) if self._known is None else self._known.empty_table()
        return table, np.zeros(payloads, np.int64)

    def _json(self, payloads: list[bytes]) -> Decoded:
        try:
            return self._json_of(payloads)
        except pa.ArrowInvalid:
            if self._known is None:
                raise
            whole = WholeNumbers(self._known)
            rewritten = whole(payloads)
            if whole.fractions and self._is_open:
                self._known = pa.schema(with_types(self._known, whole.fractions))
            elif whole.fractions:
                name = next(iter(whole.fractions))
                raise DataError(
                    f"the field {name!r} has a number with a fraction, and is a column of "
                    "integers; give it a type of floats from the start: in the schema of the "
                    f"source, or by --dense {name}"
                ) from None
            elif rewritten == payloads:
                raise
            return self._json_of(rewritten)

    def _json_of(self, payloads: list[bytes]) -> Decoded:
        text = b"\n".join(payloads) + b"\n"
        options = pyarrow.json.ParseOptions(
            explicit_schema=self._known,
            unexpected_field_behavior="infer" if self._is_open else "ignore",
        )
        counts = np.ones(len(payloads), np.int64)
        if text.count(b"\n") > len(payloads) or not all(payloads):
            lines = ([line for line in each.split(b"\n") if line.strip()] for each in payloads)
            counts = np.array([len(each) for each in lines], np.int64)
        if not counts.sum():
            return self._empty(len(payloads))
        read = pyarrow.json.ReadOptions(use_threads=False, block_size=len(text) + 1)
        table = pyarrow.json.read_json(io.BytesIO(text), read, options)
        # Arrow takes an object on two lines, and two objects on one.
        if len(table) != counts.sum():
            raise DataError(
                f"{len(payloads)} payloads of {counts.sum()} lines hold {len(table)} objects; each "
                "line holds one whole object"
            )
        table.validate(full=True)  # text that is no UTF-8
        check_digits(table, text, "the payload", 1)
        if self._is_open:
            self._learn(table.schema)
        return table, counts

    def _learn(self, schema: pa.Schema) -> None:
        """Keep the types of new fields for later payloads."""
        known = [] if self._known is None else list(self._known)
        names = {field.name for field in known}
        # A field that is always null has no type yet.
        new = [x for x in schema if x.name not in names and not pa.types.is_null(x.type)]
        if new:
            self._known = pa.schema([*known, *new])

    def _arrow(self, payloads: list[bytes]) -> Decoded:
        tables = [
            _ipc_table(payload, self._known) if payload else self._empty(1)[0]
            for payload in payloads
        ]
        counts = np.array([len(table) for table in tables], np.int64)
        return pa.concat_tables(tables, promote_options="default"), counts

    def _call(self, payloads: list[bytes]) -> Decoded:
        assert not isinstance(self._function, str)
        table = self._function(payloads)
        if not isinstance(table, pa.Table) or len(table) != len(payloads):
            what = f"{len(table)} rows" if isinstance(table, pa.Table) else type(table).__name__
            raise DataError(
                f"decode returned {what} of {len(payloads)} payloads; it returns a pyarrow.Table "
                "with a row of each"
            )
        return table, np.ones(len(payloads), np.int64)


def _ipc_table(payload: bytes, schema: pa.Schema | None) -> pa.Table:
    """Read the table of an Arrow IPC stream or file, with a schema's columns or all."""
    buffer = pa.py_buffer(payload)
    is_file = payload.startswith(b"ARROW1")
    with pa.ipc.open_file(buffer) if is_file else pa.ipc.open_stream(buffer) as reader:
        table = reader.read_all()
    table.validate(full=True)  # a damaged offset would make Arrow read other memory
    return table if schema is None else table.select(schema.names).cast(schema)
