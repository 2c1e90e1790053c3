"""Copies of a model that follow its published versions."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence, Set

import jax
import numpy as np
from flax import nnx

from jaxrec.embed.variables import dense_variables, plain, value_like
from jaxrec.files.rows import Values, read_arrays, read_rows
from jaxrec.mesh.agree import in_all_processes, on_process_zero
from jaxrec.tier.deltas.folder import Follower, VersionError, VersionName
from jaxrec.tier.deltas.manifest import REMOVED, ROWS, UNKNOWN, File, Files, Manifest, TableFacts
from jaxrec.tier.deltas.tables import PublishedTable, published_tables
from jaxrec.tier.planning.tier import tier_of

# Errors that all processes raise alike, special ones first: a VersionError is a ValueError.
_KINDS = (VersionError, OSError, ValueError)


class Subscriber(Follower):
    """Brings a copy of a model to the versions that `publish` wrote.

    Make the copy as the model was made. Its tables may be placed otherwise: on one device or any
    mesh, in a cache (`jaxrec.tier.Cached`) or whole, with or without a store of evicted rows. A
    copy with an open vocabulary and no store needs room for all ids of the model.

    After `update` the copy equals the published model bit for bit: each id reads the same row, ids
    that lost their rows read what unknown ids read, and all other variables are the same. The
    optimizer state of rows is loaded if ``with_state``; otherwise rows that are new to an open
    vocabulary get a fresh state, and others keep theirs.

    Args:
        copy: The copy.
        url: The folder of the versions, as for `publish`.
        with_state: Whether the optimizer state of rows is loaded.

    Attributes:
        step: Number of training steps of the copy's version, if its publisher gave it.

    Raises:
        TypeError: The copy is no Flax module.
        ValueError: No folder has that URL.

    Example:
        >>> import jaxrec, tempfile
        >>> def make_model(seed):
        ...     config = jaxrec.EmbeddingBagConfig("item", num_embeddings=100, embedding_dim=2)
        ...     return jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(seed))
        >>> model, copy, folder = make_model(0), make_model(1), tempfile.mkdtemp()
        >>> subscriber = Subscriber(copy, folder)
        >>> subscriber.update()  # there is no version yet
        0
        >>> _ = jaxrec.tier.publish(model, folder)
        >>> subscriber.update(), subscriber.version
        (1, 1)
        >>> bool((copy.table("item") == model.table("item")).all())
        True
    """

    def __init__(
        self, copy: nnx.Module, url: str | os.PathLike[str], *, with_state: bool = False
    ) -> None:
        published_tables(copy)
        super().__init__(url)
        self._copy, self._with_state = copy, with_state
        self.step: int | None = None

    @property
    def copy(self) -> nnx.Module:
        """The copy that is brought to new versions."""
        return self._copy

    def has_new(self) -> bool:
        """Return whether the folder's newest version is another than the copy's; reads names only.

        Raises:
            OSError: The folder cannot be read.
        """
        names = self._names()
        return bool(names) and names[-1] != self._name

    @contextlib.contextmanager
    def into(self, staged: nnx.Module) -> Iterator[None]:
        """Let `update` change another copy, ``staged``, within this context.

        Use it if other threads read `copy`. ``staged`` must be at the version of `copy`. Before the
        context ends, the caller must replace the variables of `copy` by those of ``staged``. If the
        block raises, the subscriber goes back to the version that it had at entry.
        """
        before = self._copy, self._name, self.step
        self._copy = staged
        try:
            yield
        except BaseException:
            self._name, self.step = before[1:]
            raise
        finally:
            self._copy = before[0]

    def update(self) -> int:
        """Bring the copy to the newest version.

        Versions are loaded in order, each after all its files are compared with their checksums. If
        a version is missing or damaged, the next full version takes its place. Call it in the
        thread that uses the copy, between two batches. Every process calls it and reads the files.

        Returns:
            The number of versions that were loaded; 0 if there is no new one.

        Raises:
            VersionError: A version is damaged or missing, and no full one takes its place. The copy
                stays at the last whole version. Only if a file was removed while it was read does
                the copy have rows of two versions, until an `update` succeeds.
            ValueError: A version is of another model, or does not fit the copy.
            OSError: A file cannot be read. If that is in the middle of a version, the next `update`
                loads the version again.
            RuntimeError: A training loop over the copy has planned batches with rows of ids that
                lost theirs.
        """
        names = self._names()
        while True:
            try:
                return self._update(names)
            except VersionError:
                # The publisher may have removed versions meanwhile, and written others.
                if (now := self._names()) == names:
                    raise
                names = now

    def _names(self) -> list[VersionName]:
        found = on_process_zero(
            lambda: [(name.version, name.token) for name in self._folder.names()]
        )
        return [VersionName(version, token) for version, token in found]

    def _update(self, names: Sequence[VersionName]) -> int:
        if not names or names[-1] == self._name:
            return 0
        count = 0
        damage: VersionError | None = None
        for chain in self._chains(names):
            reached = self._name
            try:
                for name, is_full in chain:
                    self._take_over(name, is_full)
                    count += 1
                return count
            except VersionError as error:
                # The first damage is the cause; later chains may be incomplete because of it.
                damage = damage or error
                if chain[0][1] and self._name != reached:
                    break  # it is newer than all other full versions
        raise self._no_way(damage)

    def _take_over(self, name: VersionName, is_full: bool) -> None:
        """Check a version and load it, if ``is_full`` all of its rows, else its changes."""
        with contextlib.ExitStack() as stack:
            tier = tier_of(self._copy)
            if tier is not None:
                stack.enter_context(tier.settled(self._copy))
            tables = published_tables(self._copy)
            incoming = in_all_processes(lambda: self._checked(name, is_full, tables), _KINDS)
            files, facts, values = incoming.files, incoming.manifest.tables, incoming.dense
            try:
                for table_name, table in tables.items():
                    self._load(table, files.get(table_name, {}), facts[table_name], is_full)
            except VersionError as error:
                # A file was removed since it was checked. The other processes are at other rows by
                # now and cannot begin another version together with this one, so that the error is
                # not a VersionError.
                if jax.process_count() > 1:
                    raise OSError(str(error)) from error
                raise
            variables = dense_variables(self._copy)
            for variable_name, value in values.items():
                variable = variables[variable_name]
                variable.set_value(value_like(value, variable.get_raw_value()))
        self._name, self.step = name, incoming.manifest.step

    def _load(
        self, table: PublishedTable, files: dict[str, File], facts: TableFacts, is_full: bool
    ) -> None:
        # A full version of a plain table has all of its rows; the other tables first drop the ids
        # that it leaves out.
        if is_full and (facts.is_open or facts.seed is not None):
            assert not isinstance(facts.seed, int)  # `_check_tables` refuses it
            table.forget_others(self._ids(files.get(ROWS)), facts.seed)
        # Before the rows are written: a copy without a store needs the room of removed ids for new
        # ones.
        table.forget(self._ids(files.get(REMOVED)))
        for ids, values in self._rows(files.get(ROWS), table):
            table.write(ids, values)
        for rows, values in self._rows(files.get(UNKNOWN), table):
            table.write_rows(rows, values)

    def _checked(
        self, name: VersionName, is_full: bool, tables: dict[str, PublishedTable]
    ) -> _Incoming:
        # All checks come before the first row is written: a copy that serves must never be half of
        # a damaged version.
        before = "" if self._name is None else self._name.token
        manifest, files = self._read_version(name, is_full, before)
        with self._refusing(name):
            _check_tables(tables, manifest.tables, self._with_state)
        for of_table in files.values():
            for file in of_table.values():
                self._folder.check(file)
        self._folder.check(manifest.dense)
        for table_name, table in tables.items():
            of_table = files.get(table_name, {})
            for kind, file in of_table.items():
                self._check_ids(file, kind, manifest.tables[table_name])
                if kind != REMOVED:  # the first part, with its types
                    next(self._rows(file, table), None)
            if not manifest.tables[table_name].is_open:
                continue
            removed = None if is_full else self._ids(of_table.get(REMOVED))
            with self._refusing(name):
                if shortage := table.find_shortage(self._ids(of_table.get(ROWS)), removed):
                    raise ValueError(f"table {table_name!r}: {shortage}")
        with self._folder.reading(manifest.dense) as source:
            dense = read_arrays(source)
        with self._refusing(name):
            _check_dense(self._copy, dense)
        return _Incoming(manifest, files, dense)

    @contextlib.contextmanager
    def _refusing(self, name: VersionName) -> Iterator[None]:
        """Name the folder and the version in the error of a version that does not fit the copy."""
        try:
            yield
        except VersionError:
            raise  # names its file
        except ValueError as error:
            raise ValueError(
                f"{self._folder}: version {name.version} does not fit the copy: {error}"
            ) from None

    def _rows(
        self, file: File | None, table: PublishedTable
    ) -> Iterator[tuple[np.ndarray, Values]]:
        if file is not None:
            with self._folder.reading(file) as source:
                yield from read_rows(source, table.shapes(self._with_state))

    def _ids(self, file: File | None) -> np.ndarray:
        """Return all ids of a file, int64 ``[n]``; empty without a file."""
        if file is None:
            return np.zeros(0, np.int64)
        with self._folder.reading(file) as source:
            parts = [ids for ids, _ in read_rows(source, {})]
            return np.concatenate([np.zeros(0, np.int64), *parts])

    def _check_ids(self, file: File, kind: str, facts: TableFacts) -> None:
        """Raise a VersionError if a file has ids that its table cannot have."""
        ids = self._ids(file)
        bound = facts.unknown[1] if kind == UNKNOWN else facts.num_embeddings
        is_bounded = kind == UNKNOWN or not facts.is_open
        problem = ""
        if ids.size != file.rows:
            problem = f"it has {ids.size:,} ids, and its manifest says {file.rows:,}"
        elif is_bounded and ids.size and not 0 <= ids.min() <= ids.max() < bound:
            problem = f"it has ids from {ids.min()} to {ids.max()}, and the table {bound:,} rows"
        elif np.unique(ids).size != ids.size:
            problem = "it has an id twice"
        elif kind == REMOVED and not facts.is_open and facts.seed is None and ids.size:
            problem = "it takes rows away from a table in which each id has one"
        if problem:
            raise VersionError(f"{self._folder}: file {file.name} cannot be used: {problem}")


@dataclasses.dataclass(frozen=True)
class _Incoming:
    """A checked version: its manifest, its tables' files, and its variables outside the tables."""

    manifest: Manifest
    files: Files
    dense: dict[str, np.ndarray]


