"""The options of a run that trains on rows as they come, and its source."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from typing import Annotated, Literal

import pyarrow as pa
import tyro

from jaxrec.arguments import ConfigError
from jaxrec.data import FolderSource, KafkaSource, Schema
from jaxrec.data.column_types import is_list, is_time, value_type
from jaxrec.data.schema import time_of
from jaxrec.data.streams.kafka import parse_address
from jaxrec.data.streams.source import Source
from jaxrec.data.structs import flat_schema, with_types


@dataclasses.dataclass(frozen=True)
class StreamConfig:
    """Training on rows as they come. All options but --follow need --follow."""

    follow: Annotated[bool, tyro.conf.arg(aliases=["--follow"])] = False
    """Train on the rows of --data as they come, until Ctrl-C: a topic, kafka://HOST:PORT/TOPIC, or
    a folder to which files are added, see docs/clusters_and_streams.md."""
    until: Annotated[Literal["stopped", "caught_up"], tyro.conf.arg(aliases=["--until"])] = (
        "stopped"
    )
    """caught_up: end after the rows that are there when training begins or goes on."""
    sample_rows: int = 10_000
    """Number of first rows from which a new run learns the columns."""
    max_wait: float = 10.0
    """Seconds after which a step takes the rows that have come, though they fill no batch."""
    start: Literal["earliest", "latest"] = "earliest"
    """Messages of a topic at which a new run begins: the first that there are, or those to come."""
    group: str | None = None
    """Consumer group to which trained offsets of a topic are committed, only for monitoring."""
    deleted: Literal["fail", "skip"] = "fail"
    """At messages or files that were deleted before they were read stop, or leave them out."""

    def __post_init__(self) -> None:
        if not self.follow:
            for field in dataclasses.fields(self):
                if getattr(self, field.name) != field.default:
                    raise ConfigError(
                        f"stream.{field.name.replace('_', '-')} is for --follow; give this too, or "
                        "leave it out"
                    )
        if self.sample_rows < 1 or not self.max_wait > 0:
            raise ConfigError(
                "stream.sample-rows must be 1 or more and stream.max-wait above 0, got "
                f"{self.sample_rows} and {self.max_wait}"
            )


def topic_address(path: pathlib.Path | None) -> str | None:
    """Return the address of topics as it was given; None if the path is another."""
    text = str(path)
    # A path has lost a slash of its address.
    return None if not text.startswith("kafka:") else f"kafka://{text[6:].lstrip('/')}"


def open_source(
    path: pathlib.Path,
    options: StreamConfig,
    bad_rows: Literal["fail", "skip"],
    schema: pa.Schema | None = None,
) -> Source:
    """Return the source of a run; raise a ConfigError if ``path`` names none.

    ``schema`` has the columns and types of the rows; None: of a new run they are not known yet.
    """
    if (address := topic_address(path)) is None:
        if re.match(r"[\w+.-]+:/", str(path)):
            raise ConfigError(
                f"--follow reads topics and folders of this machine, and {path} is elsewhere"
            )
        if path.is_file():
            raise ConfigError(f"--follow reads topics and folders, and {path} is a file")
        return FolderSource(directory=path, schema=schema, deleted=options.deleted)
    try:
        brokers, topics = parse_address(address)
    except ValueError as error:
        raise ConfigError(f"--data: {error}") from None
    return KafkaSource(
        brokers=brokers,
        topics=tuple(topics),
        schema=schema,
        start=options.start,
        group=options.group,
        bad_messages=bad_rows,
        deleted=options.deleted,
    )


def followed_columns(columns: pa.Schema, schema: Schema) -> pa.Schema:
    """Return the columns that a run reads of the rows to come, by the ``columns`` of its sample.

    Their types are those that text and JSON are read as. A sample of whole numbers may be followed
    by fractions, and one of times by times with parts of a second: numbers become floats and times
    text, unless they are categories. The fields that the model does not read may come later, or
    change their types.
    """
    numbers = {name for name, column in schema.dense.items() if column.part is None}
    numbers |= {*schema.labels, *([] if schema.weight is None else [schema.weight])}
    times = {time_of(name, part) for name, part, _ in schema.parts}
    times |= {column.since for column in schema.dense.values() if column.since is not None}
    types: dict[str, pa.DataType] = {}
    for field in flat_schema(columns):
        kind = value_type(field.type)
        if field.name in numbers and pa.types.is_integer(kind):
            types[field.name] = pa.list_(pa.float64()) if is_list(field.type) else pa.float64()
        elif field.name in times and is_time(kind):
            types[field.name] = pa.string()
    read = {
        ".".join(parts[: end + 1])
        for parts in (name.split(".") for name in schema.inputs)
        for end in range(len(parts))
    }
    return pa.schema([x for x in with_types(columns, types) if x.name in read])
