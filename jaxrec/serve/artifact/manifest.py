"""Content of an exported model's manifest, a JSON file.

A manifest is data until `Manifest.check` has compared its entries: every name, size and shape that
code later relies on is bounded here.
"""

from __future__ import annotations

import math
import pathlib

import jax.numpy as jnp
import msgspec
import numpy as np

from jaxrec.embed.formats import FORMATS
from jaxrec.files.manifest import StoredFile, seal, unseal
from jaxrec.serve.artifact.batch_spec import ArrayInput, ArrayOutput, BatchSpec, Structure
from jaxrec.serve.artifact.ranker_spec import RankerProgram, RankerSpec

FORMAT = "jaxrec model 1"
MANIFEST_FILE = "manifest.json"

# Folder of the encoder of raw columns.
FEATURES_DIRECTORY = "features"

# Largest number of samples or ids of a batch (int32), and of elements of an array (256 TiB of
# float32).
_MOST = 2**31 - 1
_MOST_ELEMENTS = 1 << 46


class ArtifactError(ValueError):
    """An exported model is missing, damaged, or cannot run here; the message names the file."""


class StoredArray(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An array that the programs take beside the batch.

    Attributes:
        name: Path of the variable in the model; for a table's array, the path of the collection
            and the name of the group.
        file: npy file of the array. Types that NumPy lacks are stored as unsigned integers.
        dtype: Type of the elements, such as "bfloat16".
        shape: Shape of the array.
        is_mapped: Whether the file is mapped into memory instead of read.
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    is_mapped: bool = False


def stored_dtype(dtype: str) -> np.dtype:
    """Return the type of an npy file's elements: unsigned integers for types that NumPy lacks."""
    # npy files name a type by its NumPy descriptor, which bfloat16 and float8 do not have.
    kind = jnp.dtype(dtype)
    return kind if kind.isbuiltin == 1 else np.dtype(f"uint{8 * kind.itemsize}")


class StoredTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table, and the rows that it has in an array.

    Attributes:
        name: Name of the table.
        collection: Path of the table's collection in the model.
        array: Name of the `StoredArray` that holds the rows.
        first_row: First row of the table in that array.
        num_embeddings: Number of rows.
        embedding_dim: Number of columns, unpacked.
        row_format: Format of a stored row, such as "int8"; see `jaxrec.serve.pack_rows`.
        pooling: "sum" or "mean"; None: rows are looked up one by one.
        feature_names: Features that read the table.
    """

    name: str
    collection: str
    array: str
    first_row: int
    num_embeddings: int
    embedding_dim: int
    row_format: str
    pooling: str | None
    feature_names: tuple[str, ...]

    @property
    def path(self) -> str:
        """Path of the collection, and the table's name."""
        return f"{self.collection}/{self.name}" if self.collection else self.name

    @property
    def row_map(self) -> str:
        """Path of the table's `RowMap` among the arrays; only pruned tables have one."""
        return f"{self.collection}/row_maps/{self.name}".removeprefix("/")


class Program(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model for one platform and batch size, as `jax.export` writes it.

    The arguments are the arrays of the manifest and then those of the batch, in order.

    Attributes:
        platform: "cpu" or "cuda".
        samples: The batch size.
        file: File of the program.
        targets: Functions of jaxrec's native library that the program calls.
        stablehlo: File with the program alone, a portable StableHLO artifact, for runtimes other
            than JAX; None: exported by an earlier jaxrec.
    """

    platform: str
    samples: int
    file: str
    targets: tuple[str, ...]
    stablehlo: str | None = None


class DenseEncoding(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Encoding of a column of numbers, of vectors, or of a part of times.

    Attributes:
        name: Name of the column.
        transform: As in `jaxrec.data.DenseColumn`.
        missing: As in `jaxrec.data.DenseColumn`.
        is_boolean: Whether the values are true and false.
        width: As in `jaxrec.data.DenseColumn`.
        part: As in `jaxrec.data.DenseColumn`, in UTC.
        since: As in `jaxrec.data.DenseColumn`.
        origin: Time in microseconds since 1970 from which an age without ``since`` counts.
    """

    name: str
    transform: str
    missing: str
    is_boolean: bool = False
    width: int | None = None
    part: str | None = None
    since: str | None = None
    origin: int = 0


class VocabularyFiles(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Files of a vocabulary of ``size`` values.

    Attributes:
        is_integer: Whether the values are integers, else strings of bytes.
        num_unknown: Number of rows for unknown values, before those of known ones.
        seed: Seed of the hashes.
        hashes: uint64 ``[size]`` hashes, ascending.
        places: int32 ``[size]``, position of each hash's value.
        values: int64 ``[size]`` integers, or uint8 ``[bytes]`` of all strings.
        offsets: int64 ``[size + 1]`` offsets of the strings; None: integers.
    """

    is_integer: bool
    num_unknown: int
    seed: int
    hashes: str
    places: str
    values: str
    offsets: str | None


class CategoricalEncoding(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Encoding of a column of strings or ids.

    Attributes:
        name: Name of the column.
        encoding: "vocabulary", "hash", "ids", "modulo" or "frozen", as in
            `jaxrec.data.CategoricalColumn`.
        num_embeddings: Number of rows of the table.
        refuses_null: Whether a null is an error.
        is_list: Whether each sample has a list.
        vocabulary: Files of the vocabulary, if there is one.
        ids: File of the int64 ``[size]`` raw ids of encoding "frozen", ascending. The first has row
            1; other ids have row 0.
        is_boolean: Whether the values are true and false.
        is_text: Whether the values of encodings "hash" and "frozen" are text, else integers; None:
            not known, as in models that earlier versions exported.
        part: As in `jaxrec.data.CategoricalColumn`, in UTC.
    """

    name: str
    encoding: str
    num_embeddings: int
    refuses_null: bool
    is_list: bool
    vocabulary: VocabularyFiles | None
    ids: str | None = None
    is_boolean: bool = False
    is_text: bool | None = None
    part: str | None = None


class ColumnEncoding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Encoding of raw columns.

    Attributes:
        dense: Columns of numbers, in the order of the dense features.
        categorical: The other columns.
        moments: File of float64 ``[dense, 2]``, mean and standard deviation of each dense column.
    """

    dense: tuple[DenseEncoding, ...]
    categorical: tuple[CategoricalEncoding, ...]
    moments: str

    @property
    def files(self) -> list[str]:
        """Paths of all files."""
        files: list[str | None] = [self.moments]
        for column in self.categorical:
            if (each := column.vocabulary) is not None:
                files += [each.hashes, each.places, each.values, each.offsets]
            files.append(column.ids)
        return [file for file in files if file is not None]


# Unknown fields are refused here and in all parts, not ignored: a later version may have added one
# that changes the meaning of the others. Fields that were added since have defaults, so that
# exports of earlier versions load.
class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Contents of an exported model: inputs, outputs, programs, tables and files.

    Attributes:
        jaxrec: Version of jaxrec that exported the model.
        jax: Version of JAX that exported the model.
        batch: Batches that the model takes.
        output_structure: Nesting of the outputs.
        outputs: Outputs, in the order of the structure's leaves.
        arrays: Arrays that the programs take beside the batch.
        tables: Tables in these arrays.
        programs: Programs, one for each platform and batch size.
        has_encoder: Whether ``features/`` holds the `jaxrec.data.TableEncoder` of raw columns.
        files: Every file but the manifest, by its path.
        encoding: Encoder in files that C++ reads; None: there is none, C++ cannot encode the
            columns, or an earlier jaxrec exported the model.
        no_encoding: Why C++ cannot encode the columns, if it cannot.
        ranker: Programs of an `HSTURanker`, which then has no others; None: another model.
    """

    jaxrec: str
    jax: str
    batch: BatchSpec
    output_structure: Structure
    outputs: tuple[ArrayOutput, ...]
    arrays: tuple[StoredArray, ...]
    tables: tuple[StoredTable, ...]
    programs: tuple[Program, ...]
    has_encoder: bool
    files: dict[str, StoredFile]
    encoding: ColumnEncoding | None = None
    no_encoding: str | None = None
    ranker: RankerSpec | None = None

    def to_json(self) -> bytes:
        """Return the text of ``manifest.json``, which ends with a checksum of the rest."""
        return seal({"format": FORMAT, **msgspec.to_builtins(self)}, is_hex=True)

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        """Read the text of ``manifest.json``; a ValueError says what is wrong with it."""
        content = unseal(text, FORMAT)
        try:
            manifest = msgspec.convert(content, cls)
        except msgspec.MsgspecError as error:
            raise ValueError(str(error)) from None
        manifest.check()
        return manifest

    def check(self) -> None:
        """Raise a ValueError where entries contradict each other or have impossible sizes."""
        used = [*(array.file for array in self.arrays), *(each.file for each in self.all_programs)]
        used += [each.stablehlo for each in self.all_programs if each.stablehlo is not None]
        used += [] if self.encoding is None else self.encoding.files
        if missing := [file for file in used if file not in self.files]:
            raise ValueError(f"it uses {missing[0]!r}, which is not among its files")
        for file, stored in self.files.items():
            # A manifest from elsewhere must not make `load` read files outside of the folder.
            if not file or file[0] == "/" or ".." in file.split("/") or "\0" in file:
                raise ValueError(f"it names the file {file!r}, outside of the model's folder")
            if stored.bytes < 0:
                raise ValueError(f"file {file!r} has {stored.bytes} bytes")
        for structure, listed, what in (
            (self.batch.structure, self.batch.inputs, "inputs"),
            (self.output_structure, self.outputs, "outputs"),
        ):
            if structure.num_leaves != len(listed):
                raise ValueError(
                    f"its structure has {structure.num_leaves} {what}, and it lists {len(listed)}"
                )
        self._check_arrays()
        self._check_tables()
        samples = [size.samples for size in self.batch.sizes]
        if not samples or samples != sorted(set(samples)) or samples[0] < 1:
            raise ValueError(f"its batch sizes are {samples}; they must ascend from 1 or more")
        for each in self.programs:
            if each.samples not in samples:
                raise ValueError(
                    f"{each.file} is for {each.samples} samples, but the batch sizes are {samples}"
                )
        self._check_capacities()
        if self.ranker is not None:
            if self.programs:
                raise ValueError("it has programs beside those of its ranker")
            self.ranker.check(self.batch)
        if samples[-1] * max((len(each.keys) for each in self.batch.ragged), default=1) > _MOST:
            raise ValueError(f"a batch of {samples[-1]} samples is too large")

    def _check_arrays(self) -> None:
        """Raise a ValueError where an array or feature has a type or size that no program takes."""
        inputs = [each for each in self.batch.inputs if isinstance(each, ArrayInput)]
        most = max((size.samples for size in self.batch.sizes), default=1)
        described: list[ArrayInput | ArrayOutput | StoredArray]
        described = [*inputs, *self.outputs, *self.arrays]
        described += [] if self.ranker is None else self.ranker.cache_arrays
        for each in described:
            samples = 1 if isinstance(each, StoredArray) else most
            try:
                # "V" is the kind of bfloat16 and float8.
                kind = jnp.dtype(each.dtype).kind
            except TypeError:
                kind = "O"
            if kind not in "biufcV":
                raise ValueError(f"{each.name} is of {each.dtype!r}, which is no type of arrays")
            if min(each.shape, default=0) < 0 or samples * math.prod(each.shape) > _MOST_ELEMENTS:
                raise ValueError(f"{each.name} has the shape {list(each.shape)}")
        names = [array.name for array in self.arrays]
        if len(set(names)) < len(names):
            raise ValueError(f"it names the array {max(names, key=names.count)!r} twice")
        for ragged in self.batch.ragged:
            if len(set(ragged.keys)) < len(ragged.keys):
                raise ValueError(f"{ragged.name} has a feature twice")
            for feature in ragged.features:
                num_ids = 1 if feature.num_ids is None else feature.num_ids
                if not 1 <= num_ids <= _MOST + 1 or (feature.fixed or 0) < 0:
                    raise ValueError(
                        f"feature {feature.name!r} has {feature.num_ids} ids, "
                        f"{feature.fixed} in each sample"
                    )

    def _check_tables(self) -> None:
        """Raise a ValueError where a table's rows are not in the array that it names."""
        arrays = {each.name: each for each in self.arrays}
        for table in self.tables:
            array = arrays.get(table.array)
            if array is None or table.row_format not in FORMATS:
                raise ValueError(
                    f"table {table.name!r} has rows of {table.row_format!r} in the array "
                    f"{table.array!r}; there is no such format, or no such array"
                )
            rows, is_pruned = array.shape[:1], f"{table.row_map}/kept" in arrays
            # A pruned table has fewer rows than ids; the map of rows to keep says how many.
            last = table.first_row + (0 if is_pruned else table.num_embeddings)
            if not rows or not 0 <= table.first_row <= last <= rows[0] or table.embedding_dim < 1:
                raise ValueError(
                    f"table {table.name!r} has {table.num_embeddings} rows from {table.first_row} "
                    f"on, but its array has the shape {list(array.shape)}"
                )

    def _check_capacities(self) -> None:
        """Raise a ValueError where a batch size has no capacity for each feature."""
        ragged = self.batch.ragged
        for size in self.batch.sizes:
            if len(ragged) != (count := len(size.capacities)):
                raise ValueError(f"capacities of {count} inputs, but {len(ragged)} are ragged")
            for each, capacities in zip(ragged, size.capacities, strict=True):
                if len(each.keys) != len(capacities):
                    raise ValueError(f"{len(capacities)} capacities for {len(each.keys)} features")
                # Offsets of a batch's ids are int32, so their sum must fit as well.
                if any(not 0 <= x <= _MOST for x in capacities) or sum(capacities) > _MOST:
                    raise ValueError(f"capacities of {list(capacities)} ids; they must fit int32")

    def platforms(self) -> tuple[str, ...]:
        """Return the platforms that there are programs for."""
        return tuple(dict.fromkeys(each.platform for each in self.all_programs))

    @property
    def all_programs(self) -> list[Program | RankerProgram]:
        """Programs of the model, or of the ranker."""
        return [*self.programs, *(() if self.ranker is None else self.ranker.programs)]


def read_manifest(directory: pathlib.Path) -> Manifest:
    """Read the manifest of an exported model."""
    path = directory / MANIFEST_FILE
    try:
        return Manifest.from_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise ArtifactError(
            f"{directory} is not an exported model: {MANIFEST_FILE} is missing; jaxrec export and "
            "jaxrec.serve.export write one"
        ) from None
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise ArtifactError(f"{path} cannot be used: {error or type(error).__name__}") from None