def _check_tables(
    tables: dict[str, PublishedTable], published: dict[str, TableFacts], with_state: bool
) -> None:
    """Raise a ValueError if the published tables differ from those of the copy."""
    _require_same_names("table", tables.keys(), published.keys())
    for name, table in tables.items():
        mine, theirs = table.facts, published[name]
        for field in ("embedding_dim", "dtype", "is_open", "unknown"):
            _require_same(name, field, getattr(mine, field), getattr(theirs, field))
        if not theirs.is_open:
            _require_same(name, "num_embeddings", mine.num_embeddings, theirs.num_embeddings)
        if isinstance(theirs.seed, int):
            raise ValueError(
                f"table {name!r} was published by an earlier jaxrec, in which ids without a row "
                f"begin in another way (seed={theirs.seed}); publish it by this one"
            )
        if theirs.seed is not None:
            _require_same(name, "initializer", table.initializer, theirs.initializer)
        if with_state:
            if theirs.state is None:
                raise ValueError(
                    f"table {name!r} was published without its optimizer state; publish with_state="
                    "True, or leave with_state out here"
                )
            _require_same(name, "state", mine.state, theirs.state)


def _require_same_names(kind: str, mine: Set[str], published: Set[str]) -> None:
    for name in sorted(mine ^ published):
        where = "the copy has not" if name in published else "was not published"
        raise ValueError(f"{kind} {name!r} {where}; make the copy as the model that is published")


def _require_same(table: str, field: str, mine: object, theirs: object) -> None:
    if mine != theirs:
        raise ValueError(
            f"table {table!r} was published with {field}={theirs!r}, but the copy has {mine!r}; "
            "make the copy as the model that is published"
        )


def _check_dense(copy: nnx.Module, published: dict[str, np.ndarray]) -> None:
    """Raise a ValueError if the published variables differ from the copy's in name or shape."""
    mine = {name: plain(x.get_raw_value()) for name, x in dense_variables(copy).items()}
    _require_same_names("variable", mine.keys(), published.keys())
    for name, value in mine.items():
        forms = [f"{np.dtype(x.dtype).name}{list(x.shape)}" for x in (published[name], value)]
        if forms[0] != forms[1]:
            raise ValueError(
                f"variable {name!r} was published as {forms[0]}, but the copy has {forms[1]}; make "
                "the copy as the model that is published"
            )
