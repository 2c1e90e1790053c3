"""Quality of a quantized model beside the model that it was made from."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxrec.mesh import shard_batch
from jaxrec.metrics import NormalizedEntropy, auc
from jaxrec.plan.report import format_bytes
from jaxrec.serve.quantized.models import paired_stores, shared_copy, stores_of
from jaxrec.serve.quantized.table_quality import TableQuality, draw, table_quality

Predict: TypeAlias = Callable[[Any, Any], tuple[Any, ...]]
"""Function of a model and a batch that returns logits, labels and, optionally, weights."""


@dataclasses.dataclass(frozen=True)
class Scores:
    """Metrics of a model's predictions on labelled samples.

    Attributes:
        samples: Number of samples with a weight above 0.
        normalized_entropy: See `jaxrec.metrics.NormalizedEntropy`; lower is better.
        auc: Area under the ROC curve.
    """

    samples: int
    normalized_entropy: float
    auc: float


@dataclasses.dataclass(frozen=True)
class QualityReport:
    """Sizes, errors and scores of a quantized model; ``str(report)`` is a table.

    Attributes:
        tables: Quality of each table of the model, in order.
        before: Scores of the model; None: no batches were given.
        after: Scores of the quantized model on the same samples.
    """

    tables: tuple[TableQuality, ...]
    before: Scores | None = None
    after: Scores | None = None

    @property
    def bytes_before(self) -> int:
        """Bytes of all tables before quantization."""
        return sum(table.bytes_before for table in self.tables)

    @property
    def bytes_after(self) -> int:
        """Bytes of all tables after quantization."""
        return sum(table.bytes_after for table in self.tables)

    @property
    def entropy_change(self) -> float | None:
        """Relative change of the normalized entropy: 0.001 is 0.1 % worse; None without scores."""
        if self.before is None or self.after is None:
            return None
        return self.after.normalized_entropy / self.before.normalized_entropy - 1

    def __str__(self) -> str:
        head = ("table", "dtype", "rows", "pruned", "before", "after", "", "rms error", "largest")
        total = ("all", "", *_sizes(self.tables), "", "")
        sections = [_aligned([head, *map(_line, self.tables), total], left=2)]
        if self.before is not None and self.after is not None:
            sections.append(_scores_text(self.before, self.after))
        return "\n\n".join(sections)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw sizes and errors of the tables, the largest ones if there are many.

        Args:
            path: The picture's file; its ending says the format.

        Raises:
            ModuleNotFoundError: matplotlib is not installed (``pip install 'jaxrec[plot]'``).
            OSError: The file cannot be written.
        """
        draw(self.tables, _title(self), path)


def quality(
    model: nnx.Module,
    small: nnx.Module,
    batches: Iterable[Any] | None = None,
    *,
    predict: Predict | None = None,
) -> QualityReport:
    """Compare a quantized model with the model that it was made from.

    The rows of both are read in parts of 16 MiB, each once, and each batch is predicted once by
    each model, in evaluation mode. With several processes all of them call this with the same
    batches.

    Args:
        model: The model, on one device or over a mesh.
        small: The model that `quantize` returned for it, on one device or over a mesh.
        batches: Labelled batches on the host, such as held-out ones; None: the report has no
            scores. For a model with tables over a mesh they are put on the mesh, and their number
            of samples must be a multiple of its devices.
        predict: Function of a model and a batch that returns logits, labels and, optionally, sample
            weights, each ``[batch]``; it is compiled. None: batches are pairs of features and
            labels, and the logits are ``model(features)``.

    Raises:
        TypeError: ``small`` has tables that are not quantized; or there are batches, and tables lie
            over several processes.
        ValueError: The models have different tables; there are batches but no samples of a weight
            above 0; or a logit is NaN, such as of an id outside of its table.

    Example:
        >>> import jaxrec
        >>> config = jaxrec.EmbeddingBagConfig("user", num_embeddings=100, embedding_dim=8)
        >>> model = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
        >>> report = quality(model, jaxrec.serve.quantize(model, "int4"))
        >>> report.bytes_after / report.bytes_before
        0.25
        >>> 0 < report.tables[0].relative_rms_error < 0.1
        True
    """
    tables = tuple(
        table_quality(before, after, config.name)
        for _, after, before in paired_stores(small, model)
        for config in before.configs
    )
    if batches is None:
        return QualityReport(tables)
    return QualityReport(tables, *_scores((model, small), batches, predict or _default_predict))


def _default_predict(model: Any, batch: Any) -> tuple[Any, ...]:
    features, labels = batch
    return model(features), labels


