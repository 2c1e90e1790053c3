"""Conversion of Criteo's click logs from text to Parquet, in one pass on all cores."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import glob
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jaxrec.data.contiguous import MAPS_DIRECTORY, Appearances, ContiguousMap
from jaxrec.data.criteo.parts import (
    Conversion,
    Part,
    PartWriter,
    as_json,
    parquet_writer,
    read_part,
    same_conversion,
)
from jaxrec.data.criteo.text import BadLine, Block, RawClicks, blocks_of_lines, parse_lines
from jaxrec.data.files import DataError, natural_order
from jaxrec.data.pipeline import ordered_map
from jaxrec.data.transforms import CATEGORICAL_NAMES
from jaxrec.files.atomic import write_atomically

# Bytes of text that a thread parses at once: its columns fit the processor's caches. Number of such
# blocks in a Parquet file.
BLOCK_BYTES = 1 << 21
PART_BLOCKS = 256

SUMMARY_FILE = "summary.json"
RAW_DIRECTORY = "raw"

# Number of ids of a column that are counted at once: fewer make more sorts, more take more memory.
COUNTED_IDS = 1 << 22


@dataclasses.dataclass(frozen=True)
class Summary:
    """Result of a conversion.

    Attributes:
        rows: Number of rows of all Parquet files.
        bad_lines: Number of malformed lines, which were left out.
        smallest: Smallest count of each text file, by the file's name.
        table_rows: Number of rows of each of the 26 tables; empty for raw ids.
        sources: Bytes of each text file, by its name; None: an earlier version of jaxrec converted
            it.
    """

    rows: int
    bad_lines: int
    smallest: dict[str, int]
    table_rows: tuple[int, ...]
    sources: dict[str, int | None] = dataclasses.field(default_factory=dict)


def source_files(path: str | os.PathLike[str]) -> list[pathlib.Path]:
    """Return the file, or the files of a directory in the order of the numbers in their names."""
    path = pathlib.Path(path)
    if not path.is_dir():
        return [path]
    files = [p for p in path.iterdir() if p.is_file() and not p.name.startswith(".")]
    if not files:
        raise FileNotFoundError(2, "No file in this directory", str(path))
    return natural_order(files)


def convert(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    conversion: Conversion,
    *,
    threads: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    report: Callable[[BadLine], None] = lambda bad: None,
) -> Summary:
    """Convert a log to Parquet files, or continue a conversion that was stopped.

    Each Parquet file gets its name once it is complete. Memory does not depend on the size of the
    log: it is about 40 MB per thread and, for contiguous ids, 24 bytes for each distinct id of the
    largest column. ``progress`` gets the bytes read so far and the total; ``report`` gets each
    malformed line that is left out.
    """
    files, output = source_files(source), pathlib.Path(output)
    sizes = {file.name: file.stat().st_size for file in files}
    total = sum(sizes.values())
    if is_converted(output):
        earlier, summary = _read_summary(output)
        same_conversion(earlier, conversion, output)
        _same_sources(summary.sources or dict.fromkeys(summary.smallest), sizes, output)
        return summary
    # Contiguous ids are numbered once all are counted; until then the files have raw ids.
    parts = output / RAW_DIRECTORY if conversion.ids == "contiguous" else output
    parts.mkdir(parents=True, exist_ok=True)
    _same_parts(parts, files)
    before = 0
    with concurrent.futures.ThreadPoolExecutor(threads or os.cpu_count() or 1) as pool:
        for index, file in enumerate(files):
            for read in _convert_file(file, index, parts, conversion, pool, report):
                progress(before + read, total)
            before += file.stat().st_size
    progress(total, total)
    made = [read_part(path) for path in sorted(parts.glob("*.parquet"))]
    # Counted from the files: an earlier run, which was stopped, may have made the first of them.
    rows = sum(part.rows for part in made)
    if rows == 0:
        raise DataError(f"{source}: it has no rows")
    table_rows = conversion.rows_of_tables if conversion.ids == "hash" else ()
    if conversion.ids == "contiguous":
        table_rows = _renumber(parts, output, conversion)
    smallest: dict[str, int] = {}
    for part in made:
        smallest[part.source] = min(part.smallest, smallest.get(part.source, part.smallest))
    bad_lines = sum(part.bad_lines for part in made)
    summary = Summary(rows, bad_lines, smallest, table_rows, dict(sizes))
    content = {"conversion": as_json(conversion), **dataclasses.asdict(summary)}
    # The summary marks the conversion as complete. Only then may the files with raw ids go: a run
    # that is stopped before needs them.
    with write_atomically(output / SUMMARY_FILE) as unfinished:
        unfinished.write_text(json.dumps(content, indent=2) + "\n")
    if conversion.ids == "contiguous":
        for path in parts.glob("*.parquet"):
            path.unlink()
        parts.rmdir()
    return summary


def is_converted(output: str | os.PathLike[str]) -> bool:
    """Return whether a directory holds a completed conversion."""
    return pathlib.Path(output, SUMMARY_FILE).exists()


def _same_sources(
    made: Mapping[str, int | None], wanted: Mapping[str, int], output: pathlib.Path
) -> None:
    """Raise a DataError if two logs differ in their files' names, or in their known sizes."""
    # Names and sizes: reading a terabyte to compare contents would take as long as converting it.
    if set(made) == set(wanted) and all(made[name] in (None, wanted[name]) for name in made):
        return
    raise DataError(
        f"{output} holds rows of another log: of {_named(made)}, not of {_named(wanted)}; give "
        "another output, or remove it"
    )


