"""Export of a ranker: programs that encode histories, append events and score candidates."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import pathlib
from collections.abc import Iterable, Sequence

import jax
import msgspec
import numpy as np

from jaxrec.files.atomic import write_atomically
from jaxrec.files.manifest import describe_files
from jaxrec.nn import HSTURanker
from jaxrec.nn.ranker_features import Side
from jaxrec.nn.ranker_serving import check_growth
from jaxrec.serve.artifact.batch_spec import (
    ArrayOutput,
    BatchSize,
    BatchSpec,
    Feature,
    RaggedInput,
    Structure,
)
from jaxrec.serve.artifact.export import check_target, write_arrays, write_program
from jaxrec.serve.artifact.inputs import table_bounds
from jaxrec.serve.artifact.manifest import MANIFEST_FILE, Manifest
from jaxrec.serve.artifact.programs import used_arrays
from jaxrec.serve.artifact.pure_model import PureModel
from jaxrec.serve.artifact.ranker_spec import (
    NUM_SCALARS,
    CacheSize,
    RankerProgram,
    RankerSpec,
)
from jaxrec.serve.ranker.steps import export_step, tokens_of

# Micro-batches: small ones for short lists, large ones for fast matrix products.
CANDIDATE_SIZES = (16, 128)
APPEND_SIZES = (32,)
MAX_CANDIDATES = 4096

# Histories shorter than this need no size of their own.
_LEAST_EVENTS = 16

# The column of requests that has the keys of caches.
CACHE_KEY = "cache_key"


def export_ranker(
    model: HSTURanker,
    path: str | os.PathLike[str],
    *,
    history_sizes: Sequence[int] | None = None,
    candidate_sizes: Sequence[int] = CANDIDATE_SIZES,
    append_sizes: Sequence[int] | None = None,
    max_candidates: int = MAX_CANDIDATES,
    platforms: Sequence[str] = ("cpu", "cuda"),
) -> None:
    """Write a ranker to a folder, from which `load_ranker` scores candidates.

    The folder holds programs that encode a history, that score candidates against it, and, for a
    model that counts from the start, that append new events. It is otherwise as that of
    `jaxrec.serve.export`. Scores are those of one pass over history and candidates, up to rounding:
    probabilities of binary tasks, and predictions of others.

    Args:
        model: The ranker, on one device or over a mesh, quantized or not. It must be able to
            encode histories apart from candidates (`HSTURanker.encode`).
        path: The folder. An exported model that is there already is replaced.
        history_sizes: Numbers of events that histories are encoded for; a history takes the
            smallest that holds it. None: as many events as ``max_length`` tokens hold, a quarter
            and a sixteenth of it.
        candidate_sizes: Numbers of candidates of a micro-batch.
        append_sizes: Numbers of new events that are appended at once. None: 32, or none if the
            model cannot append.
        max_candidates: Largest number of candidates of a user in a request.
        platforms: "cpu" and "cuda".

    Raises:
        TypeError: The model is not an `HSTURanker`, or a table has an open vocabulary or a cache.
        ValueError: The model cannot encode histories, or cannot append and ``append_sizes`` are
            given; a size is not a whole number of 1 or more; a feature is named ``cache_key``.
        FileExistsError: The path is a file, or a folder that is not an exported model.
        OSError: The folder cannot be written.

    Example:
        >>> import tempfile
        >>> import jaxrec
        >>> from flax import nnx
        >>> from jaxrec.nn import RankerFeatures, TargetTask
        >>> rngs = nnx.Rngs(0)
        >>> item = jaxrec.EmbeddingConfig("item", 100, 8, feature_names=("history", "candidate"))
        >>> model = HSTURanker(
        ...     jaxrec.EmbeddingCollection([item], rngs=rngs),
        ...     RankerFeatures({"history": "candidate"}), [TargetTask("click", bit=1)],
        ...     dim=8, num_layers=1, num_heads=1, max_length=8, rngs=rngs)
        >>> path = pathlib.Path(tempfile.mkdtemp(), "ranker")
        >>> export_ranker(model, path, candidate_sizes=(4,), platforms=("cpu",))
        >>> ranker = jaxrec.serve.load_ranker(path)
        >>> batch = jaxrec.KeyedJaggedArray.from_lists(
        ...     {"history": [[3, 1, 4]], "candidate": [[5, 9]]})
        >>> ranker.predict(batch, ["a user"])["click"].shape
        (2,)
    """
    path = pathlib.Path(path)
    if not isinstance(model, HSTURanker):
        raise TypeError(
            f"export_ranker takes a jaxrec.nn.HSTURanker, got {type(model).__name__}; "
            "jaxrec.serve.export takes other models"
        )
    check_target(path, platforms)
    sizes = _Sizes.of(model, history_sizes, candidate_sizes, append_sizes, max_candidates)
    batch = _batch_spec(model, sizes)
    pure = PureModel.of(model, HSTURanker.encode)
    # Programs first: a model that cannot be exported fails here, before tables are written.
    spec, names = _probe(model, pure, batch, sizes, platforms[0])
    steps = [(platform, *step) for platform in platforms for step in spec.steps()]
    exported = [export_step(pure, batch, spec, names, *step) for step in steps]
    with write_atomically(path) as unfinished:
        programs = []
        for (platform, step, events, count), program in zip(steps, exported, strict=True):
            name = f"{platform}-{step}-{events}" + (f"-{count}" if count else "")
            written = write_program(unfinished, name, program)
            programs.append(RankerProgram(platform, step, events, count, *written))
        arrays = write_arrays(unfinished, pure, names)
        tasks = tuple(task.name for task in model.tasks.tasks)
        manifest = Manifest(
            jaxrec=importlib.metadata.version("jaxrec"),
            jax=jax.__version__,
            batch=batch,
            output_structure=Structure("dict", tasks, (Structure(),) * len(tasks)),
            outputs=tuple(ArrayOutput(f"output[{name!r}]", "float32", ()) for name in tasks),
            arrays=arrays,
            tables=tuple(table for table in pure.tables() if table.array in names),
            programs=(),
            has_encoder=False,
            files=describe_files(unfinished),
            ranker=msgspec.structs.replace(spec, programs=tuple(programs)),
        )
        # As `load_ranker` will check it, so that no folder appears that cannot be loaded.
        manifest.check()
        (unfinished / MANIFEST_FILE).write_bytes(manifest.to_json())


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Numbers of events, candidates and new events that programs are made for, ascending."""

    history: tuple[int, ...]
    candidates: tuple[int, ...]
    append: tuple[int, ...]
    max_candidates: int

    @classmethod
    def of(
        cls,
        model: HSTURanker,
        history: Sequence[int] | None,
        candidates: Sequence[int],
        append: Sequence[int] | None,
        max_candidates: int,
    ) -> _Sizes:
        """Check the sizes that a user gives, and choose those that are None."""
        if append:
            check_growth(model)  # an error that says why the model cannot append
        if append is None:
            append = APPEND_SIZES if _can_grow(model) else ()
        if history is None:
            history = _history_ladder(model)
        return cls(
            _ascending("history_sizes", history),
            _ascending("candidate_sizes", candidates),
            _ascending("append_sizes", append) if append else (),
            _ascending("max_candidates", [max_candidates])[0],
        )


