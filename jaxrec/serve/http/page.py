"""The page at ``/``, and the description of the model that it and ``/model`` show."""

from __future__ import annotations

import base64
import hashlib
import math
import pathlib
import re
from typing import Any

import jax.numpy as jnp

from jaxrec.serve.artifact.batch_spec import column_name
from jaxrec.serve.artifact.served import ServedArtifact
from jaxrec.serve.http.input_columns import InputColumns
from jaxrec.serve.http.limits import Limits

HTML = pathlib.Path(__file__).with_name("page.html").read_bytes()


def _hashes(tag: str) -> str:
    """Return the hashes of the page's ``<tag>`` elements, as a Content-Security-Policy has them."""
    found = re.findall(rb"<%s>(.*?)</%s>" % (tag.encode(), tag.encode()), HTML, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(content).digest()).decode() for content in found)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


# The page runs only its own script, and asks only this server: an example or a name of a column
# that contains markup then runs nothing.
HEADERS = {
    "content-security-policy": (
        f"default-src 'none'; script-src {_hashes('script')}; style-src {_hashes('style')}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


def describe(served: ServedArtifact, columns: InputColumns[Any], limits: Limits) -> dict[str, Any]:
    """Return the description of a model for clients, in types of JSON."""
    manifest, ranker = served.manifest, served.manifest.ranker
    sizes = {}
    if ranker is not None:
        sizes = {
            "history_sizes": [size.events for size in ranker.caches],
            "candidate_sizes": list(ranker.candidate_sizes),
            "append_sizes": list(ranker.append_sizes),
            "max_candidates": manifest.batch.sizes[0].capacities[1][0],
        }
    return sizes | {
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
            math.prod(array.shape) * jnp.dtype(array.dtype).itemsize for array in manifest.arrays
        ),
        "example": columns.example(),
    }
