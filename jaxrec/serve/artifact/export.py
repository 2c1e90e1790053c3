"""Export of models: programs for a ladder of batch sizes, and their arrays beside them."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import pyarrow as pa
from flax import nnx
from jax.export import Exported

from jaxrec.data import Schema, TableEncoder, Vocabulary
from jaxrec.data.encode import Moments, is_boolean
from jaxrec.data.times import microseconds
from jaxrec.data.vocabulary import FrozenVocabulary
from jaxrec.files.atomic import write_atomically
from jaxrec.files.manifest import describe_files
from jaxrec.serve.artifact.inputs import batch_spec
from jaxrec.serve.artifact.manifest import (
    FEATURES_DIRECTORY,
    MANIFEST_FILE,
    CategoricalEncoding,
    ColumnEncoding,
    DenseEncoding,
    Manifest,
    Program,
    StoredArray,
    VocabularyFiles,
    stored_dtype,
)
from jaxrec.serve.artifact.programs import KERNELS, export_programs, native_targets
from jaxrec.serve.artifact.pure_model import PureModel

BATCH_SIZES = (1, 4, 16, 64, 256, 1024, 4096)

# Folder of the encoder in npy files, which C++ reads without Parquet and YAML.
COLUMNS_DIRECTORY = "columns"


def export(
    model: nnx.Module,
    path: str | os.PathLike[str],
    *,
    example: Any = None,
    function: Callable[..., Any] | None = None,
    encoder: TableEncoder | None = None,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    ids_per_sample: float | Mapping[str, float] | None = None,
    platforms: Sequence[str] = ("cpu", "cuda"),
) -> None:
    """Write a model to a folder, from which `load` predicts without the model's code.

    The folder holds a StableHLO program for each platform and batch size, the tables and the other
    variables as npy files, the encoder of raw columns if there is one, and ``manifest.json``, which
    describes them. It appears when it is complete. Tables keep their type: those of
    `jaxrec.serve.quantize` stay quantized. Optimizer state is left out.

    `load` predicts batches of any size. It cuts and pads them to ``batch_sizes``.

    Args:
        model: A model with tables on one device or over a mesh, quantized or not. The programs
            compute ``function`` of the model in evaluation mode.
        path: The folder. An exported model that is there already is replaced.
        example: A batch of some samples as ``function`` takes it: a tuple of its arguments, or the
            only argument. It gives the inputs, their types, and the number of ids that a sample has
            of each feature. Inputs are arrays with a leading batch axis and `KeyedJaggedArray`s,
            alone or in dicts, lists and tuples. None: the arguments are ``(features)`` with all
            features of the model's tables, or ``(dense, features)`` for a model with ``num_dense``,
            or as ``encoder`` makes them.
        function: A function of the model and the arguments of a batch, such as
            ``lambda model, features: model.query(features)``; None: the model's call. It returns
            arrays with a leading batch axis, alone or in dicts, lists and tuples.
        encoder: Encoder of raw columns that the model was trained with. `load` then takes columns
            too. The arguments are its ``dense`` and ``features``, and ``example`` must be None.
        batch_sizes: Numbers of samples that programs are made for.
        ids_per_sample: Mean number of ids of a sample that capacities are made for, for all
            features or by name. None: as in the example with a margin, by the encoder, or 8. Where
            the ids of a batch exceed a capacity, `load` predicts fewer samples at a time. A feature
            of a per-id collection is fixed if the example has equally many ids in each sample and
            no spare capacity: every later sample must have this number, since models may reshape
            the feature's rows. A feature that is named here may have any number.
        platforms: "cpu" and "cuda". Programs for GPUs need no GPU here; their lookups are XLA's.

    Raises:
        TypeError: The model is not an `nnx.Module`, a table has an open vocabulary or a cache
            (`jaxrec.tier`), or an input or an output is of a type that programs do not have.
        ValueError: The inputs do not follow from the arguments; an output has no batch axis; a
            platform or a batch size is unknown; or the program calls a function that has no
            guarantee to run with later versions.
        FileExistsError: The path is a file, or a folder that is not an exported model.
        OSError: The folder cannot be written.

    Example:
        >>> import tempfile
        >>> import jaxrec
        >>> config = jaxrec.EmbeddingBagConfig("user", num_embeddings=100, embedding_dim=8)
        >>> model = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
        >>> path = pathlib.Path(tempfile.mkdtemp(), "model")
        >>> export(model, path, batch_sizes=(1, 16), platforms=("cpu",))
        >>> batch = jaxrec.KeyedJaggedArray.from_lists({"user": [[3, 5], [], [7]]})
        >>> scores = jaxrec.serve.load(path).predict(batch)
        >>> bool((scores["user"] == model(batch)["user"]).all())
        True
    """
    path = pathlib.Path(path)
    check_target(path, platforms)
    pure = PureModel.of(model, _call if function is None else function)
    signature = type(model).__call__ if function is None else function
    example = example if example is None or isinstance(example, tuple) else (example,)
    batch = batch_spec(model, signature, example, encoder, batch_sizes, ids_per_sample)
    # Programs first: most models that cannot be exported fail here, before tables are written.
    made = export_programs(pure, batch, platforms)
    with write_atomically(path) as unfinished:
        programs = tuple(
            Program(platform, samples, *write_program(unfinished, f"{platform}-{samples}", program))
            for (platform, samples), program in made.programs.items()
        )
        arrays = write_arrays(unfinished, pure, made.arrays)
        encoding, no_encoding = None, None
        if encoder is not None:
            encoder.save(unfinished / FEATURES_DIRECTORY)
            no_encoding = refuse_columns(encoder.schema)
            encoding = None if no_encoding else write_columns(unfinished, encoder)
        manifest = Manifest(
            jaxrec=importlib.metadata.version("jaxrec"),
            jax=jax.__version__,
            batch=batch,
            output_structure=made.outputs.structure,
            outputs=made.outputs.arrays,
            arrays=arrays,
            tables=tuple(table for table in pure.tables() if table.array in made.arrays),
            programs=programs,
            has_encoder=encoder is not None,
            files=describe_files(unfinished),
            encoding=encoding,
            no_encoding=no_encoding,
        )
        # As `load` will check it, so that no folder appears that cannot be loaded.
        manifest.check()
        (unfinished / MANIFEST_FILE).write_bytes(manifest.to_json())


def _call(model: nnx.Module, *batch: Any) -> Any:
    return model(*batch)


def check_target(path: pathlib.Path, platforms: Sequence[str]) -> None:
    """Refuse a path that may not be replaced, and unknown platforms."""
    _check_platforms(platforms)
    if path.exists() and not (path / MANIFEST_FILE).is_file():
        # An empty folder may be replaced: users make one beforehand.
        if path.is_dir() and not any(path.iterdir()):
            return
        raise FileExistsError(
            f"{path} exists and is not an exported model; give another path, or remove it"
        )


def _check_platforms(platforms: Sequence[str]) -> None:
    if isinstance(platforms, str) or not platforms:
        raise ValueError(f"platforms are some of {', '.join(KERNELS)}, got {platforms!r}")
    for platform in platforms:
        if platform not in KERNELS:
            raise ValueError(f"platform {platform!r} is not one of {', '.join(map(repr, KERNELS))}")


def write_program(
    directory: pathlib.Path, name: str, program: Exported
) -> tuple[str, tuple[str, ...], str]:
    """Write a program's two files; return a manifest's ``file``, ``targets`` and ``stablehlo``."""
    targets = native_targets(program)
    (directory / "programs").mkdir(parents=True, exist_ok=True)
    file, stablehlo = f"programs/{name}.jax", f"programs/{name}.mlirbc"
    (directory / file).write_bytes(program.serialize())
    # The same program twice: jax.export's file for `load`, and plain StableHLO for the C++
    # runtime.
    (directory / stablehlo).write_bytes(program.mlir_module_serialized)
    return file, targets, stablehlo


def write_arrays(
    directory: pathlib.Path, pure: PureModel, names: Sequence[str]
) -> tuple[StoredArray, ...]:
    """Write arrays of a model to npy files; return the manifest's entries."""
    for kind in ("tables", "dense"):
        (directory / kind).mkdir()
    stored: list[StoredArray] = []
    for name in names:
        shape, dtype = pure.shapes[name].shape, pure.shapes[name].dtype.name
        is_table = name in pure.table_shapes
        file = f"{'tables' if is_table else 'dense'}/{len(stored)}.npy"
        if is_table:
            write_rows(directory / file, shape, dtype, pure.table_parts(name))
        else:
            write_array(directory / file, pure.dense[name])
        stored.append(StoredArray(name, file, dtype, shape, is_mapped=is_table))
    return tuple(stored)