def _scores(
    models: tuple[nnx.Module, ...], batches: Iterable[Any], predict: Predict
) -> list[Scores]:
    """Return the scores of each model on the same batches."""
    # Batch by batch for both models, since ``batches`` may be an iterator that yields each once.
    programs = [_program(model, predict) for model in models]
    samples: list[list[list[np.ndarray]]] = [[] for _ in models]
    for batch in batches:
        for program, columns in zip(programs, samples, strict=True):
            columns.append(_columns(program(batch)))
    if not samples[0] or not sum(len(columns[0]) for columns in samples[0]):
        raise ValueError("the batches hold no sample with a weight above 0; give labelled batches")
    return [_score(*map(np.concatenate, zip(*columns, strict=True))) for columns in samples]


def _program(model: nnx.Module, predict: Predict) -> Callable[[Any], Any]:
    """Compile ``predict`` of a model in evaluation mode; return it as a function of a batch."""
    copy = shared_copy(model)
    copy.eval()
    graph, variables = nnx.split(copy)
    # The variables are arguments: as constants of the program the tables would be in memory twice.
    run = jax.jit(lambda variables, batch: predict(nnx.merge(graph, variables), batch))
    mesh = _mesh(model)
    if mesh is None:
        return lambda batch: run(variables, batch)
    return lambda batch: run(variables, shard_batch(batch, mesh))


def _mesh(model: nnx.Module) -> Mesh | None:
    """Return the mesh of a model's tables; None on one device."""
    for store in stores_of(model).values():
        if (mesh := store.devices.mesh) is not None:
            if jax.process_count() > 1:
                raise TypeError(
                    "the tables lie over several processes; predict by each model yourself, or "
                    "leave the batches out"
                )
            return mesh
    return None


def _columns(outputs: tuple[Any, ...]) -> list[np.ndarray]:
    """Return the logits, labels and weights of the samples with a weight above 0."""
    logits, labels, *rest = (np.asarray(each, np.float64).reshape(-1) for each in outputs)
    weights = rest[0] if rest else np.ones_like(labels)
    # Samples that pad the last batch have weight 0.
    is_real = weights > 0
    if np.isnan(logits[is_real]).any():
        raise ValueError(
            "a logit is NaN: the model has NaNs, or an id of the batch is outside of its table; "
            "give bounds= when batches are made"
        )
    return [column[is_real] for column in (logits, labels, weights)]


def _score(logits: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> Scores:
    entropy = np.sum(weights * (np.logaddexp(0, logits) - labels * logits))
    sums = {"cross_entropy": entropy, "positives": weights @ labels, "weights": weights.sum()}
    values = NormalizedEntropy().values({name: np.array([x]) for name, x in sums.items()})
    return Scores(len(logits), values["ne"].item(), auc(logits, labels, weights))


def _line(table: TableQuality) -> tuple[str, ...]:
    errors = (f"{table.relative_rms_error:.3%}", f"{table.relative_largest_error:.3%}")
    return table.name, table.dtype, *_sizes([table]), *errors


def _sizes(tables: Sequence[TableQuality]) -> tuple[str, ...]:
    """Return the cells of tables together: rows, pruned rows, bytes before and after, share."""
    rows, pruned = sum(x.rows for x in tables), sum(x.pruned_rows for x in tables)
    before, after = sum(x.bytes_before for x in tables), sum(x.bytes_after for x in tables)
    sizes = f"{rows:,}", f"{pruned:,}", format_bytes(before), format_bytes(after)
    return *sizes, f"{after / before:.3f}"


def _scores_text(before: Scores, after: Scores) -> str:
    change = after.normalized_entropy / before.normalized_entropy - 1
    lines = [
        (f"{before.samples:,} samples", "before", "after", "change"),
        (
            "normalized entropy",
            f"{before.normalized_entropy:.6f}",
            f"{after.normalized_entropy:.6f}",
            f"{change:+.4%}",
        ),
        ("AUC", f"{before.auc:.6f}", f"{after.auc:.6f}", f"{after.auc - before.auc:+.6f}"),
    ]
    return _aligned(lines, left=1)


def _title(report: QualityReport) -> str:
    title = f"{format_bytes(report.bytes_before)} become {format_bytes(report.bytes_after)}"
    if (change := report.entropy_change) is not None:
        title += f"; normalized entropy {change:+.4%}"
    return title


def _aligned(lines: Sequence[tuple[str, ...]], left: int) -> str:
    """Return cells as aligned text: the first ``left`` columns to the left, others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
