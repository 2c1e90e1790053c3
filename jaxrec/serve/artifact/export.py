"""Export of models: programs for a ladder of batch sizes, and their arrays beside them."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.export import Exported

from jaxrec.data import TableEncoder
from jaxrec.files.atomic import write_atomically
from jaxrec.serve.artifact.column_files import write_columns
from jaxrec.serve.artifact.files import describe_files, write_array, write_rows
from jaxrec.serve.artifact.inputs import batch_spec
from jaxrec.serve.artifact.manifest import (
    MANIFEST_FILE,
    Manifest,
    Program,
    StoredArray,
)
from jaxrec.serve.artifact.programs import KERNELS, export_programs, native_targets
from jaxrec.serve.artifact.pure_model import PureModel

BATCH_SIZES = (1, 4, 16, 64, 256, 1024, 4096)

FEATURES_DIRECTORY = "features"


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

    `load` predicts batches of any size. It cuts and pads them to the sizes here.

    Args:
        model: A model with tables on one device or over a mesh, quantized or not. The programs
            compute what ``function`` returns of the model in evaluation mode.
        path: The folder. An exported model that is there already is replaced.
        example: A batch of some samples as ``function`` takes it: a tuple of its arguments, or the
            only argument. It says which inputs there are, their types, and how many ids a sample
            has of each feature. Inputs are arrays with a leading batch axis and
            `KeyedJaggedArray`s, alone or in dicts, lists and tuples. None: the arguments are
            ``(features)`` with all features of the model's tables, or ``(dense, features)`` for a
            model with ``num_dense``, or as ``encoder`` makes them.
        function: A function of the model and the arguments of a batch, such as
            ``lambda model, features: model.query(features)``; None: the model's call. It returns
            arrays with a leading batch axis, alone or in dicts, lists and tuples.
        encoder: Encoder of raw columns that the model was trained with. `load` then takes columns
            too. The arguments are its ``dense`` and ``features``; no example is given then.
        batch_sizes: Numbers of samples that programs are made for.
        ids_per_sample: Mean number of ids of a sample that capacities are made for, for all
            features or by name. None: as in the example with a margin, by the encoder, or 8. Where
            the ids of a batch exceed a capacity, `load` predicts fewer samples at a time. A
            feature of a per-id collection with equally many ids in each sample of the example, and
            no spare capacity, has this number in each sample of every batch, since models may
            reshape its rows; a feature named here may have any number.
        platforms: "cpu" and "cuda". Programs for GPUs need no GPU here; their lookups are XLA's.

    Raises:
        TypeError: The model is not an `nnx.Module`, a table has an open vocabulary or a cache
            (`jaxrec.tier`), or an input or an output is of a type that programs do not have.
        ValueError: The inputs do not follow from the arguments; an output has no batch axis; a
            platform or a batch size is unknown; or the program calls something that has no
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
    _check_path(path)
    _check_platforms(platforms)
    if function is None:
        function = _call
    pure = PureModel.of(model, function)
    signature = type(model).__call__ if function is _call else function
    example = example if example is None or isinstance(example, tuple) else (example,)
    batch = batch_spec(model, signature, example, encoder, batch_sizes, ids_per_sample)
    made = export_programs(pure, batch, platforms)
    with write_atomically(path) as unfinished:
        programs = _write_programs(unfinished, made.programs)
        arrays = _write_arrays(unfinished, pure, made.arrays)
        encoding = None
        if encoder is not None:
            encoder.save(unfinished / FEATURES_DIRECTORY)
            encoding = write_columns(unfinished, encoder)
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
        )
        manifest.check()
        (unfinished / MANIFEST_FILE).write_bytes(manifest.to_json())


def _call(model: nnx.Module, *batch: Any) -> Any:
    return model(*batch)


def _check_path(path: pathlib.Path) -> None:
    if path.exists() and not (path / MANIFEST_FILE).is_file():
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


def _write_programs(
    directory: pathlib.Path, exported: Mapping[tuple[str, int], Exported]
) -> tuple[Program, ...]:
    (directory / "programs").mkdir(parents=True)
    programs = []
    for (platform, samples), program in exported.items():
        file = f"programs/{platform}-{samples}.jax"
        stablehlo = f"programs/{platform}-{samples}.mlirbc"
        (directory / file).write_bytes(program.serialize())
        (directory / stablehlo).write_bytes(program.mlir_module_serialized)
        programs.append(Program(platform, samples, file, native_targets(program), stablehlo))
    return tuple(programs)


def _write_arrays(
    directory: pathlib.Path, pure: PureModel, names: Sequence[str]
) -> tuple[StoredArray, ...]:
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