def write_array(path: pathlib.Path, array: np.ndarray) -> None:
    """Write an array from memory to an npy file, in the type that `stored_dtype` gives."""
    np.save(path, np.asarray(array, order="C").view(stored_dtype(array.dtype.name)))


def write_rows(
    path: pathlib.Path, shape: tuple[int, ...], dtype: str, parts: Iterable[tuple[int, np.ndarray]]
) -> None:
    """Write an npy file from ``parts`` of the array: pairs of a first row's index and the rows.

    Rows that no part has are zeros.
    """
    # An empty file cannot be mapped.
    if 0 in shape:
        np.save(path, np.zeros(shape, stored_dtype(dtype)))
        return
    # Into a mapped file, so that a table need not be in memory.
    rows = np.lib.format.open_memmap(path, "w+", stored_dtype(dtype), shape)
    for first, part in parts:
        rows[first : first + len(part)] = part.view(stored_dtype(dtype))
    rows.flush()


def refuse_columns(schema: Schema) -> str | None:
    """Return why a C++ server cannot encode the raw columns of a schema; None: it can."""
    zones = {name: x.zone for name, _, x in schema.parts if x.zone not in (None, "UTC")}
    if not zones:
        return None
    named = ", ".join(f"{name} ({zone})" for name, zone in zones.items())
    return (
        f"C++ encodes parts of times in UTC alone, not {named}; serve the model by jaxrec serve, "
        "send encoded features to C++, or train with zone: UTC or without these columns"
    )


