"""The description of a served model, as ``/model`` and the page show it."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from jaxrec.serve.artifact.batch_spec import column_name
from jaxrec.serve.artifact.load import ServedModel
from jaxrec.serve.http.input_columns import InputColumns
from jaxrec.serve.http.limits import Limits


def describe(served: ServedModel, columns: InputColumns, limits: Limits) -> dict[str, Any]:
    """Return what a client must know of a model, as JSON has it."""
    manifest = served.manifest
    arrays = {array.name: array for array in manifest.arrays}
    return {
        "jaxrec": manifest.jaxrec,
        "jax": manifest.jax,
        "platform": served.platform,
        "batch_sizes": list(served.batch_sizes),
        "has_encoder": manifest.has_encoder,
        "tables_version": served.variables.version,
        "max_samples": limits.max_samples,
        "max_body": limits.max_body,
        "inputs": [column.describe() for column in columns.columns],
        "outputs": [
            {"name": column_name(each.name), "type": each.dtype, "shape": list(each.shape)}
            for each in manifest.outputs
        ],
        "tables": [
            {
                "name": table.name,
                "rows": table.num_embeddings,
                "dim": table.embedding_dim,
                "format": table.row_format,
                "pooling": table.pooling,
                "features": list(table.feature_names),
            }
            for table in manifest.tables
        ],
        "bytes": sum(
            math.prod(array.shape) * jnp.dtype(array.dtype).itemsize for array in arrays.values()
        ),
        "example": columns.example(),
    }
