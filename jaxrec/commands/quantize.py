"""The command ``jaxrec quantize``, which makes the tables of a trained model smaller."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import tyro
from flax import nnx

from jaxrec.arguments import ConfigError, parse
from jaxrec.data import ClickBatch, DataError, SchemaError
from jaxrec.embed.formats import FORMATS
from jaxrec.embed.taps import tapped_modules
from jaxrec.files.atomic import write_atomically
from jaxrec.serve.quantized.pruning import Pruning, by_frequency, by_norm, count_ids
from jaxrec.serve.quantized.quality_report import QualityReport, quality
from jaxrec.serve.quantized.quantize import quantize
from jaxrec.serve.quantized.saved import is_quantized, load_quantized, save_quantized_run
from jaxrec.train.checkpoint import CheckpointError, all_steps
from jaxrec.train.config import TrainConfig
from jaxrec.train.datasets import LogDataset, ParquetDataset, split_datasets
from jaxrec.train.features import saved_encoder
from jaxrec.train.model import load_model, predict, saved_config
from jaxrec.train.models import model_kind

PICTURE_FILE = "quality.png"
QUALITY_FILE = "quality.json"


class QuantizeError(RuntimeError):
    """The model of a run cannot be quantized."""


USAGE_ERRORS = (ConfigError, SchemaError)
FAILURES = (CheckpointError, DataError, QuantizeError)


@dataclasses.dataclass(frozen=True)
class QuantizeOptions:
    """Quantizes the model of a run of `jaxrec train`, and compares both models on the run's
    held-out rows. `jaxrec.serve.load_quantized` loads the result.

    Example: jaxrec quantize run --dtype int4 --per-table user=int8 --out small
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = ""
    """Directory of the run."""
    dtype: Literal["int8", "int4", "int2", "float8", "float16", "bfloat16", "float32"] = "int8"
    """Format of the tables."""
    per_table: tuple[str, ...] = ()
    """Formats of single tables, as NAME=FORMAT. NAME may be a pattern such as 'cat_*'; the last
    that fits a table counts."""
    output_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the looked-up embeddings; by default the model's."""
    prune: tuple[str, ...] = ()
    """Tables whose rows are pruned, as NAME=SHARE; 'cat_*=0.3' prunes 30 % of the rows of each."""
    prune_by: Literal["norm", "frequency"] = "norm"
    """Rows to prune: those of the smallest norm, or the least frequent in the training rows."""
    step: int | None = None
    """Step of the run's checkpoint; by default the newest."""
    out: Annotated[pathlib.Path | None, tyro.conf.arg(aliases=["--output"])] = None
    """Directory of the quantized model; by default RUN and the format, such as RUN-int8."""

    def __post_init__(self) -> None:
        for assignment in self.per_table:
            _, row_format = _split("--per-table", assignment)
            if row_format not in FORMATS:
                raise ConfigError(
                    f"--per-table {assignment}: {row_format!r} is not one of {', '.join(FORMATS)}"
                )
        for assignment in self.prune:
            _, share = _split("--prune", assignment)
            try:
                is_share = 0 <= float(share) <= 1
            except ValueError:
                is_share = False
            if not is_share:
                raise ConfigError(f"--prune {assignment}: {share!r} is not a share from 0 to 1")


def run(options: Sequence[str]) -> int:
    """Run ``jaxrec quantize``; return the exit code."""
    parsed = parse("quantize", options, QuantizeOptions())
    if not parsed.run:
        raise ConfigError("give the directory of a run of jaxrec train: jaxrec quantize RUN")
    source = pathlib.Path(parsed.run)
    # All options are checked before the model is loaded, as far as they can be.
    config = _read_config(source)
    kind = model_kind(config, saved_encoder(source))
    if (reason := kind.refuse_export()) is not None:
        raise QuantizeError(f"{source}: {reason}")
    out = _free_directory(parsed.out or source.with_name(f"{source.name}-{parsed.dtype}"))
    model = load_model(source, parsed.step)
    widths = {
        table.name: table.embedding_dim
        for module in tapped_modules(model).values()
        for table in module.tables.get_value().configs
    }
    names = list(widths)
    per_table = _by_table("--per-table", parsed.per_table, names)
    _check_widths(widths, parsed.dtype, per_table)
    shares = {
        name: float(share) for name, share in _by_table("--prune", parsed.prune, names).items()
    }
    rows, held_out = split_datasets(config, encoder=kind.encoder)
    rules = _rules(model, shares, rows if parsed.prune_by == "frequency" else None, config)
    print(f"quantizing {len(names)} tables of {source}")
    try:
        small = quantize(
            model,
            parsed.dtype,
            per_table=per_table,
            output_dtype=parsed.output_dtype,
            prune=rules,
        )
    except ValueError as error:
        raise QuantizeError(str(error)) from None
    if [label.kind for label in kind.encoder.schema.labels.values()] == ["binary"]:
        print(f"comparing both models on {len(held_out):,} held-out rows\n")
        batches = held_out.batches(config.data.batch_size)
        report = quality(model, small, batches, predict=_labelled_logits)
    else:
        print("comparing the rows of both models; scores are those of a label of 0 and 1\n")
        report = quality(model, small)
    print(report)
    step = all_steps(source)[-1] if parsed.step is None else parsed.step
    _save(small, report, source, out, step)
    print(f"\nquantized model saved in {out}")
    return 0