def write_columns(directory: pathlib.Path, encoder: TableEncoder) -> ColumnEncoding:
    """Write an encoder's moments and vocabularies to npy files in ``columns/``; describe them.

    The encoder must not have columns of encoding "dynamic".
    """
    (directory / COLUMNS_DIRECTORY).mkdir()
    moments = [encoder.moments.get(name, Moments()) for name in encoder.schema.dense]
    numbers = np.array([(each.mean, each.scale) for each in moments], np.float64).reshape(-1, 2)
    file = _write_column(directory, "moments", numbers)
    rows = encoder.table_rows
    categorical = [
        CategoricalEncoding(
            name,
            options.encoding,
            rows[name],
            options.missing == "error",
            name in encoder.lengths,
            vocabulary=_write_vocabulary(directory, number, vocabulary)
            if isinstance(vocabulary := encoder.vocabularies.get(name), Vocabulary)
            else None,
            ids=_write_column(directory, f"{number}.ids", vocabulary.ids)
            if isinstance(vocabulary, FrozenVocabulary)
            else None,
            is_boolean=is_boolean(encoder.example, name),
            is_text=encoder.is_text.get(name),
            part=options.part,
        )
        for number, (name, options) in enumerate(encoder.schema.categorical.items())
    ]
    dense = [
        DenseEncoding(
            name,
            options.transform,
            options.missing,
            is_boolean(encoder.example, name),
            options.width,
            options.part,
            options.since,
            microseconds(each.smallest or 0.0) if options.is_from_earliest else 0,
        )
        for (name, options), each in zip(encoder.schema.dense.items(), moments, strict=True)
    ]
    return ColumnEncoding(tuple(dense), tuple(categorical), file)


def _write_column(directory: pathlib.Path, name: str, array: np.ndarray) -> str:
    """Write an array to ``columns/``, and return the file's path in the model's folder."""
    file = f"{COLUMNS_DIRECTORY}/{name}.npy"
    write_array(directory / file, array)
    return file


def _write_vocabulary(
    directory: pathlib.Path, number: int, vocabulary: Vocabulary
) -> VocabularyFiles:
    index = vocabulary.index
    arrays = {"hashes": index.hashes, "places": index.positions.astype(np.int32)}
    is_integer = pa.types.is_integer(vocabulary.values.type)
    if is_integer:
        arrays["values"] = vocabulary.values.to_numpy()
    else:
        arrays["values"], arrays["offsets"] = _strings(vocabulary.values)
    files: dict[str, Any] = {
        name: _write_column(directory, f"{number}.{name}", array) for name, array in arrays.items()
    }
    return VocabularyFiles(
        is_integer, vocabulary.num_unknown, index.seed, **{"offsets": None, **files}
    )


def _strings(values: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return all strings as uint8 ``[bytes]``, and int64 ``[strings + 1]`` offsets into them."""
    if not len(values):
        return np.empty(0, np.uint8), np.zeros(1, np.int64)
    _, offsets, data = values.cast(pa.large_binary()).buffers()
    # An Arrow array may be a slice of larger buffers, so begin at its own offset.
    starts = np.frombuffer(offsets, np.int64)[values.offset :][: len(values) + 1]
    content = np.frombuffer(data or b"", np.uint8)[starts[0] : starts[-1]]
    return content, starts - starts[0]