def _can_grow(model: HSTURanker) -> bool:
    try:
        check_growth(model)
    except ValueError:
        return False
    return True


def _history_ladder(model: HSTURanker) -> tuple[int, ...]:
    """Return the most events that ``max_length`` tokens hold, a quarter and a sixteenth of it."""
    if model.max_length is None:
        # Whatever the sizes: the error of `HSTURanker.encode` says why.
        return (_LEAST_EVENTS,)
    most = (model.max_length - model.num_context) // model.tokens.tokens_per_event
    sizes = [size for size in (most // 16, most // 4) if size >= _LEAST_EVENTS]
    return (*sizes, max(1, most))


def _ascending(name: str, sizes: Sequence[int]) -> tuple[int, ...]:
    given = list(sizes) if isinstance(sizes, Iterable) else []
    if not given or any(
        isinstance(size, bool) or not isinstance(size, int | np.integer) or not 1 <= size < 1 << 31
        for size in given
    ):
        raise ValueError(f"{name} are whole numbers of 1 or more, such as [64, 256], got {sizes!r}")
    return tuple(sorted({int(size) for size in given}))


def _batch_spec(model: HSTURanker, sizes: _Sizes) -> BatchSpec:
    """Describe the features of histories and of candidates."""
    names = model.features
    bounds = table_bounds(model)

    def features_of(side: Side) -> list[str]:
        numbers = [names.number(side, "times")]
        if side == "history":
            numbers += [names.number(side, kind) for kind in ("actions", "watch_times")]
        present = [name for name in numbers if name is not None]
        return [*names.of(side, "items"), *names.of(side, "additional"), *present]

    def ragged(name: str, features: Sequence[str]) -> RaggedInput:
        return RaggedInput(name, tuple(Feature(x, bounds.get(x)) for x in features))

    history, candidates = features_of("history"), features_of("targets")
    if CACHE_KEY in (*names.context, *history, *candidates):
        raise ValueError(
            f"a feature is named {CACHE_KEY!r}, which is the column of requests that has the keys "
            "of caches; give the feature another name"
        )
    return BatchSpec(
        Structure("dict", ("history", "candidates"), (Structure(), Structure())),
        (
            ragged("batch['history']", [*names.context, *history]),
            ragged("batch['candidates']", candidates),
        ),
        (
            BatchSize(
                1,
                (
                    (*names.context.values(), *[sizes.history[-1]] * len(history)),
                    (sizes.max_candidates,) * len(candidates),
                ),
            ),
        ),
    )


def _probe(
    model: HSTURanker, pure: PureModel, batch: BatchSpec, sizes: _Sizes, platform: str
) -> tuple[RankerSpec, list[str]]:
    """Return the ranker's sizes and caches, and the arrays of the model that its programs read.

    Both follow from the programs for the smallest sizes, exported without unused arguments.
    """
    times = model.features.number("targets", "times")
    counts_to_request = times is not None and model.positions.count_from == "end"
    spec = RankerSpec(
        tuple(model.features.context),
        times if counts_to_request else None,
        tuple(CacheSize(events, ()) for events in sizes.history),
        sizes.candidates,
        sizes.append,
    )
    names = list(pure.shapes)
    encode = export_step(
        pure, batch, spec, names, platform, "encode", sizes.history[0], 0, keep_unused=False
    )
    shapes = [(each.dtype.name, each.shape[1:]) for each in encode.out_avals]
    layers = (len(shapes) - NUM_SCALARS) // 2
    labels = [f"{kind}/{layer}" for kind in ("keys", "values") for layer in range(layers)]

    def cache(events: int) -> CacheSize:
        tokens = tokens_of(model, events)
        arrays = [
            ArrayOutput(label, dtype, (model.stack.capacity_of(i % layers, tokens), *shape[1:]))
            for i, (label, (dtype, shape)) in enumerate(zip(labels, shapes, strict=False))
        ]
        scalars = ("lengths", "newest", "request")
        return CacheSize(events, (*arrays, *(ArrayOutput(x, "int32", ()) for x in scalars)))

    spec = msgspec.structs.replace(spec, caches=tuple(cache(x) for x in sizes.history))
    smallest = sizes.history[0], sizes.candidates[0]
    score = export_step(pure, batch, spec, names, platform, "score", *smallest, keep_unused=False)
    used = {*used_arrays(encode, names), *used_arrays(score, names)}
    return spec, [name for name in names if name in used]
