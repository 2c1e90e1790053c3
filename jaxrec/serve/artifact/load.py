"""Reading exported models, and predicting with them."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa

from jaxrec.data import TableEncoder
from jaxrec.embed.kernels import cpu, trial
from jaxrec.embed.kernels.native_call import exported_targets
from jaxrec.files.manifest import StoredFile, find_damage
from jaxrec.files.npz import read_header
from jaxrec.serve.artifact.batch_spec import ArrayInput, unflatten
from jaxrec.serve.artifact.manifest import (
    FEATURES_DIRECTORY,
    ArtifactError,
    Manifest,
    Program,
    StoredArray,
    read_manifest,
    stored_dtype,
)
from jaxrec.serve.artifact.program_file import read_program
from jaxrec.serve.artifact.requests import Request


@dataclasses.dataclass(frozen=True, eq=False)
class ServedVariables:
    """Variables of a served model by name, in the order of the programs' arguments.

    ``version`` is the number of the version of `jaxrec.tier.publish` that they have; 0: none, they
    are as they were exported.
    """

    arrays: Mapping[str, jax.Array]
    version: int = 0


class ServedModel:
    """A model that `load` read. Several threads may call it at once.

    Attributes:
        manifest: Description of the model: its inputs, outputs, tables and files.
        encoder: Encoder of raw columns; None if the model was exported without one.
        platform: Platform of its device, "cpu" or "cuda".
    """

    def __init__(self, directory: pathlib.Path, manifest: Manifest, device: jax.Device):
        self.manifest = manifest
        self.platform = _platform(device)
        self.encoder = _encoder(directory, manifest) if manifest.has_encoder else None
        self._device = device
        programs = {
            each.samples: each for each in manifest.programs if each.platform == self.platform
        }
        if set(programs) != {size.samples for size in manifest.batch.sizes}:
            raise ArtifactError(
                f"{directory} has programs for {', '.join(manifest.platforms())}, and this device "
                f"is {device.platform}; export the model with platforms=({self.platform!r},)"
            )
        for program in programs.values():
            _check_targets(directory, program)
        self._programs = {
            samples: read_program(directory, manifest, program)
            for samples, program in programs.items()
        }
        self._variables = ServedVariables(
            {
                stored.name: jax.device_put(
                    # An alias of the mapped file, where the CPU allows it: tables are neither read
                    # nor copied until rows are looked up.
                    read_array(directory, stored),
                    device,
                    may_alias=stored.is_mapped,
                )
                for stored in manifest.arrays
            }
        )
        self._compiled: dict[int, Callable[..., Any]] = {}
        self._lock = threading.Lock()

    @property
    def variables(self) -> ServedVariables:
        """The tables and other variables that `predict` reads now."""
        return self._variables

    def replace(self, arrays: Mapping[str, jax.Array], version: int) -> None:
        """Replace variables at once: each call of `predict` reads either all old or all new ones.

        Args:
            arrays: New values by the names of the manifest's arrays; others stay as they are.
            version: Number of their version, for `ServedVariables.version`.

        Raises:
            ValueError: The model has no array of a name, or one of another shape or type.
        """
        old = self._variables.arrays
        for name, array in arrays.items():
            if name not in old:
                raise ValueError(f"the model has no variable {name!r}")
            if (array.shape, array.dtype) != (old[name].shape, old[name].dtype):
                raise ValueError(
                    f"variable {name!r} is {old[name].dtype}{list(old[name].shape)}, got "
                    f"{array.dtype}{list(array.shape)}"
                )
        new = {name: jax.device_put(array, self._device) for name, array in arrays.items()}
        # One assignment, which Python makes at once; `predict_request` reads the attribute once.
        self._variables = ServedVariables({**old, **new}, version)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Numbers of samples that the model is compiled for."""
        return tuple(size.samples for size in self.manifest.batch.sizes)

    def predict(self, *batch: Any) -> Any:
        """Return the outputs for a batch of any number of samples.

        Args:
            *batch: The arguments that the model's function takes, on the host or a device: arrays
                and `KeyedJaggedArray`s. Features may be in any order, and others are ignored.

        Returns:
            NumPy arrays with a leading batch axis, nested as the model's function returns them.

        Raises:
            KeyError: The batch lacks a feature.
            TypeError: An argument is of another type.
            ValueError: An id is outside of its table (the message names the feature, the sample and
                the id), a sample has more ids than a batch holds, or shapes differ.
        """
        if len(batch) != len(self.manifest.batch.structure.parts):
            names = ", ".join(each.name for each in self.manifest.batch.inputs)
            raise TypeError(
                f"predict takes {len(self.manifest.batch.structure.parts)} arguments for {names}, "
                f"got {len(batch)}"
            )
        return self.predict_request(Request(self.manifest.batch, batch))

    def predict_request(self, request: Request, variables: ServedVariables | None = None) -> Any:
        """Return the outputs for a request, all by the same tables.

        Args:
            request: The samples.
            variables: The tables and other variables; None: the current ones.

        Raises:
            ValueError: As `predict`.
        """
        # Read once: `replace` may come between two chunks, and a request is of one version.
        arrays = (self._variables if variables is None else variables).arrays
        results = []
        for chunk in request.chunks():
            outputs = self._program(chunk.size.samples)(*arrays.values(), *chunk.arrays)
            # JAX runs the program while the next chunk is packed, so results are fetched after the
            # loop.
            results.append((chunk, outputs))
        leaves = []
        for index, output in enumerate(self.manifest.outputs):
            parts = [np.asarray(out[index])[: chunk.stop - chunk.start] for chunk, out in results]
            if not parts:
                parts = [np.zeros((0, *output.shape), jax.numpy.dtype(output.dtype))]
            leaves.append(parts[0] if len(parts) == 1 else np.concatenate(parts))
        return unflatten(self.manifest.output_structure, leaves)

    def predict_columns(self, table: pa.Table | Mapping[str, Any]) -> Any:
        """Return the outputs for rows of raw columns, encoded as in training.

        Args:
            table: The columns of the model's schema, as an Arrow table or by name: strings, ids,
                numbers, lists. Labels and weights are not needed.

        Returns:
            As `predict`.

        Raises:
            TypeError: The model was exported without an encoder.
            DataError: A column is missing or has an invalid value.
        """
        if self.encoder is None:
            raise TypeError(
                "the model was exported without an encoder of columns; call predict with the "
                "arguments of its function, or export it with encoder="
            )
        batch = self.encoder.batch(table)
        return self.predict(batch.dense, batch.features)

    def warm_up(self) -> None:
        """Compile the programs of all batch sizes; otherwise each compiles at its first use."""
        for size in self.manifest.batch.sizes:
            shapes = self.manifest.batch.shapes(size)
            batch = [np.zeros(each.shape, each.dtype) for each in shapes]
            jax.block_until_ready(
                self._program(size.samples)(*self._variables.arrays.values(), *batch)
            )

    def _program(self, samples: int) -> Callable[..., Any]:
        # Tested again under the lock, which threads take only until the program is there.
        if samples not in self._compiled:
            with self._lock:
                if samples not in self._compiled:
                    self._compiled[samples] = jax.jit(self._programs[samples].call)
        return self._compiled[samples]


