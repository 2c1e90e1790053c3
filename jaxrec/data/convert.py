"""Criteo's click logs, from text to Parquet: once through the text, on all cores."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxrec.data import contiguous
from jaxrec.data.parts import Conversion, Part, PartWriter, as_json, read_part, same_conversion
from jaxrec.data.prefetch import ordered_map
from jaxrec.data.text import BadLine, Block, DataError, RawClicks, blocks_of_lines, parse_lines

# Text that one thread parses at once, so little that its columns stay in caches; and how many of
# these make a Parquet file.
BLOCK_BYTES = 1 << 21
PART_BLOCKS = 256

SUMMARY_FILE = "summary.json"
RAW_DIRECTORY = "raw"


@dataclasses.dataclass(frozen=True)
class Summary:
    """What came out.

    Attributes:
        rows: Rows of all Parquet files.
        bad_lines: Lines that are no rows, and were left out.
        smallest: The smallest count of each text file, by its name.
        table_rows: Rows that a table needs for each column of ids; empty for raw ids.
        sources: Bytes of each text file, by its name; None where an earlier version did not write
            them down.
    """

    rows: int
    bad_lines: int
    smallest: dict[str, int]
    table_rows: tuple[int, ...]
    sources: dict[str, int | None] = dataclasses.field(default_factory=dict)


def source_files(path: str | os.PathLike[str]) -> list[pathlib.Path]:
    """The file, or those of a directory: ``day_0.gz``, ``day_1.gz``, ... by their numbers.

    Raises:
        FileNotFoundError: There is none.
    """
    path = pathlib.Path(path)
    if not path.is_dir():
        return [path]
    files = [p for p in path.iterdir() if p.is_file() and not p.name.startswith(".")]
    if not files:
        raise FileNotFoundError(2, "No file in this directory", str(path))
    return sorted(files, key=lambda p: [(not w.isdecimal(), w.zfill(20)) for w in _words(p.name)])


def _words(name: str) -> list[str]:
    digits = "".join(c if c.isdecimal() else f"\0{c}\0" for c in name)
    return [word for word in digits.split("\0") if word]


def convert(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    conversion: Conversion,
    *,
    threads: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    report: Callable[[BadLine], None] = lambda bad: None,
) -> Summary:
    """Writes a log as Parquet files; a run that was stopped goes on where it was.

    Each file appears under its name when it is complete. Memory is bounded by the number of
    threads, whatever the size of the log: about 40 MB each. Contiguous ids take, on top, 24 bytes
    for each distinct id of the column that has most.

    Args:
        source: A text file, plain or gzip, or a directory of them.
        output: Directory of the Parquet files; it is made.
        conversion: What becomes of the rows.
        threads: How many parse; None: one a core.
        progress: Told how many of how many bytes have been read.
        report: Told of each bad line that is left out.

    Raises:
        OSError: Something cannot be read or written.
        DataError: A line is no row, a gzip file is cut short, the log is empty, or ``output`` holds
            the result of another conversion or of another log.
    """
    files, output = source_files(source), pathlib.Path(output)
    sizes = {file.name: file.stat().st_size for file in files}
    total = sum(sizes.values())
    if is_converted(output):
        earlier, summary = _read_summary(output)
        same_conversion(earlier, conversion, output)
        _same_sources(summary.sources or dict.fromkeys(summary.smallest), sizes, output)
        return summary
    # Contiguous ids are numbered when all have been counted.
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
    rows = sum(part.rows for part in made)
    if rows == 0:
        raise DataError(f"{source}: there are no rows in it")
    table_rows = conversion.rows_of_tables if conversion.ids == "hash" else ()
    if conversion.ids == "contiguous":
        table_rows = contiguous.renumber(
            parts, output, conversion.threshold, conversion.compression
        )
    smallest: dict[str, int] = {}
    for part in made:
        smallest[part.source] = min(part.smallest, smallest.get(part.source, part.smallest))
    bad_lines = sum(part.bad_lines for part in made)
    summary = Summary(rows, bad_lines, smallest, table_rows, dict(sizes))
    content = {"conversion": as_json(conversion), **dataclasses.asdict(summary)}
    _write_text(output / SUMMARY_FILE, json.dumps(content, indent=2) + "\n")
    if conversion.ids == "contiguous":
        for path in parts.glob("*.parquet"):
            path.unlink()
        parts.rmdir()
    return summary


def is_converted(output: str | os.PathLike[str]) -> bool:
    """Whether `convert` has filled a directory, to the end."""
    return pathlib.Path(output, SUMMARY_FILE).exists()


def _same_sources(
    made: Mapping[str, int | None], wanted: Mapping[str, int], output: pathlib.Path
) -> None:
    """Raise `DataError` if something was made of other files, by their names and sizes."""
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
    """Raise `DataError` if a Parquet file of an unfinished run was made of other files."""
    sources = {_part_prefix(file, index): file for index, file in enumerate(files)}
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
    """The summary of a directory that `convert` filled.

    Raises:
        DataError: It did not, or not to the end.
    """
    return _read_summary(pathlib.Path(output))[1]


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
    """Makes the Parquet files of a text file that are not there yet; yields bytes read so far."""
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
        return block, parse_lines(block.lines, file, block.first, skip=skip)

    parsed = ordered_map(parse, blocks, pool, ahead=2 + (os.cpu_count() or 1))
    pending = next(parsed, None)
    if pending is None and not made:
        raise DataError(f"{file}: the file is empty")
    while pending is not None:
        path = _part_path(output, file, index, len(made))
        writer = PartWriter(path, file, conversion)
        try:
            for _ in range(PART_BLOCKS):
                writer.add(*pending)
                yield pending[0].read
                for bad in pending[1].bad:
                    report(bad)
                pending = next(parsed, None)
                if pending is None:
                    break
            made.append(writer.finish(last=pending is None))
        except BaseException:
            writer.discard()
            raise


def _part_path(output: pathlib.Path, file: pathlib.Path, index: int, part: int) -> pathlib.Path:
    return output / f"{_part_prefix(file, index)}-{part:05d}.parquet"


def _part_prefix(file: pathlib.Path, index: int) -> str:
    return f"{index:03d}-{file.name.removesuffix('.gz')}"


def _write_text(path: pathlib.Path, text: str) -> None:
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(text)
    unfinished.replace(path)
