"""An exported model on a device: its variables, which may be replaced, and its programs."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import threading
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrec.embed.kernels import cpu, trial
from jaxrec.embed.kernels.native_call import exported_targets
from jaxrec.files.manifest import StoredFile, find_damage
from jaxrec.files.npz import read_header
from jaxrec.serve.artifact.manifest import (
    ArtifactError,
    Manifest,
    Program,
    StoredArray,
    stored_dtype,
)
from jaxrec.serve.artifact.program_file import Signature, read_program
from jaxrec.serve.artifact.ranker_spec import RankerProgram


@dataclasses.dataclass(frozen=True, eq=False)
class ServedVariables:
    """Variables of a served model by name, in the order of the programs' arguments.

    ``version`` is the number of the version of `jaxrec.tier.publish` that they have; 0: none, they
    are as they were exported.
    """

    arrays: Mapping[str, jax.Array]
    version: int = 0


class ServedArtifact:
    """The variables and programs of an exported model; several threads may call it at once.

    A class derived from it calls `_read` with its programs, and then `_program` for each call.
    """

    def __init__(self, directory: pathlib.Path, manifest: Manifest, device: jax.Device):
        self.manifest = manifest
        self.platform = _platform(device)
        self._directory, self._device = directory, device
        self._signatures: Mapping[Any, Signature] = {}
        self._compiled: dict[Hashable, Callable[..., Any]] = {}
        self._lock, self._replacing = threading.Lock(), threading.Lock()

    def _read(self, signatures: Mapping[Any, Signature]) -> None:
        """Read the programs, by a key of each, and the arrays of the manifest."""
        directory, manifest = self._directory, self.manifest
        for signature in signatures.values():
            _check_targets(directory, signature.program)
        self._signatures = signatures
        self._programs = {
            key: read_program(directory, manifest, signature)
            for key, signature in signatures.items()
        }
        self._variables = ServedVariables(
            {
                stored.name: jax.device_put(
                    # An alias of the mapped file, where the CPU allows it: tables are neither read
                    # nor copied until rows are looked up.
                    read_array(directory, stored),
                    self._device,
                    may_alias=stored.is_mapped,
                )
                for stored in manifest.arrays
            }
        )

    def _other_platform(self) -> ArtifactError:
        """Return the error of a model that has no programs for the device."""
        return ArtifactError(
            f"{self._directory} has programs for {', '.join(self.manifest.platforms())}, and this "
            f"device is {self._device.platform}; export the model with "
            f"platforms=({self.platform!r},)"
        )

    @property
    def variables(self) -> ServedVariables:
        """The tables and other variables that programs read now."""
        return self._variables

    def replace(self, arrays: Mapping[str, jax.Array], version: int) -> None:
        """Replace variables at once: each call of `predict` reads either all old or all new ones.

        Args:
            arrays: New values by the names of the manifest's arrays; others stay as they are.
            version: Number of their version, for `ServedVariables.version`.

        Raises:
            ValueError: The model has no array of a name, or one of another shape or type.
        """
        # One at a time: two would both begin with the old variables, and one would be lost.
        with self._replacing:
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
            self._take(ServedVariables({**old, **new}, version))

    def _take(self, variables: ServedVariables) -> None:
        # One assignment, which Python makes at once; a request reads the attribute once.
        self._variables = variables

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Numbers of samples that the model is compiled for."""
        return tuple(size.samples for size in self.manifest.batch.sizes)

    def warm_up(self) -> None:
        """Compile the programs of all sizes; otherwise each compiles at its first use."""
        for key, signature in self._signatures.items():
            batch = [np.zeros(each.shape, each.dtype) for each in signature.arguments]
            jax.block_until_ready(self._program(key)(*self._variables.arrays.values(), *batch))

    def _program(self, key: Hashable) -> Callable[..., Any]:
        # Tested again under the lock, which threads take only until the program is there.
        if key not in self._compiled:
            with self._lock:
                if key not in self._compiled:
                    # With the device, one program takes arrays of the host and of the device.
                    # `jax.jit` alone compiles for each, the second time in the middle of a request.
                    on_device = jax.sharding.SingleDeviceSharding(self._device)
                    program = jax.jit(self._programs[key].call, in_shardings=on_device)
                    self._compiled[key] = program
        return self._compiled[key]


def _platform(device: jax.Device) -> str:
    """Return `jax.export`'s name of a device's platform: "cuda" for NVIDIA's GPUs."""
    return "cuda" if device.platform == "gpu" and device in trial.cards() else device.platform


def _check_targets(directory: pathlib.Path, program: Program | RankerProgram) -> None:
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