def load(
    path: str | os.PathLike[str], *, device: jax.Device | None = None, verify: bool = True
) -> ServedModel:
    """Load a model that `export` or ``jaxrec export`` wrote.

    On a CPU tables stay in their files, which are mapped into memory: the model is ready at once,
    and processes share the memory.

    An exported model is code: load only models that you trust. The files are checked against the
    manifest and the list of functions that jaxrec knows, and checksums find damage. Neither says
    who wrote them.

    Args:
        path: The model's folder.
        device: The device that predicts; None: the default device.
        verify: Whether all files are read and compared with their checksums. Without, only their
            sizes and the manifest are checked.

    Raises:
        ArtifactError: The folder holds no exported model; a file is missing, cut short or altered
            (the message names it); the model was exported for other platforms; a program calls a
            function that jaxrec does not know; or it needs a native library that this machine
            lacks.

    Example:
        >>> import tempfile
        >>> import jaxrec
        >>> from flax import nnx
        >>> config = jaxrec.EmbeddingBagConfig("user", num_embeddings=100, embedding_dim=8)
        >>> model = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
        >>> path = pathlib.Path(tempfile.mkdtemp(), "model")
        >>> jaxrec.serve.export(model, path, batch_sizes=(4,), platforms=("cpu",))
        >>> served = load(path)
        >>> served.predict(jaxrec.KeyedJaggedArray.from_lists({"user": [[3], [100]]}))
        Traceback (most recent call last):
        ValueError: feature 'user', sample 1: id 100 is outside [0, 100), the ids of its table
    """
    directory = pathlib.Path(path)
    manifest = read_manifest(directory)
    check_files(directory, manifest.files, with_checksums=verify)
    return ServedModel(directory, manifest, jax.devices()[0] if device is None else device)


