"""Readers of GroupLens' MovieLens data sets, in the format of each."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Collection, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from jaxrec.data.addresses import Address, data_path
from jaxrec.data.files import DataError

_INT, _TEXT = pa.int32(), pa.string()

_GENRES = (
    "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary",
    "Drama", "Fantasy", "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi",
    "Thriller", "War", "Western",
)  # fmt: skip

_RATINGS = {"user_id": _INT, "movie_id": _INT, "rating": pa.float32(), "timestamp": pa.int64()}
_MOVIES = {"movie_id": _INT, "title": _TEXT, "genres": pa.list_(_TEXT), "year": _INT}
_USERS = {"user_id": _INT, "age": _INT, "gender": _TEXT, "occupation": _TEXT, "zip_code": _TEXT}


@dataclasses.dataclass(frozen=True)
class _Format:
    """Format of the files whose names end with ``name``.

    ``columns`` names the columns in order, "" for an empty one. None: the first line names them.
    """

    name: str
    delimiter: str
    columns: tuple[str, ...] | None = None
    encoding: str = "utf-8"
    quoted: bool = False


# In this order: 100K; 1M and 10M; 20M and later; RecBole's copies. 1M and 10M separate values by
# "::", and Arrow's delimiter is one character: every second column is empty.
_RATING_FORMATS = (
    _Format("u.data", "\t", tuple(_RATINGS)),
    _Format("ratings.dat", ":", ("user_id", "", "movie_id", "", "rating", "", "timestamp")),
    _Format("ratings.csv", ","),
    _Format(".inter", "\t"),
)
_MOVIE_FORMATS = (
    _Format("u.item", "|", ("movie_id", "title", "", "", "", *_GENRES), "latin-1"),
    _Format("movies.dat", "::", encoding="latin-1"),
    _Format("movies.csv", ",", quoted=True),
    _Format(".item", "\t"),
)
_USER_FORMATS = (
    _Format("u.user", "|", tuple(_USERS)),
    _Format(
        "users.dat", ":", ("user_id", "", "gender", "", "age", "", "occupation", "", "zip_code")
    ),
    _Format(".user", "\t"),
)

# Our names of the columns in headers of GroupLens, and of RecBole without the types.
_HEADERS = {
    "userId": "user_id",
    "movieId": "movie_id",
    "item_id": "movie_id",
    "movie_title": "title",
    "release_year": "year",
    "class": "genres",
}


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
        DataError: The directory has no file of ratings, a line is malformed, or a value is missing.

    Example:
        >>> import tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "ratings.dat")
        >>> _ = path.write_text("1::1193::5::978300760\\n")
        >>> movielens_ratings(path).to_pylist()[0]["movie_id"]
        1193
    """
    path = pathlib.Path(path)
    missing = "no ratings of MovieLens were found here; the file is u.data (100K), ratings.dat"
    file, layout = _find(path, _RATING_FORMATS, f"{missing} (1M) or ratings.csv (20M, 25M)")
    table = _read(file, layout, _RATINGS)
    for name in _RATINGS:
        if nulls := table[name].null_count:
            row = pc.index(pc.is_null(table[name]), True).as_py()
            line = row + (1 if layout.columns is not None else 2)
            raise DataError(f"{file}, line {line}: {name} is missing ({nulls} in all)")
    return table