def _read_config(source: pathlib.Path) -> TrainConfig:
    """Return the options of a run; raise a QuantizeError if its model cannot be quantized."""
    if is_quantized(source):
        raise QuantizeError(
            f"{source} is quantized already; quantize the run that it was made from"
        )
    config = saved_config(source)
    if config.vocabulary.is_dynamic:
        raise QuantizeError(
            f"{source}: its tables have open vocabularies (--vocabulary dynamic), which cannot be "
            "quantized; train with --vocabulary fixed"
        )
    return config


def _free_directory(out: pathlib.Path) -> pathlib.Path:
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"{out} exists; give another --out, or remove it")
    return out


def _split(option: str, assignment: str) -> tuple[str, str]:
    name, equals, value = assignment.rpartition("=")
    if not (name and equals and value):
        raise ConfigError(f"{option} takes NAME=VALUE, got {assignment!r}")
    return name, value


def _by_table(option: str, assignments: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Return an option's values by table, given assignments NAME=VALUE whose name may be a pattern.

    ``names`` are all tables.
    """
    values: dict[str, str] = {}
    for assignment in assignments:
        pattern, value = _split(option, assignment)
        # The name of a table may have the characters of a pattern, such as "tags[0]".
        chosen = [name for name in names if name == pattern] or fnmatch.filter(names, pattern)
        if not chosen:
            shown = ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")
            raise ConfigError(
                f"{option} {assignment}: no table is named {pattern!r}; there are {shown}"
            )
        values |= dict.fromkeys(chosen, value)
    return values


def _check_widths(widths: Mapping[str, int], dtype: str, per_table: Mapping[str, str]) -> None:
    """Check that the format of each table can store rows of the table's width."""
    for name, width in widths.items():
        row_format = FORMATS[per_table.get(name, dtype)]
        if (reason := row_format.refuse(width)) is not None:
            raise ConfigError(
                f"table {name!r} cannot be {row_format.name}: {reason}; give it another format by "
                f"--per-table '{name}=int8', where a name may be a pattern"
            )


def _rules(
    model: nnx.Module,
    shares: Mapping[str, float],
    rows: LogDataset | ParquetDataset | None,
    config: TrainConfig,
) -> dict[str, Pruning]:
    """Return the rule that prunes each table of ``shares``, by name.

    With ``rows``, the training rows, the rarest ids in them are pruned. None: the rows of the
    smallest norm.
    """
    if rows is None or not shares:
        return {name: by_norm(share=share) for name, share in shares.items()}
    print(f"counting the ids of {len(rows):,} training rows")
    batches = (batch.features for batch in rows.batches(config.data.batch_size))
    counts = count_ids(model, batches)
    return {name: by_frequency(counts[name], share=share) for name, share in shares.items()}


def _labelled_logits(model: Any, batch: ClickBatch) -> tuple[Any, ...]:
    return predict(model, batch), batch.labels, batch.weights


def _save(
    small: nnx.Module, report: QualityReport, source: pathlib.Path, out: pathlib.Path, step: int
) -> None:
    """Save the model and the report to ``out``, which appears once the model has loaded again."""
    with write_atomically(out) as unfinished:
        save_quantized_run(small, source, unfinished, step=step)
        load_quantized(unfinished)
        values = dataclasses.asdict(report)
        (unfinished / QUALITY_FILE).write_text(json.dumps(values, indent=2) + "\n")
        try:
            report.plot(unfinished / PICTURE_FILE)
        except ModuleNotFoundError as error:
            print(error)
        # Looked at again: the model took its time, and files that came meanwhile are not ours.
        _free_directory(out)
