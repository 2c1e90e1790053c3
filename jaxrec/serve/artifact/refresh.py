"""Published versions of a model, applied to an exported model while it predicts."""

from __future__ import annotations

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, Shaped

from jaxrec.embed.formats import FORMATS, RowFormat, check_rows
from jaxrec.files.rows import read_arrays, read_rows
from jaxrec.serve.artifact.manifest import StoredTable
from jaxrec.serve.artifact.served import ServedArtifact
from jaxrec.serve.quantized.pruned_tables import RowMap
from jaxrec.tier import VersionError
from jaxrec.tier.deltas.folder import Chain, Follower
from jaxrec.tier.deltas.manifest import ROWS, Files, Manifest

# Number of rows that are packed and written by one call of a compiled function.
_PART = 1 << 12


class Refresher(Follower):
    """Brings an exported model to the versions that `jaxrec.tier.publish` wrote.

    The folder's versions are of the model that was exported, with tables of the same sizes. The
    exported tables may be quantized or pruned, and may be some of the published ones. Memory holds
    the tables twice during an update.
    """

    def __init__(self, served: ServedArtifact, url: str | os.PathLike[str]) -> None:
        super().__init__(url)
        self._served = served

    def update(self) -> int:
        """Bring the model to the newest version; return the number of versions that were applied.

        Deltas are applied in order. If one is missing or damaged, or the model has no version yet,
        the newest whole full version and the deltas after it are applied. An error leaves the model
        as it was.
        """
        names = self._folder.names()
        if not names or names[-1] == self._name:
            return 0
        damage: VersionError | None = None
        for chain in self._chains(names):
            try:
                self._take_over(chain)
                return len(chain)
            except VersionError as error:
                # The first error is of the shortest way, which the user expects to work.
                damage = damage or error
        raise self._no_way(damage)

    def _take_over(self, chain: Chain) -> None:
        # Requests go on meanwhile and must not see half of a version. So the chain is applied to
        # new arrays, and these replace the old ones in one assignment.
        staged = _Staged(self._served)
        before = "" if self._name is None else self._name.token
        for name, is_full in chain:
            manifest, files = self._read_version(name, is_full, before)
            self._read(manifest, files, staged)
            before = name.token
        self._served.replace(staged.arrays, chain[-1][0].version)
        self._name = chain[-1][0]

    def _read(self, manifest: Manifest, files: Files, staged: _Staged) -> None:
        """Check the files of a version and stage their values."""
        for table in self._served.manifest.tables:
            self._check_table(manifest, table)
            if (file := files.get(table.path, {}).get(ROWS)) is not None:
                self._folder.check(file)
                facts = manifest.tables[table.path]
                shape = jax.ShapeDtypeStruct((0, facts.embedding_dim), jnp.dtype(facts.dtype))
                with self._folder.reading(file) as source:
                    for ids, values in read_rows(source, {"rows": shape}):
                        staged.write(table, ids, values["rows"])
        self._folder.check(manifest.dense)
        with self._folder.reading(manifest.dense) as source:
            arrays = read_arrays(source)
        staged.set_dense(arrays)

    def _check_table(self, manifest: Manifest, table: StoredTable) -> None:
        """Raise a ValueError if a version does not have the rows of an exported table."""
        facts = manifest.tables.get(table.path)
        if facts is None:
            raise ValueError(
                f"{self._folder}: version {manifest.version} has no table {table.path!r}, which "
                "the exported model has; publish the model that was exported"
            )
        published = [facts.num_embeddings, facts.embedding_dim]
        exported = [table.num_embeddings, table.embedding_dim]
        if facts.is_open:
            form = "an open vocabulary"
        elif facts.seed is not None:
            form = "a cache (jaxrec.tier.Cached)"
        elif published != exported:
            form = f"the shape {published}"
        else:
            return
        raise ValueError(
            f"{self._folder}: table {table.path!r} was published with {form}, but exported with "
            f"the shape {exported}; export the model that is published"
        )


class _Staged:
    """New values of a model's variables by name, which no request reads yet."""

    def __init__(self, served: ServedArtifact) -> None:
        self._served = served
        self._old = served.variables.arrays
        self._dense = [each.name for each in served.manifest.arrays if not each.is_mapped]
        self.arrays: dict[str, Array] = {}

    def write(self, table: StoredTable, ids: np.ndarray, rows: np.ndarray) -> None:
        """Set float rows ``[ids, dim]`` of a table by their ids, packed in the table's format."""
        row_format = FORMATS[table.row_format]
        is_outside = (ids < 0) | (ids >= table.num_embeddings)
        if is_outside.any():
            raise ValueError(
                f"table {table.name!r}: id {ids[is_outside][0]} is outside of the table"
            )
        check_rows(row_format, f"table {table.name!r}, given ", rows)
        slots = self._slots(table, ids)
        rows, slots = rows[slots >= 0], slots[slots >= 0]
        # Copied once and then updated in place; tables that a version leaves alone are not copied.
        if table.array not in self.arrays:
            self.arrays[table.array] = jnp.copy(self._old[table.array])
        for start in range(0, len(slots), _PART):
            part, places = rows[start : start + _PART], slots[start : start + _PART]
            # Padded to one length, so that one program serves all parts.
            missing = _PART - len(part)
            array = self.arrays[table.array]
            self.arrays[table.array] = _write(
                array,
                # A slot outside of the array is not written.
                np.pad(places, (0, missing), constant_values=array.shape[0]),
                np.pad(part, ((0, missing), (0, 0))),
                row_format=row_format,
            )

    def _slots(self, table: StoredTable, ids: np.ndarray) -> np.ndarray:
        """Return the int32 row of each id in the table's array, -1 for pruned ids."""
        if f"{table.row_map}/kept" not in self._old:
            return (ids + table.first_row).astype(np.int32)
        kept, before = (self._old[f"{table.row_map}/{name}"] for name in ("kept", "before"))
        num_rows = int(np.bitwise_count(np.asarray(kept)).sum())
        row_map = RowMap(kept, before, table.num_embeddings, num_rows)
        slots = row_map.find_on_host(ids)
        return np.where(slots == num_rows, -1, slots + table.first_row).astype(np.int32)

    def set_dense(self, published: dict[str, np.ndarray]) -> None:
        """Set the variables outside of tables, by name; all of them must be published."""
        for name in self._dense:
            old = self._old[name]
            if name not in published:
                raise ValueError(
                    f"variable {name!r} was not published; publish the model that was exported"
                )
            new = published[name]
            if (new.shape, new.dtype) != (old.shape, old.dtype):
                raise ValueError(
                    f"variable {name!r} was published as {new.dtype}{list(new.shape)}, but "
                    f"exported as {old.dtype}{list(old.shape)}; export the model that is published"
                )
            self.arrays[name] = jnp.array(new)


@functools.partial(jax.jit, static_argnames="row_format", donate_argnums=0)
def _write(
    array: Shaped[Array, "rows width"],
    slots: Int32[Array, " n"],
    rows: Float[Array, "n dim"],
    *,
    row_format: RowFormat,
) -> Shaped[Array, "rows width"]:
    """Pack rows and write them to slots of a table's array, which is donated."""
    packed = row_format.pack(rows).astype(array.dtype)
    return array.at[slots].set(packed, mode="drop")
