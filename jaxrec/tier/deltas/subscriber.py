"""Copies of a model that take over its versions."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from flax import nnx

from jaxrec.embed.variables import dense_variables, value_like
from jaxrec.mesh.agree import on_process_zero, raise_together
from jaxrec.tier.deltas.arrow_files import read_arrays, read_rows
from jaxrec.tier.deltas.compatibility import check_dense, check_tables
from jaxrec.tier.deltas.folder import VersionError, VersionFolder, VersionName
from jaxrec.tier.deltas.manifest import (
    REMOVED,
    ROWS,
    UNKNOWN,
    File,
    Files,
    Manifest,
    TableFacts,
)
from jaxrec.tier.deltas.table import PublishedTable, Values
from jaxrec.tier.deltas.tables import published_tables
from jaxrec.tier.tier import tier_of

# Errors that processes agree on, the special ones first.
_KINDS = (VersionError, OSError, ValueError)


class Subscriber:
    """Takes over the versions that `publish` wrote, into a copy of the model.

    The copy is made as the model was. Its tables may lie elsewhere: on one device or any mesh, in
    a cache (`jaxrec.tier.Cached`) or whole, with or without a store of evicted rows. A copy with
    an open vocabulary and no store has room for all ids of the model.

    After `update` the copy is equal to the model when it was published, bit for bit: each id reads
    the same row, ids that lost their rows read what unknown ids read, and all other variables are
    the same. The optimizer state of rows is taken over where it is asked for; else rows that are
    new to an open vocabulary have a fresh state, and others keep theirs.

    Args:
        copy: The copy.
        url: The folder of the versions, as for `publish`.
        with_state: Whether the optimizer state of rows is taken over.

    Attributes:
        step: Number of training steps of that version, if its publisher gave it.

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
        self._copy, self._folder, self._with_state = copy, VersionFolder(url), with_state
        self._name: VersionName | None = None
        self.step: int | None = None

    @property
    def version(self) -> int:
        """Number of the version that the copy is; 0 before the first."""
        return 0 if self._name is None else self._name.version

    @property
    def copy(self) -> nnx.Module:
        """The copy that takes over versions."""
        return self._copy

    def has_new(self) -> bool:
        """Return whether there is a version that the copy is not; nothing is read but names.

        Raises:
            OSError: The folder cannot be read.
        """
        names = self._names()
        return bool(names) and names[-1] != self._name

    @contextlib.contextmanager
    def into(self, staged: nnx.Module) -> Iterator[None]:
        """Let `update` change another copy, which has the version of the copy, in a context.

        For a copy that other threads read: its variables are replaced by those of the other copy
        before the context ends. If an error ends it, the version is the one before.

        Args:
            staged: The other copy.
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

        Versions are taken over in order, each after all its files are compared with their
        checksums. If a version is missing or damaged, the next full version takes its place. Call
        it in the thread that uses the copy, between two batches; with several processes in each of
        them: each reads the files.

        Returns:
            The number of versions that were taken over; 0 if there is no new one.

        Raises:
            VersionError: A version is damaged or missing, and no full one takes its place. The
                copy stays at the last version that was whole. Only where a file was removed while
                it was read, the copy holds rows of two versions until an `update` succeeds.
            ValueError: A version is of another model, or does not fit the copy.
            OSError: A file cannot be read. If that is in the middle of a version, the next `update`
                takes the version over again.
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
        newer = [name for name in names if 0 < self.version < name.version]
        count = 0
        damage: VersionError | None = None
        try:
            for name in newer:
                self._take_over(name, is_full=False)
                count += 1
            if newer:
                return count
        except VersionError as error:
            damage = error
        # Without its version there, the copy may begin with any: the folder may be another one.
        first = self.version if self._name in names else 0
        for start in self._full_versions(names, first):
            reached = self._name
            try:
                self._take_over(names[start], is_full=True)
                for name in names[start + 1 :]:
                    self._take_over(name, is_full=False)
                return count + len(names) - start
            except VersionError as error:
                damage = error if damage is None else damage
                if self._name != reached:
                    break
        raise VersionError(
            f"{damage or f'{self._folder}: there is no full version to begin with'}; publish a "
            "full version, by jaxrec.tier.publish with full_every=1"
        )

    def _full_versions(self, names: Sequence[VersionName], after: int) -> Iterator[int]:
        """Iterate over the indices of full versions after one, the newest first."""
        for index in reversed(range(len(names))):
            if names[index].version <= after:
                return
            with contextlib.suppress(VersionError):
                if self._folder.read_manifest(names[index]).full is not None:
                    yield index

    def _take_over(self, name: VersionName, is_full: bool) -> None:
        """Check a version, and bring the copy from the version before, or from any, to it.

        Raises:
            VersionError: It is damaged, or it does not follow the version of the copy.
            ValueError: It is of another model.
        """
        with contextlib.ExitStack() as stack:
            tier = tier_of(self._copy)
            if tier is not None:
                stack.enter_context(tier.settled(self._copy))
            tables = published_tables(self._copy)
            incoming, error = None, None
            try:
                incoming = self._checked(name, is_full, tables)
            except (ValueError, OSError) as raised:
                error = raised
            raise_together(error, _KINDS)
            assert incoming is not None
            files, facts, values = incoming.files, incoming.manifest.tables, incoming.dense
            try:
                for table_name, table in tables.items():
                    self._load(table, files.get(table_name, {}), facts[table_name], is_full)
            except VersionError as error:
                # Removed since it was checked. The other processes are at other rows by now, and
                # cannot begin another version together with this one.
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
        if is_full and (facts.is_open or facts.seed is not None):
            assert not isinstance(facts.seed, int)  # `check_tables` refuses it
            table.forget_others(self._ids(files.get(ROWS)), facts.seed)
        table.forget(self._ids(files.get(REMOVED)))
        for ids, values in self._rows(files.get(ROWS), table):
            table.write(ids, values)
        for rows, values in self._rows(files.get(UNKNOWN), table):
            table.write_rows(rows, values)

    def _checked(
        self, name: VersionName, is_full: bool, tables: dict[str, PublishedTable]
    ) -> _Incoming:
        manifest = self._folder.read_manifest(name)
        files = manifest.full if is_full else manifest.delta
        if files is None or not (is_full or manifest.base == self._token):
            raise VersionError(
                f"{self._folder}: version {name.version} does not follow version {self.version}, "
                "which the copy is: versions between them are missing, or the publisher was "
                "started again"
            )
        check_tables(tables, manifest.tables, self._with_state)
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
            if shortage := table.find_shortage(self._ids(of_table.get(ROWS)), removed):
                raise ValueError(
                    f"{self._folder}: version {name.version} does not fit table {table_name!r}: "
                    f"{shortage}"
                )
        with self._folder.reading(manifest.dense) as source:
            dense = read_arrays(source)
        check_dense(self._copy, dense)
        return _Incoming(manifest, files, dense)

    def _rows(
        self, file: File | None, table: PublishedTable
    ) -> Iterator[tuple[np.ndarray, Values]]:
        if file is not None:
            with self._folder.reading(file) as source:
                yield from read_rows(source, table.shapes(self._with_state))

    def _ids(self, file: File | None) -> np.ndarray:
        """Return all ids of a file; none without a file."""
        if file is None:
            return np.zeros(0, np.int64)
        with self._folder.reading(file) as source:
            parts = [ids for ids, _ in read_rows(source, {})]
            return np.concatenate([np.zeros(0, np.int64), *parts])

    def _check_ids(self, file: File, kind: str, facts: TableFacts) -> None:
        """Raise a VersionError where a file has ids that its table cannot have."""
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

    @property
    def _token(self) -> str:
        return "" if self._name is None else self._name.token


@dataclasses.dataclass(frozen=True)
class _Incoming:
    """A version that was checked.

    Attributes:
        manifest: Its manifest.
        files: Files of its tables, of the delta or of all rows.
        dense: Its other variables.
    """

    manifest: Manifest
    files: Files
    dense: dict[str, np.ndarray]