def _platform(device: jax.Device) -> str:
    """Return `jax.export`'s name of a device's platform: "cuda" for NVIDIA's GPUs."""
    return "cuda" if device.platform == "gpu" and device in trial.cards() else device.platform


def _encoder(directory: pathlib.Path, manifest: Manifest) -> TableEncoder:
    """Read the encoder of raw columns, and check that its columns are the model's inputs."""
    path = directory / FEATURES_DIRECTORY
    try:
        encoder = TableEncoder.load(path)
        rows, capacities = encoder.table_rows, encoder.capacities(1)
    # Damage may raise anything in the readers of YAML, JSON and Parquet.
    except Exception as error:
        problem = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ArtifactError(f"{path} cannot be used: {problem}") from None
    arrays = [each for each in manifest.batch.inputs if isinstance(each, ArrayInput)]
    bounds = {x.name: x.num_ids for each in manifest.batch.ragged for x in each.features}
    num_dense = len(encoder.schema.dense)
    # The encoder of another model may give ids in range that mean other values, without an error.
    # So compare all that the programs rely on.
    if (
        [(each.dtype, each.shape) for each in arrays] != [("float32", (num_dense,))]
        or len(manifest.batch.ragged) != 1
        or manifest.batch.ragged[0].is_weighted
        or not bounds.keys() == rows.keys() == capacities.keys()
        or any(rows[name] > (bound or rows[name]) for name, bound in bounds.items())
        or encoder.schema.dynamic
    ):
        raise ArtifactError(
            f"{path} cannot be used: it encodes other columns than the model takes; export the "
            "model again"
        )
    return encoder


def _check_targets(directory: pathlib.Path, program: Program) -> None:
    """Raise an ArtifactError where this machine lacks a function that a program calls."""
    path = directory / program.file
    if program.targets and (problem := cpu.missing()) is not None:
        raise ArtifactError(f"{path} calls {program.targets[0]}, which is missing here: {problem}")
    if lacking := [target for target in program.targets if target not in exported_targets()]:
        raise ArtifactError(
            f"{path} calls {lacking[0]}: a later version of jaxrec exported it; install that "
            "version"
        )


def check_files(
    directory: pathlib.Path, files: Mapping[str, StoredFile], *, with_checksums: bool = True
) -> None:
    """Raise an ArtifactError if a file of a folder differs from its size or checksum in ``files``.

    Without ``with_checksums`` only sizes are compared.
    """
    if damage := find_damage(directory, files, "exported", with_checksums=with_checksums):
        raise ArtifactError(f"{directory}/{damage}")


def read_array(directory: pathlib.Path, stored: StoredArray) -> np.ndarray:
    """Return an array of the model, mapped from its file if ``stored.is_mapped``, else read."""
    path = directory / stored.file
    dtype = stored_dtype(stored.dtype)
    try:
        with path.open("rb") as file:
            form = read_header(file)
            size = path.stat().st_size
    except Exception as error:
        raise ArtifactError(f"{path} is not an npy file, or is cut short ({error})") from None
    shape = form.shape
    if (shape, form.dtype) != (stored.shape, dtype) or (form.order == "F" and len(shape) > 1):
        raise ArtifactError(
            f"{path} holds {form.dtype} of {shape}; the model has {stored.name} of {stored.dtype} "
            f"and {stored.shape}"
        )
    # Before memory is taken for it: a header that claims terabytes must be an error, not an
    # exhausted machine.
    if (wanted := form.start + math.prod(shape) * dtype.itemsize) != size:
        raise ArtifactError(
            f"{path} is not an npy file, or is cut short ({size:,} bytes instead of {wanted:,})"
        )
    is_mapped = stored.is_mapped and 0 not in stored.shape
    try:
        array = np.load(path, mmap_mode="r" if is_mapped else None, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ArtifactError(f"{path} is not an npy file, or is cut short ({error})") from None
    return array.view(jnp.dtype(stored.dtype))
