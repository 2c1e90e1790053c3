"""The model of a run of `jaxrec train` and the encoder of its columns, for `jaxrec export`."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from flax import nnx
from jaxtyping import Array

from jaxrec.data import Clicks, DataError, SchemaError, TableEncoder
from jaxrec.data.encoder import NUM_ROWS, first_rows
from jaxrec.data.transforms import CATEGORICAL_NAMES, DENSE_NAMES
from jaxrec.data.vocabulary import FrozenVocabulary
from jaxrec.embed.collection import find_collections
from jaxrec.embed.variables import dense_variables, plain, value_like
from jaxrec.tier.deltas.tables import PublishedTable, published_tables
from jaxrec.tier.planning.tier import tier_of
from jaxrec.train.checkpoint import restore
from jaxrec.train.config import TrainConfig, VocabularyConfig
from jaxrec.train.datasets import ParquetDataset, split_datasets
from jaxrec.train.features import saved_encoder, text_encoder
from jaxrec.train.model import load_model, make_model, saved_config
from jaxrec.train.models import model_kind


def predictions(path: pathlib.Path, encoder: TableEncoder) -> Callable[..., dict[str, Array]]:
    """Return the function of a run's model whose outputs are exported.

    A ValueError says why the model of the run cannot be exported, if it cannot.
    """
    kind = model_kind(saved_config(path), encoder)
    if (reason := kind.refuse_export()) is not None:
        raise ValueError(f"{path}: {reason}")
    return kind.predictions


def load_run(
    path: pathlib.Path, step: int | None, *, has_example: bool
) -> tuple[nnx.Module, TableEncoder]:
    """Load a run's model at a step, and the encoder of its columns; step None is the newest.

    With ``has_example`` the encoder keeps two training rows, otherwise only their columns' types.
    """
    config = saved_config(path)
    encoder = _with_example(config, column_encoder(path))
    if encoder.example is not None and not has_example:
        # An example of no rows: the types of the columns stay known, and no training data is
        # exported.
        encoder = dataclasses.replace(encoder, example=encoder.example.slice(0, 0))
    if encoder.schema.dynamic:
        return _load_frozen(path, config, encoder, step)
    return load_model(path, step), encoder


def column_encoder(path: pathlib.Path) -> TableEncoder:
    """Return the encoder that a run saved; if it saved none, one of Criteo's columns."""
    config = saved_config(path)
    if (encoder := saved_encoder(path)) is not None:
        return encoder
    return text_encoder(config)


def _with_example(config: TrainConfig, encoder: TableEncoder) -> TableEncoder:
    """Add two training rows to an encoder that has none, if the rows can still be read."""
    if encoder.example is not None:
        return encoder
    try:
        training, _ = split_datasets(config, encoder=encoder)
        if isinstance(training, ParquetDataset):
            rows = training.groups.read(0)
        else:
            rows = _columns(next(training.log.chunks(training.start, training.start + NUM_ROWS)))
    except (OSError, DataError, SchemaError):  # the data are elsewhere by now
        return encoder
    return dataclasses.replace(encoder, example=first_rows(encoder.schema, rows))


def _columns(clicks: Clicks) -> pa.Table:
    """Return rows of a log as `jaxrec data criteo` writes them: counts and ids, a column each."""
    # The log holds ``log(count + 3)``; requests have the counts.
    counts = np.round(np.exp(clicks.dense.T) - 3).astype(np.int32)
    names = (*DENSE_NAMES, *CATEGORICAL_NAMES)
    return pa.table(dict(zip(names, (*counts, *clicks.ids.T), strict=True)))


def _load_frozen(
    path: pathlib.Path, config: TrainConfig, encoder: TableEncoder, step: int | None
) -> tuple[nnx.Module, TableEncoder]:
    """Load a run with open vocabularies as a model with fixed ones: the ids of its checkpoint.

    Row 0 of each table is for unknown ids. The other rows are those of the checkpoint's ids, also
    of ids whose rows were evicted to a store. The encoder's columns of encoding "dynamic" become
    "frozen".
    """
    vocabulary = config.vocabulary
    if vocabulary.store is not None:
        # The run's own store stays as it is: this model keeps its rows in memory.
        vocabulary = dataclasses.replace(vocabulary, store="memory://")
    opened = dataclasses.replace(config, vocabulary=vocabulary)
    model, _ = make_model(opened, num_steps=1, encoder=encoder)
    restore(model, path, step=step)
    tier = tier_of(model)
    assert tier is not None
    with tier.settled(model):
        tables = {name: _read_table(table) for name, table in published_tables(model).items()}
    vocabularies = {
        feature: FrozenVocabulary(table.ids)
        for table in tables.values()
        if table.ids is not None
        for feature in table.features
    }
    frozen = with_vocabularies(encoder, vocabularies)
    # The same model with fixed vocabularies, whose tables then take the rows.
    fixed = dataclasses.replace(config, vocabulary=VocabularyConfig())
    copy, _ = make_model(fixed, num_steps=1, encoder=frozen)
    variables = dense_variables(copy)
    for name, variable in dense_variables(model).items():
        target = variables[name]
        value = np.asarray(plain(variable.get_raw_value()))
        target.set_value(value_like(value, target.get_raw_value()))
    for path_in_model, collection in find_collections(copy).items():
        for each in collection.configs:
            name = f"{path_in_model}/{each.name}" if path_in_model else each.name
            collection.load_table(each.name, tables[name].rows)
    return copy, frozen


class _Table(NamedTuple):
    """Rows of one table of a run, ``[rows, dim]``, and the features that read it.

    In a table with an open vocabulary, row 0 is for unknown ids and row ``i + 1`` for ``ids[i]``;
    ``ids`` are int64 and ascend. None: the ids are row indices.
    """

    ids: np.ndarray | None
    rows: np.ndarray
    features: tuple[str, ...]


def _read_table(table: PublishedTable) -> _Table:
    parts = [(ids, values["rows"]) for ids, values in table.scan(with_state=False)]
    shape = table.shapes(with_state=False)["rows"]
    ids = np.concatenate([np.zeros(0, np.int64), *(part for part, _ in parts)])
    rows = np.concatenate([np.zeros((0, *shape.shape[1:]), shape.dtype), *(r for _, r in parts)])
    features = tuple(table.config.feature_names)
    if not table.facts.is_open:
        return _Table(None, rows, features)
    # Ascending, as `FrozenVocabulary` finds ids by bisection.
    order = np.argsort(ids)
    unknown = table.read_rows(np.arange(1), with_state=False)["rows"]
    return _Table(ids[order], np.concatenate([unknown, rows[order]]), features)


def with_vocabularies(
    encoder: TableEncoder, vocabularies: Mapping[str, FrozenVocabulary]
) -> TableEncoder:
    """Give an encoder vocabularies by column, whose encoding becomes "frozen"."""
    columns = {
        name: dataclasses.replace(
            column, encoding="frozen", num_embeddings=vocabularies[name].num_embeddings
        )
        if name in vocabularies
        else column
        for name, column in encoder.schema.categorical.items()
    }
    schema = dataclasses.replace(encoder.schema, categorical=columns)
    return dataclasses.replace(
        encoder, schema=schema, vocabularies={**encoder.vocabularies, **vocabularies}
    )
