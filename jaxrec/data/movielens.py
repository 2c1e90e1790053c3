"""Readers of GroupLens' MovieLens data sets in all their formats."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from jaxrec.data.files import DataError

_RATING_TYPES = {
    "user_id": pa.int32(),
    "movie_id": pa.int32(),
    "rating": pa.float32(),
    "timestamp": pa.int64(),
}


@dataclasses.dataclass(frozen=True)
class _Format:
    """Format of a file of ratings.

    Attributes:
        name: Name of the file, or for RecBole the end of its name.
        delimiter: Separator of values.
        columns: Names of the columns, "" for an empty column; None: the first line names them.
    """

    name: str
    delimiter: str
    columns: tuple[str, ...] | None


_NAMES = tuple(_RATING_TYPES)
_FORMATS = (
    _Format("u.data", "\t", _NAMES),  # 100K
    # 1M and 10M separate values by "::", which is an empty column between two colons.
    _Format("ratings.dat", ":", ("user_id", "", "movie_id", "", "rating", "", "timestamp")),
    _Format("ratings.csv", ",", None),  # 20M, 25M, 32M and "latest"
    _Format(".inter", "\t", None),  # RecBole's copies
)

# Names of columns in the headers of GroupLens and RecBole, without their types.
_HEADERS = {
    "userId": "user_id",
    "movieId": "movie_id",
    "item_id": "movie_id",
    "movie_title": "title",
    "release_year": "year",
    "class": "genres",
}
_GENRES = (
    "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary",
    "Drama", "Fantasy", "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi",
    "Thriller", "War", "Western",
)  # fmt: skip


def movielens_ratings(path: str | os.PathLike[str]) -> pa.Table:
    """Read the ratings of MovieLens 100K, 1M, 10M, 20M, 25M or 32M.

    Args:
        path: The data set's directory, or its file of ratings (``u.data``, ``ratings.dat``,
            ``ratings.csv``, or a RecBole ``.inter`` file).

    Returns:
        ``user_id`` and ``movie_id`` int32, ``rating`` float32, ``timestamp`` int64 (seconds since
        1970), in the order of the file.

    Raises:
        OSError: The file cannot be read.
        DataError: There is no file of ratings, a line is malformed, or a value is missing.

    Example:
        >>> import tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "ratings.dat")
        >>> _ = path.write_text("1::1193::5::978300760\\n")
        >>> movielens_ratings(path).to_pylist()[0]["movie_id"]
        1193
    """
    file, layout = _ratings_file(pathlib.Path(path))
    if layout.columns is None:
        table = _read_named(file, layout.delimiter, _RATING_TYPES)
    else:
        names = [name or f"_{i}" for i, name in enumerate(layout.columns)]
        table = _read(file, layout.delimiter, names, 0, _RATING_TYPES).select(list(_NAMES))
    for name in _NAMES:
        if missing := table[name].null_count:
            row = pc.index(pc.is_null(table[name]), True).as_py()
            line = row + (1 if layout.columns is not None else 2)
            raise DataError(f"{file}, line {line}: {name} is missing ({missing} in all)")
    return table


def _ratings_file(path: pathlib.Path) -> tuple[pathlib.Path, _Format]:
    candidates = sorted(path.iterdir()) if path.is_dir() else [path]
    for layout in _FORMATS:
        for file in candidates:
            if file.name.endswith(layout.name):
                return file, layout
    if not path.is_dir() and not path.exists():
        raise FileNotFoundError(2, "No such file or directory", str(path))
    raise DataError(
        f"{path}: there are no ratings of MovieLens here; they are in u.data (100K), ratings.dat "
        "(1M) or ratings.csv (20M, 25M)"
    )


def movielens_movies(path: str | os.PathLike[str]) -> pa.Table:
    """Read the movies of a MovieLens data set.

    Args:
        path: The data set's directory, with ``u.item``, ``movies.dat``, ``movies.csv`` or a RecBole
            ``.item`` file.

    Returns:
        ``movie_id`` int32, ``title`` string (with the year, except in RecBole's files), ``genres``
        list of strings, ``year`` int32, null if unknown.

    Raises:
        OSError: The file cannot be read.
        DataError: There is no file of movies, or a line is malformed.
    """
    path = pathlib.Path(path)
    if (path / "u.item").exists():
        names = ["movie_id", "title", "released", "video", "url", *_GENRES]
        types = {"movie_id": pa.int32(), **dict.fromkeys(names[1:5], pa.string())}
        types |= dict.fromkeys(_GENRES, pa.int8())
        table = _read(path / "u.item", "|", names, 0, types, encoding="latin-1")
        flags = [table[genre].to_pylist() for genre in _GENRES]
        genres = [
            [genre for genre, flag in zip(_GENRES, row, strict=True) if flag]
            for row in zip(*flags, strict=True)
        ]
        return _movies(table["movie_id"], table["title"], genres)
    if (path / "movies.dat").exists():
        return _movies_of_lines(path / "movies.dat")
    if (path / "movies.csv").exists():
        types = {"movie_id": pa.int32(), "title": pa.string(), "genres": pa.string()}
        table = _read_named(path / "movies.csv", ",", types, quoted=True)
        return _movies(table["movie_id"], table["title"], _split(table["genres"].to_pylist()))
    if file := _recbole_file(path, ".item"):
        types = {"movie_id": pa.int32(), "title": pa.string()}
        types |= {"year": pa.string(), "genres": pa.string()}
        table = _read_named(file, "\t", types)
        genres = [(text or "").split() for text in table["genres"].to_pylist()]
        return _movies(table["movie_id"], table["title"], genres, table["year"])
    raise DataError(
        f"{path}: there is no file of MovieLens movies here: u.item (100K), movies.dat (1M) or "
        "movies.csv (20M, 25M)"
    )


_MOVIES = pa.schema(
    [
        ("movie_id", pa.int32()),
        ("title", pa.string()),
        ("genres", pa.list_(pa.string())),
        ("year", pa.int32()),
    ]
)


def _movies(
    ids: Sequence[int] | pa.ChunkedArray,
    titles: pa.Array | pa.ChunkedArray,
    genres: Sequence[Sequence[str]],
    years: pa.ChunkedArray | None = None,
) -> pa.Table:
    """Make the table of movies; without ``years``, the year is taken from the end of the title."""
    if years is None:
        found = pc.extract_regex(titles, r"\((?P<year>[0-9]{4})\)\s*$")
    else:
        found = pc.extract_regex(years, r"^(?P<year>[0-9]{4})$")
    found = pc.struct_field(found, "year").cast(pa.int32())
    return pa.table([ids, titles, genres, found], _MOVIES)


def _movies_of_lines(file: pathlib.Path) -> pa.Table:
    """Parse lines ``id::title::genres``; titles contain colons, which CSV readers cannot parse."""
    ids, titles, genres = [], [], []
    for number, line in enumerate(file.read_text("latin-1").splitlines(), start=1):
        fields = line.split("::")
        if len(fields) != 3 or not fields[0].isdecimal():
            raise DataError(f"{file}, line {number}: expected id::title::genres, got {line!r}")
        ids.append(int(fields[0]))
        titles.append(fields[1])
        genres.append(fields[2])
    return _movies(ids, pa.array(titles, pa.string()), _split(genres))


def _split(genres: Sequence[str | None]) -> list[list[str]]:
    return [
        [] if text is None or text == "(no genres listed)" else text.split("|") for text in genres
    ]


def movielens_users(path: str | os.PathLike[str]) -> pa.Table:
    """Read the users of MovieLens 100K or 1M; later data sets have no file of users.

    Args:
        path: The data set's directory, with ``u.user``, ``users.dat`` or a RecBole ``.user`` file.

    Returns:
        ``user_id`` int32, ``age`` int32 (1M: the first year of a range), ``gender`` string,
        ``occupation`` string (1M: its number), ``zip_code`` string.

    Raises:
        OSError: The file cannot be read.
        DataError: There is no file of users, or a line is malformed.
    """
    path = pathlib.Path(path)
    types = {
        "user_id": pa.int32(),
        "age": pa.int32(),
        "gender": pa.string(),
        "occupation": pa.string(),
        "zip_code": pa.string(),
    }
    if (path / "u.user").exists():
        return _read(path / "u.user", "|", list(types), 0, types)
    if (path / "users.dat").exists():
        names = ["user_id", "_1", "gender", "_3", "age", "_5", "occupation", "_7", "zip_code"]
        return _read(path / "users.dat", ":", names, 0, types).select(list(types))
    if file := _recbole_file(path, ".user"):
        return _read_named(file, "\t", types)
    raise DataError(f"{path}: there is neither u.user (100K) nor users.dat (1M) here")


def _recbole_file(path: pathlib.Path, ending: str) -> pathlib.Path | None:
    """Return the first file of a directory with an ending; None if there is none."""
    return min(path.glob(f"*{ending}"), default=None)


def _read_named(
    file: pathlib.Path, delimiter: str, types: dict[str, pa.DataType], *, quoted: bool = False
) -> pa.Table:
    """Read the columns of ``types`` by the names in the first line, in any order.

    Raises:
        OSError: The file cannot be read.
        DataError: The first line lacks a name, or a line is malformed.
    """
    with file.open(encoding="utf-8-sig", errors="replace") as opened:
        header = opened.readline().rstrip("\r\n")
    fields = [field.strip('"').partition(":")[0] for field in header.split(delimiter)]
    names = [_HEADERS.get(field, field) for field in fields]
    for name in types:
        if names.count(name) != 1:
            known = [name, *(field for field, same in _HEADERS.items() if same == name)]
            raise DataError(
                f"{file}, line 1: the header {header!r} names {names.count(name) or 'no'} columns "
                f"{' or '.join(known)}"
            )
    return _read(file, delimiter, names, 1, types, quoted=quoted).select(list(types))


def _read(
    file: pathlib.Path,
    delimiter: str,
    names: Sequence[str],
    skip: int,
    types: dict[str, pa.DataType],
    *,
    encoding: str = "utf-8",
    quoted: bool = False,
) -> pa.Table:
    try:
        return pyarrow.csv.read_csv(
            file,
            read_options=pyarrow.csv.ReadOptions(
                column_names=list(names), skip_rows=skip, encoding=encoding, use_threads=False
            ),
            parse_options=pyarrow.csv.ParseOptions(
                delimiter=delimiter, quote_char='"' if quoted else False
            ),
            convert_options=pyarrow.csv.ConvertOptions(column_types=types, null_values=[""]),
        )
    except pa.ArrowInvalid as error:
        raise DataError(f"{file}: {' '.join(str(error).split())}") from None
