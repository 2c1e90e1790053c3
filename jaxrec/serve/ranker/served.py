"""Reading exported rankers, and scoring candidates with caches of histories."""

from __future__ import annotations

import math
import os
import pathlib
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from jaxrec.ragged import KeyedJaggedArray
from jaxrec.serve.artifact.batch_spec import column_name
from jaxrec.serve.artifact.manifest import ArtifactError, Manifest, read_manifest
from jaxrec.serve.artifact.program_file import Signature
from jaxrec.serve.artifact.ranker_spec import RankerSpec, Step
from jaxrec.serve.artifact.served import ServedArtifact, ServedVariables, check_files
from jaxrec.serve.ranker.caches import (
    KEY_TYPES,
    Cache,
    CacheCounts,
    History,
    HistoryCaches,
    Key,
)
from jaxrec.serve.ranker.rows import RankerRequest, Row

# A gigabyte holds some 300 histories of 1,024 events, of 3 layers of 128 columns.
CACHE_BYTES = 1 << 30


class ServedRanker(ServedArtifact):
    """A ranker that `load_ranker` read. Several threads may call it at once.

    It keeps the caches of histories by key. A row whose key has a cache of the same context and
    events is scored alone; where more events follow, these are appended; otherwise the history is
    encoded. New variables (`replace`) drop all caches.

    Attributes:
        manifest: Description of the ranker: its inputs, outputs, sizes, tables and files.
        platform: Platform of its device, "cpu" or "cuda".
    """

    def __init__(
        self,
        directory: pathlib.Path,
        manifest: Manifest,
        device: jax.Device,
        cache_bytes: int = CACHE_BYTES,
    ):
        super().__init__(directory, manifest, device)
        assert manifest.ranker is not None
        self.ranker: RankerSpec = manifest.ranker
        signatures = {
            (program.step, program.events, program.count): Signature(
                program,
                self.ranker.arguments(manifest.batch, program.step, program.events, program.count),
                self.ranker.results(manifest.outputs, program.step, program.events, program.count),
            )
            for program in self.ranker.programs
            if program.platform == self.platform
        }
        if not signatures:
            raise self._other_platform()
        self._read(signatures)
        self._caches = HistoryCaches(cache_bytes, self._variables)
        self._outputs = [column_name(each.name) for each in manifest.outputs]

    def _take(self, variables: ServedVariables) -> None:
        # Before the assignment: whoever sees the new variables sees no cache of the old ones.
        self._caches.drop(variables)
        super()._take(variables)

    @property
    def cache_counts(self) -> CacheCounts:
        """Hits, appends, misses, evictions, and the size of the caches."""
        return self._caches.counts()

    def predict(
        self, batch: KeyedJaggedArray, keys: Sequence[Key | None] | None = None
    ) -> dict[str, np.ndarray]:
        """Return the scores of all candidates of a batch.

        Args:
            batch: Context, history and candidates; each user is a row.
            keys: Key of each row's cache, usually the user's id; None for a row or for all: no
                cache is kept.

        Returns:
            By task, float32 ``[candidates]`` in the order of the batch: probabilities of binary
            tasks, and predictions of others.

        Raises:
            KeyError: The batch lacks a feature.
            TypeError: A key is neither an integer nor a string.
            ValueError: An id is outside of its table; a row has too many events or candidates, or
                features of different lengths (the message names the feature and the row); or the
                numbers of histories, rows of candidates and keys differ.
        """
        if keys is not None:
            # NumPy's integers and strings become Python's: 7 is one key, whoever made it.
            keys = [key.item() if isinstance(key, np.generic) else key for key in keys]
            if wrong := [key for key in keys if type(key) not in KEY_TYPES]:
                raise TypeError(f"keys are integers or strings, got {wrong[0]!r}")
        request = RankerRequest.of_batch(self.ranker, self.manifest.batch, batch, keys)
        return self.predict_request(request)

    def predict_request(
        self,
        request: RankerRequest,
        variables: ServedVariables | None = None,
        deadline: float = math.inf,
    ) -> dict[str, np.ndarray]:
        """Return the scores of all candidates of a request, all by the same variables.

        Args:
            request: The rows.
            variables: The tables and other variables; None: the current ones.
            deadline: Time of `time.monotonic` after which no further row is scored.

        Raises:
            TimeoutError: The deadline passed before the last row.
        """
        # Read once: `replace` may come between two rows, and a request is of one version.
        variables = self._variables if variables is None else variables
        parts: list[list[np.ndarray]] = []
        for number, row in enumerate(request.rows()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{number:,} of {len(request.keys):,} rows were scored in time")
            parts += self._scores(row, variables)
        return {
            name: np.concatenate([np.zeros(0, np.float32), *(part[index] for part in parts)])
            for index, name in enumerate(self._outputs)
        }

    def _scores(self, row: Row, variables: ServedVariables) -> Iterator[list[np.ndarray]]:
        """Yield the outputs of each micro-batch of a row's candidates."""
        cache = self._cache(row, variables)
        results = []
        for part in _micro_batches(row.candidates, self.ranker.candidate_sizes):
            size = next(x for x in self.ranker.candidate_sizes if part.shape[1] <= x)
            packed = _packed([*part], (size,) * len(part))
            # JAX runs the program while the next part is packed.
            outputs = self._run(variables, "score", cache.events, size, [*cache.arrays, *packed])
            results.append((part.shape[1], outputs))
        for count, outputs in results:
            yield [np.asarray(output)[:count] for output in outputs]

    def _cache(self, row: Row, variables: ServedVariables) -> Cache:
        """Return the encoded history of a row: cached, appended to, or encoded anew."""
        known = None if row.key is None else self._caches.find(row.key, variables)
        if known is not None and not known.history.begins(row.history):
            known = None
        new = 0 if known is None else row.history.num_events - known.history.num_events
        if known is not None and not new:
            self._caches.count("hits")
            return known
        if known is not None and new <= max(self.ranker.append_sizes, default=0):
            self._caches.count("appends")
            cache = self._appended(known, row.history, variables)
        else:
            self._caches.count("misses")
            cache = self._encoded(row.history, variables)
        if row.key is not None:
            self._caches.keep(row.key, cache, variables)
        return cache

    def _encoded(self, history: History, variables: ServedVariables) -> Cache:
        size = self.ranker.cache_for(history.num_events)
        batch = self.manifest.batch
        capacities = self.ranker.capacities(batch, "encode", size.events, 0)
        arguments = _packed([*history.context, *history.events], capacities)
        if self.ranker.request_time is not None:
            arguments.append(np.array([history.request_time], np.int32))
        arrays = self._run(variables, "encode", size.events, 0, arguments)
        return Cache(history, size.events, tuple(arrays))

    def _appended(self, known: Cache, history: History, variables: ServedVariables) -> Cache:
        """Return a cache with the events of a history that it does not have yet."""
        size = self.ranker.cache_for(history.num_events)
        arrays: Sequence[jax.Array | np.ndarray] = known.arrays
        if size.events > known.events:
            arrays = _grown(known.arrays, size.shapes())
        events = max(size.events, known.events)
        new = history.events[:, known.history.num_events :]
        count = next(x for x in self.ranker.append_sizes if new.shape[1] <= x)
        arguments = [*arrays, *_packed([*new], (count,) * len(new))]
        appended = self._run(variables, "append", events, count, arguments)
        return Cache(history, events, tuple(appended))

    def _run(
        self,
        variables: ServedVariables,
        step: Step,
        events: int,
        count: int,
        arguments: Sequence[np.ndarray | jax.Array],
    ) -> list[jax.Array]:
        return self._program((step, events, count))(*variables.arrays.values(), *arguments)


def _micro_batches(candidates: np.ndarray, sizes: Sequence[int]) -> Iterator[np.ndarray]:
    """Yield candidates in parts of the largest size; the last part has the rest."""
    for start in range(0, candidates.shape[1], sizes[-1]):
        yield candidates[:, start : start + sizes[-1]]


def _packed(values: Sequence[np.ndarray], capacities: Sequence[int]) -> list[np.ndarray]:
    """Return a program's ``values`` and ``lengths`` of one row, padded to the capacities."""
    packed = np.zeros(sum(capacities), np.int32)
    first = 0
    for each, capacity in zip(values, capacities, strict=True):
        packed[first : first + len(each)] = each
        first += capacity
    return [packed, np.array([len(each) for each in values], np.int32)]


def _grown(arrays: Sequence[jax.Array], shapes: Sequence[jax.ShapeDtypeStruct]) -> list[np.ndarray]:
    """Return the arrays of a cache in the shapes of a larger history size, on the host."""
    # NumPy, since an operation of JAX would compile in the middle of a request.
    grown = []
    for array, shape in zip(arrays, shapes, strict=True):
        larger = np.zeros(shape.shape, shape.dtype)
        larger[tuple(map(slice, array.shape))] = np.asarray(array)
        grown.append(larger)
    return grown


def load_ranker(
    path: str | os.PathLike[str],
    *,
    cache_bytes: int = CACHE_BYTES,
    device: jax.Device | None = None,
    verify: bool = True,
) -> ServedRanker:
    """Load a ranker that `export_ranker` wrote.

    As for `load`, a ranker is code: load only those that you trust.

    Args:
        path: The ranker's folder.
        cache_bytes: Largest number of bytes of all caches of histories; 0: none are kept. The cache
            of a row that is being scored comes on top.
        device: The device that predicts; None: the default device.
        verify: Whether all files are read and compared with their checksums.

    Raises:
        ArtifactError: The folder holds no exported ranker, or one that is damaged or for other
            platforms; see `load`.
        ValueError: ``cache_bytes`` is negative.

    Example:
        `export_ranker` has one.
    """
    if cache_bytes < 0:
        raise ValueError(f"cache_bytes is 0 or more, got {cache_bytes}")
    directory = pathlib.Path(path)
    manifest = read_manifest(directory)
    if manifest.ranker is None:
        raise ArtifactError(
            f"{directory} is not a ranker with caches of histories; read it by jaxrec.serve.load"
        )
    check_files(directory, manifest.files, with_checksums=verify)
    device = jax.devices()[0] if device is None else device
    return ServedRanker(directory, manifest, device, cache_bytes)