def _named(files: Mapping[str, int | None]) -> str:
    shown = [
        name if size is None else f"{name} ({size:,} bytes)"
        for name, size in itertools.islice(files.items(), 3)
    ]
    return ", ".join(shown) + (f" and {len(files) - 3} more" if len(files) > 3 else "")


def _same_parts(output: pathlib.Path, files: Sequence[pathlib.Path]) -> None:
    """Raise a DataError if a Parquet file in ``output`` was not made from one of ``files``.

    A text file of the same name and another size is another file.
    """
    sources = {_prefix(file.name, index): file for index, file in enumerate(files)}
    for path in sorted(output.glob("*.parquet")):
        part, file = read_part(path), sources.get(path.name.rpartition("-")[0])
        made = {part.source: part.source_bytes}
        if file is None:
            raise DataError(
                f"{path} holds rows of another log ({_named(made)}); give another output, or "
                f"remove {output}"
            )
        _same_sources(made, {file.name: file.stat().st_size}, output)


def read_summary(output: str | os.PathLike[str]) -> Summary:
    return _read_summary(pathlib.Path(output))[1]


def files_of_sources(output: str | os.PathLike[str]) -> dict[str, tuple[pathlib.Path, ...]]:
    """Return the Parquet files of each text file of a conversion, in order."""
    output = pathlib.Path(output)
    return {
        name: tuple(sorted(output.glob(f"{glob.escape(_prefix(name, index))}-*.parquet")))
        for index, name in enumerate(read_summary(output).smallest)
    }


def _read_summary(output: pathlib.Path) -> tuple[dict[str, Any], Summary]:
    path = output / SUMMARY_FILE
    if not path.exists():
        raise DataError(
            f"{output}: {SUMMARY_FILE} is missing; `jaxrec data criteo` writes it when it is done"
        )
    content = json.loads(path.read_text())
    conversion = content.pop("conversion")
    return conversion, Summary(**content | {"table_rows": tuple(content["table_rows"])})


