"""Open vocabularies of a run: their options, and figures of their tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from flax import nnx
from rich.filesize import decimal

from jaxrec.arguments import ConfigError
from jaxrec.data import CategoricalColumn, ClickBatch, Schema
from jaxrec.ragged.raw_ids import is_raw
from jaxrec.tier import (
    Dynamic,
    Eviction,
    ahead,
    default_row,
    distance_lfu,
    lfu,
    lfu_lru,
    lru,
    ttl,
    zeros,
)
from jaxrec.tier.model_statistics import statistics, totals
from jaxrec.tier.planning.tier import tier_of
from jaxrec.train.config import VocabularyConfig

# Prefix of the names of a table's statistics in the history: "vocabulary/cat_0/hits".
PREFIX = "vocabulary/"

_POLICIES: dict[str, Callable[[], Eviction]] = {
    "lru": lru,
    "lfu": lfu,
    "lfu_lru": lfu_lru,
    "distance_lfu": distance_lfu,
}

# Number of rows of a part of times; months begin at 1.
_NUM_VALUES = {"hour": 24, "weekday": 7, "month": 13}

_OF_LEARNED_VOCABULARIES = ("min_count", "max_size", "num_unknown")


def settings(config: VocabularyConfig) -> Dynamic:
    """Return the options of `jaxrec train` as settings of `jaxrec.tier.make`."""
    return Dynamic(
        eviction=ttl(batches=config.ttl_batches)
        if config.eviction == "ttl"
        else _POLICIES[config.eviction](),
        admit_after=config.admit_after,
        unknown=default_row() if config.unknown == "default" else zeros(),
        store=config.store,
    )


def with_rows(model: nnx.Module, batch: ClickBatch) -> ClickBatch:
    """Replace raw ids of a batch, if it has any, by their rows, without changing vocabularies."""
    if is_raw(batch.features.values):
        (batch,) = ahead(model, [batch], is_training=False)
    return batch


def with_dynamic_columns(schema: Schema, rows: int) -> Schema:
    """Return a schema with "dynamic" columns of ``rows`` rows in place of "vocabulary" columns.

    Parts of times, of which there are few, become row indices.
    """
    columns = {}
    for name, column in schema.categorical.items():
        if column.encoding == "vocabulary" and column.part is not None:
            column = dataclasses.replace(
                column, encoding="ids", num_embeddings=_NUM_VALUES[column.part]
            )
        elif column.encoding == "vocabulary":
            _check_options(name, column)
            column = dataclasses.replace(column, encoding="dynamic", num_embeddings=rows)
        columns[name] = column
    changed = dataclasses.replace(schema, categorical=columns)
    if not changed.dynamic:
        encodings = ", ".join(f"{name} {x.encoding}" for name, x in columns.items())
        raise ConfigError(
            "--vocabulary dynamic is for columns of encoding dynamic or vocabulary, and the schema "
            f"has none ({encodings}); change the schema, or leave --vocabulary out"
        )
    return changed


def _check_options(name: str, column: CategoricalColumn) -> None:
    defaults = CategoricalColumn()
    for option in _OF_LEARNED_VOCABULARIES:
        if getattr(column, option) != getattr(defaults, option):
            raise ConfigError(
                f"column {name!r} of the schema has {option}, which is for learned vocabularies; "
                "leave it out, or give the column encoding: dynamic and num_embeddings"
            )


def check_fixed(schema: Schema) -> None:
    """Check that no column of a schema has an open vocabulary."""
    if schema.dynamic:
        raise ConfigError(
            f"column {schema.dynamic[0]!r} of the schema has encoding dynamic; give --vocabulary "
            "dynamic"
        )


def scalars(model: nnx.Module) -> dict[str, float]:
    """Return each table's statistics by name, for a writer; empty without open vocabularies."""
    if tier_of(model) is None:
        return {}
    return {
        f"{PREFIX}{table}/{name}": value
        for table, values in statistics(model).items()
        for name, value in values.items()
    }


def describe(model: nnx.Module) -> str:
    """Return a text on hits, evictions and load of all tables; "" without open vocabularies.

    With row stores it adds the milliseconds per step that training waited for rows.
    """
    if tier_of(model) is None:
        return ""
    values = totals(model)
    text = (
        f"hits {values['hit_rate']:.1%}, evicted {values['evicted']:,}, load {values['load']:.1%}"
    )
    if "stall_ms" in values:
        text += f", stall {values['stall_ms']:.2f} ms"
    return text


def describe_stores(model: nnx.Module) -> str:
    """Return a text on the rows read from row stores and written to them; "" without stores."""
    if tier_of(model) is None or "stall_ms" not in (values := totals(model)):
        return ""
    moved = (
        f"{what} {values[name]:,} ({decimal(int(values[f'{name}_bytes']))})"
        for name, what in (("fetched", "fetched"), ("written", "written back"))
    )
    times = ", ".join(
        f"{what} {values[name]:.2f}"
        for name, what in (("stall_ms", "stall"), ("read_ms", "reads"), ("write_ms", "writes"))
    )
    return f"{', '.join(moved)}, new {values['initialized']:,}; ms a step: {times}"