def has_ratings(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is, by its name or those of its files, one of `movielens_ratings`."""
    path = data_path(path)
    if isinstance(path, Address):
        return False
    names = [file.name for file in path.iterdir()] if path.is_dir() else [path.name]
    return any(name.endswith(layout.name) for layout in _RATING_FORMATS for name in names)


def _find(
    path: pathlib.Path, formats: Sequence[_Format], missing: str
) -> tuple[pathlib.Path, _Format]:
    """Return the file at a path, or the first in a directory, that has a format, and the format.

    ``missing`` is the error's text if there is none.
    """
    if not path.exists():
        raise FileNotFoundError(2, "No such file or directory", str(path))
    candidates = sorted(path.iterdir()) if path.is_dir() else [path]
    for layout in formats:
        for file in candidates:
            if file.name.endswith(layout.name):
                return file, layout
    raise DataError(f"{path}: {missing}")


def movielens_movies(path: str | os.PathLike[str]) -> pa.Table:
    """Read the movies of a MovieLens data set.

    Args:
        path: The data set's directory, with ``u.item``, ``movies.dat``, ``movies.csv`` or a RecBole
            ``.item`` file.

    Returns:
        ``movie_id`` int32; ``title`` string, which ends with the year except in RecBole's files;
        ``genres`` list of strings; ``year`` int32, null if unknown.

    Raises:
        OSError: The file cannot be read.
        DataError: The directory has no file of movies, or a line is malformed.
    """
    path = pathlib.Path(path)
    missing = "there is no file of MovieLens movies here: u.item (100K), movies.dat (1M) or"
    file, layout = _find(path, _MOVIE_FORMATS, f"{missing} movies.csv (20M, 25M)")
    if layout.name == "movies.dat":
        return _movies_of_lines(file, layout.encoding)
    columns = {"movie_id": _INT, "title": _TEXT}
    if layout.name == "u.item":
        table = _read(file, layout, columns | dict.fromkeys(_GENRES, pa.int8()))
        flags = [table[genre].to_pylist() for genre in _GENRES]
        genres = [
            [genre for genre, flag in zip(_GENRES, row, strict=True) if flag]
            for row in zip(*flags, strict=True)
        ]
        return _movies(table["movie_id"], table["title"], genres)
    if layout.name == "movies.csv":
        table = _read(file, layout, columns | {"genres": _TEXT})
        return _movies(table["movie_id"], table["title"], _split(table["genres"].to_pylist()))
    table = _read(file, layout, columns | {"genres": _TEXT, "year": _TEXT})
    genres = [(text or "").split() for text in table["genres"].to_pylist()]
    return _movies(table["movie_id"], table["title"], genres, table["year"])


def _movies(
    ids: Sequence[int] | pa.ChunkedArray,
    titles: pa.Array | pa.ChunkedArray,
    genres: Sequence[Sequence[str]],
    years: pa.ChunkedArray | None = None,
) -> pa.Table:
    """Make the table of movies; without ``years`` the year is read from the end of each title."""
    if years is None:
        found = pc.extract_regex(titles, r"\((?P<year>[0-9]{4})\)\s*$")
    else:
        found = pc.extract_regex(years, r"^(?P<year>[0-9]{4})$")
    found = pc.struct_field(found, "year").cast(pa.int32())
    return pa.table([ids, titles, genres, found], pa.schema(_MOVIES))


def _movies_of_lines(file: pathlib.Path, encoding: str) -> pa.Table:
    """Parse lines ``id::title::genres``."""
    # Titles contain single colons, so that the trick of empty columns does not work here. The
    # file has at most some ten thousand lines.
    ids, titles, genres = [], [], []
    for number, line in enumerate(file.read_text(encoding).splitlines(), start=1):
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
        ``user_id`` int32; ``age`` int32, in 1M the first year of a range; ``gender`` string;
        ``occupation`` string, in 1M a number; ``zip_code`` string.

    Raises:
        OSError: The file cannot be read.
        DataError: The directory has no file of users, or a line is malformed.
    """
    missing = "there is neither u.user (100K) nor users.dat (1M) here"
    return _read(*_find(pathlib.Path(path), _USER_FORMATS, missing), _USERS)


def _read(file: pathlib.Path, layout: _Format, types: dict[str, pa.DataType]) -> pa.Table:
    """Read the columns that ``types`` names from a file, in these types."""
    if layout.columns is None:
        names = _header(file, layout.delimiter, types)
    else:
        names = [name or f"_{i}" for i, name in enumerate(layout.columns)]
    try:
        return pyarrow.csv.read_csv(
            file,
            pyarrow.csv.ReadOptions(
                use_threads=False,  # only without threads do Arrow's errors name the row
                column_names=names,
                skip_rows=int(layout.columns is None),
                encoding=layout.encoding,
            ),
            pyarrow.csv.ParseOptions(
                delimiter=layout.delimiter, quote_char='"' if layout.quoted else False
            ),
            pyarrow.csv.ConvertOptions(
                column_types=types, include_columns=list(types), null_values=[""]
            ),
        )
    except pa.ArrowInvalid as error:
        raise DataError(f"{file}: {' '.join(str(error).split())}") from None


def _header(file: pathlib.Path, delimiter: str, types: Collection[str]) -> list[str]:
    """Return our names of the columns in the first line, which must name all ``types``."""
    # Spreadsheets write a byte order mark, which utf-8-sig drops.
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
    return names