def _convert_file(
    file: pathlib.Path,
    index: int,
    output: pathlib.Path,
    conversion: Conversion,
    pool: concurrent.futures.Executor,
    report: Callable[[BadLine], None],
) -> Iterator[int]:
    """Write the missing Parquet files of a text file; yield the number of bytes read so far."""
    # Files of a stopped run come first: their metadata say where the text goes on.
    made: list[Part] = []
    while (path := _part_path(output, file, index, len(made))).exists():
        part = read_part(path)
        same_conversion(part.conversion, conversion, output)
        made.append(part)
        yield part.read
    if made and made[-1].last:
        return
    start, first = (made[-1].end, made[-1].lines) if made else (0, 0)
    blocks = blocks_of_lines(file, BLOCK_BYTES, start, first)
    skip = conversion.bad_rows == "skip"

    def parse(block: Block) -> tuple[Block, RawClicks]:
        return block, parse_lines(block, file, skip=skip)

    # One block for each thread and two to spare: no thread waits for the writer, and memory stays
    # small.
    parsed = ordered_map(parse, blocks, pool, ahead=2 + (os.cpu_count() or 1))
    pending = next(parsed, None)
    if pending is None and not made:
        raise DataError(f"{file}: the file is empty")
    while pending is not None:
        path = _part_path(output, file, index, len(made))
        with (
            write_atomically(path) as unfinished,
            PartWriter(unfinished, file, conversion) as writer,
        ):
            for _ in range(PART_BLOCKS):
                writer.add(*pending)
                yield pending[0].read
                for bad in pending[1].bad:
                    report(bad)
                pending = next(parsed, None)
                if pending is None:
                    break
            # The block after the last one is parsed already: only this tells whether the text ends
            # here.
            made.append(writer.finish(last=pending is None))


def _part_path(output: pathlib.Path, file: pathlib.Path, index: int, part: int) -> pathlib.Path:
    return output / f"{_prefix(file.name, index)}-{part:05d}.parquet"


def _prefix(name: str, index: int) -> str:
    return f"{index:03d}-{name.removesuffix('.gz')}"


def _renumber(raw: pathlib.Path, output: pathlib.Path, conversion: Conversion) -> tuple[int, ...]:
    """Copy Parquet files with row numbers in place of raw ids; return each table's row count."""
    # Existing maps and files are from a run that was stopped, and complete: they stay.
    paths = sorted(raw.glob("*.parquet"))
    (output / MAPS_DIRECTORY).mkdir(exist_ok=True)
    maps = {}
    for name in CATEGORICAL_NAMES:
        path = output / MAPS_DIRECTORY / f"{name}.parquet"
        if not path.exists():
            ContiguousMap.of(Appearances.count(_column(paths, name)), conversion.threshold).save(
                path
            )
        maps[name] = ContiguousMap.load(path)
    for path in paths:
        if not (output / path.name).exists():
            _rewrite(path, output / path.name, maps, conversion.compression)
    return tuple(numbers.num_rows for numbers in maps.values())


def _column(paths: Iterable[pathlib.Path], name: str) -> Iterator[np.ndarray]:
    pieces: list[np.ndarray] = []
    for path in paths:
        for batch in pq.ParquetFile(path, page_checksum_verification=True).iter_batches(
            columns=[name]
        ):
            pieces.append(batch.column(0).to_numpy())
            if sum(map(len, pieces)) >= COUNTED_IDS:
                yield np.concatenate(pieces)
                pieces = []
    if pieces:
        yield np.concatenate(pieces)


def _rewrite(
    source: pathlib.Path, target: pathlib.Path, maps: dict[str, ContiguousMap], compression: str
) -> None:
    file = pq.ParquetFile(source, page_checksum_verification=True)
    schema = file.schema_arrow
    for name in maps:
        number = pa.field(name, pa.int32(), nullable=False)
        schema = schema.set(schema.get_field_index(name), number)
    with (
        write_atomically(target) as unfinished,
        parquet_writer(unfinished, schema, compression) as writer,
    ):
        for group in range(file.num_row_groups):
            table = file.read_row_group(group)
            columns = [
                pa.array(maps[name](table[name].to_numpy())) if name in maps else table[name]
                for name in schema.names
            ]
            writer.write_table(pa.table(columns, schema=schema), row_group_size=len(table))
