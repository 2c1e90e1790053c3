"""Exported models for the endpoint, and their batches as columns."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import numpy as np
import pyarrow as pa
from flax import nnx

import jaxrec
from jaxrec.data import Schema, learn_encoder
from jaxrec.serve import export, load, quantize
from jaxrec.serve.artifact.batch_spec import output_columns
from jaxrec.serve.artifact.load import ServedModel
from tests.serve.models import Case

SIZES = (1, 8, 32)


def exported(case: Case, path: pathlib.Path, dtype: str | None = None) -> ServedModel:
    """Export and load a model of `tests.serve.models`."""
    model = case.model if dtype is None else quantize(case.model, dtype)
    export(
        model, path, function=case.function, example=case.batch(20), batch_sizes=SIZES,
        platforms=("cpu",),
    )  # fmt: skip
    return load(path)


def columns_of(batch: tuple[Any, ...]) -> dict[str, list[Any]]:
    """Return the columns of a batch of arrays and features, as a request has them."""
    columns: dict[str, list[Any]] = {}
    for number, each in enumerate(batch):
        if isinstance(each, jaxrec.KeyedJaggedArray):
            columns |= {key: each[key].to_lists() for key in each.keys}
        else:
            columns[f"input{number}"] = np.asarray(each).tolist()
    return columns


def expected(case: Case, batch: tuple[Any, ...]) -> dict[str, np.ndarray]:
    """Return what the training model predicts, as columns."""
    return output_columns(jax.tree.map(np.asarray, case.expected(*batch)))


CITIES = ["Ulm", "Graz", "Bern"]


def raw_table(rows: int, seed: int = 0) -> pa.Table:
    """Return rows of raw columns: numbers with nulls, strings, 64-bit ids, lists, and labels."""
    rng = np.random.default_rng(seed)
    tags = [CITIES[:count] for count in rng.integers(0, 4, rows)]
    return pa.table(
        {
            "label": rng.integers(0, 2, rows),
            "age": pa.array(80 * rng.random(rows), mask=rng.random(rows) < 0.2),
            "city": pa.array([CITIES[i] for i in rng.integers(0, 3, rows)], pa.string()),
            "user": rng.integers(0, 2**62, rows),
            "tags": pa.array(tags, pa.list_(pa.string())),
        }
    )


def raw_model(path: pathlib.Path) -> ServedModel:
    """Export and load a model of raw columns."""
    schema = Schema.from_dict(
        {
            "label": "label",
            "dense": ["age"],
            "categorical": {
                "city": {},
                "user": {"encoding": "hash", "num_embeddings": 50},
                "tags": {},
            },
        }
    )
    encoder = learn_encoder(schema, [raw_table(200)])
    tables = [
        jaxrec.EmbeddingBagConfig(name, rows, 8, initializer="normal")
        for name, rows in encoder.table_rows.items()
    ]
    model = jaxrec.nn.DLRM(
        jaxrec.EmbeddingBagCollection(tables, rngs=nnx.Rngs(0)),
        num_dense=1,
        bottom_layer_sizes=(8,),
        top_layer_sizes=(8, 1),
        rngs=nnx.Rngs(0),
    )
    export(model, path, encoder=encoder, batch_sizes=SIZES, platforms=("cpu",))
    return load(path)
