"""Reading exported models, and predicting with them."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa

from jaxrec.data import TableEncoder
from jaxrec.serve.artifact.batch_spec import ArrayInput, unflatten
from jaxrec.serve.artifact.manifest import (
    FEATURES_DIRECTORY,
    ArtifactError,
    Manifest,
    read_manifest,
)
from jaxrec.serve.artifact.program_file import Signature
from jaxrec.serve.artifact.requests import Request
from jaxrec.serve.artifact.served import ServedArtifact, ServedVariables, check_files


class ServedModel(ServedArtifact):
    """A model that `load` read. Several threads may call it at once.

    Attributes:
        manifest: Description of the model: its inputs, outputs, tables and files.
        encoder: Encoder of raw columns; None if the model was exported without one.
        platform: Platform of its device, "cpu" or "cuda".
    """

    def __init__(self, directory: pathlib.Path, manifest: Manifest, device: jax.Device):
        super().__init__(directory, manifest, device)
        self.encoder = _encoder(directory, manifest) if manifest.has_encoder else None
        programs = {
            each.samples: each for each in manifest.programs if each.platform == self.platform
        }
        if set(programs) != {size.samples for size in manifest.batch.sizes}:
            raise self._other_platform()
        self._read(
            {
                size.samples: Signature(
                    programs[size.samples],
                    manifest.batch.shapes(size),
                    [
                        jax.ShapeDtypeStruct((size.samples, *x.shape), jnp.dtype(x.dtype))
                        for x in manifest.outputs
                    ],
                )
                for size in manifest.batch.sizes
            }
        )

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
    if manifest.ranker is not None:
        raise ArtifactError(
            f"{directory} is a ranker with caches of histories; read it by "
            "jaxrec.serve.load_ranker, or answer requests by jaxrec serve"
        )
    check_files(directory, manifest.files, with_checksums=verify)
    return ServedModel(directory, manifest, jax.devices()[0] if device is None else device)


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
    num_dense = encoder.schema.num_dense
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
