"""Indexes of items, in which faiss finds the nearest vectors of an exported item tower."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import warnings
import zlib
from typing import Any, Literal, get_args

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Float, Int

from jaxrec.files.atomic import write_atomically
from jaxrec.files.manifest import StoredFile, describe_files
from jaxrec.serve.artifact.batch_spec import output_columns
from jaxrec.serve.artifact.load import ServedModel, load
from jaxrec.serve.artifact.manifest import MANIFEST_FILE, ArtifactError
from jaxrec.serve.artifact.served import check_files
from jaxrec.serve.http.argument_columns import ArgumentColumns

FORMAT = "jaxrec index 1"
DESCRIPTION_FILE = "index.json"
VECTORS_FILE = "index.faiss"
ITEMS_FILE = "items.parquet"

Metric = Literal["inner_product", "l2"]


class Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of an index's ``index.json``.

    ``kind`` is faiss's name of the index, such as "IVF128,Flat". ``model`` is the CRC-32 of the
    item tower's manifest in eight hex digits.
    """

    format: str
    kind: str
    metric: str
    dim: int
    num_items: int
    model: str
    files: dict[str, StoredFile]


@dataclasses.dataclass(frozen=True, eq=False)
class Neighbours:
    """The items that a search returns, the best first.

    Attributes:
        rows: ``[queries, k]`` int64 rows of `ItemIndex.items`. An approximate index may find fewer
            than ``k`` items for a query: the last rows are -1 then.
        scores: ``[queries, k]`` float32 inner products, descending, or squared distances,
            ascending; NaN where the row is -1.
    """

    rows: Int[np.ndarray, "queries k"]
    scores: Float[np.ndarray, "queries k"]


@dataclasses.dataclass(frozen=True, eq=False)
class ItemIndex:
    """An index of items that `load_index` read. Several threads may search it at once.

    Attributes:
        items: Table that the index was made of.
        description: Kind, metric and sizes.
        faiss_index: The index as a faiss object.
    """

    items: pa.Table
    description: Description
    faiss_index: Any

    def search(self, queries: Any, k: int) -> Neighbours:
        """Return the items whose vectors are nearest to the vectors of queries.

        Args:
            queries: ``[queries, dim]`` vectors of queries, float.
            k: Number of items for each query, from 1 to the number of items.

        Raises:
            ValueError: The queries have another shape or a number that is not finite, or ``k`` is
                out of range.
        """
        vectors = _checked_vectors(queries, "the queries")
        if vectors.shape[1] != self.description.dim:
            raise ValueError(
                f"the queries must have the shape [queries, {self.description.dim}], got "
                f"{vectors.shape}; give the outputs of the query tower of the same model"
            )
        if not 1 <= k <= self.description.num_items:
            raise ValueError(f"k must be from 1 to {self.description.num_items} items, got {k}")
        scores, rows = self.faiss_index.search(vectors, k)
        # faiss fills missing items with -1 and the largest float, which a mean of scores would take
        # for a score.
        return Neighbours(rows, np.where(rows < 0, np.float32(np.nan), scores))


def write_index(
    model: str | os.PathLike[str],
    items: pa.Table,
    path: str | os.PathLike[str] | None = None,
    *,
    kind: str = "Flat",
    parameters: str = "",
    metric: Metric = "inner_product",
    output: str | None = None,
) -> None:
    """Predict the vectors of all items by an exported item tower, and write an index of them.

    The index is a folder with the vectors in faiss's format, the table of items, and checksums. It
    appears when it is complete. The vectors of all items are in memory meanwhile.

    Args:
        model: Folder of the item tower, which `jaxrec.serve.export` wrote.
        items: A table with a row for each item. It has the columns that the tower reads: the
            columns of its encoder, or those of a request (see `jaxrec.serve.load` and
            ``docs/serving.md``). It may have others, which the index keeps for the ranker.
        path: Folder of the index; an index that is there already is replaced. None: beside the
            model, ``MODEL.index``.
        kind: The index in the words of faiss's ``index_factory``: "Flat" is exact search,
            "IVF128,Flat" searches some of 128 inverted lists, "HNSW32" a graph.
        parameters: Parameters of the searches in faiss's words, such as "nprobe=24" or
            "efSearch=64"; "": faiss's defaults.
        metric: "inner_product" finds the largest inner products, "l2" the smallest distances.
        output: Name of the tower's output with the vectors; None: the only output.

    Raises:
        ModuleNotFoundError: faiss is not installed (``pip install 'jaxrec[retrieval]'``).
        ArtifactError: The folder holds no exported model, or it cannot run here.
        TypeError, ValueError: ``items`` lacks a column, has no rows or an invalid value; the output
            is not one vector for each item, or has a number that is not finite; or faiss knows no
            such kind or parameter, or needs more items for it.
        FileExistsError: The path is something else than an index.

    Example:
        >>> import tempfile
        >>> import jaxrec
        >>> from flax import nnx
        >>> config = jaxrec.EmbeddingBagConfig("item", num_embeddings=100, embedding_dim=8)
        >>> tower = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
        >>> path = pathlib.Path(tempfile.mkdtemp(), "items")
        >>> jaxrec.serve.export(tower, path, batch_sizes=(64,), platforms=("cpu",))
        >>> write_index(path, pa.table({"item": range(100)}))
        >>> index = load_index(f"{path}.index", model=path)
        >>> index.search(tower.table("item")[:2], k=3).rows.shape
        (2, 3)
    """
    faiss = _faiss()
    path = pathlib.Path(f"{os.fspath(model)}.index" if path is None else path)
    if path.exists() and not (path / DESCRIPTION_FILE).is_file():
        raise FileExistsError(
            f"{path} exists and is not an index of items; give another path, or remove it"
        )
    if metric not in get_args(Metric):
        raise ValueError(f"metric is one of {', '.join(get_args(Metric))}; got {metric!r}")
    vectors = _vectors(load(model), items, output)
    dim = vectors.shape[1]
    measure = {"inner_product": faiss.METRIC_INNER_PRODUCT, "l2": faiss.METRIC_L2}[metric]
    try:
        index = faiss.index_factory(dim, kind, measure)
        index.train(vectors)
        index.add(vectors)
        # Set before the index is written, as faiss writes them with it.
        if parameters:
            faiss.ParameterSpace().set_index_parameters(index, parameters)
    except RuntimeError as error:
        raise ValueError(
            f"faiss makes no index of kind {kind!r} with parameters {parameters!r} for "
            f"{len(vectors):,} vectors of {dim} elements: {_reason(error)}"
        ) from None
    with write_atomically(path) as unfinished:
        unfinished.mkdir()
        faiss.write_index(index, str(unfinished / VECTORS_FILE))
        pq.write_table(items, unfinished / ITEMS_FILE)
        files = describe_files(unfinished)
        of_model = _checksum(model)
        description = Description(FORMAT, kind, metric, dim, len(items), of_model, files)
        (unfinished / DESCRIPTION_FILE).write_bytes(msgspec.json.encode(description))


def load_index(
    path: str | os.PathLike[str],
    *,
    model: str | os.PathLike[str] | None = None,
    verify: bool = True,
) -> ItemIndex:
    """Read an index that `write_index` wrote.

    Args:
        path: Folder of the index.
        model: Folder of the item tower that must have made the index. Queries of a newer export
            then never meet vectors of an older one. None: the tower is not checked.
        verify: Whether the files are compared with their checksums, or only their sizes.

    Raises:
        ModuleNotFoundError: faiss is not installed.
        ArtifactError: The folder holds no index; a file is missing, cut short or altered; or the
            index was made by another export of the model.
    """
    faiss = _faiss()
    path = pathlib.Path(path)
    description = _read_description(path)
    if model is not None and _checksum(model) != description.model:
        raise ArtifactError(
            f"{path} was made by another export than {os.fspath(model)}; make it again by "
            "jaxrec.serve.write_index"
        )
    check_files(path, description.files, with_checksums=verify)
    try:
        index = faiss.read_index(str(path / VECTORS_FILE))
        items = pq.read_table(path / ITEMS_FILE)
    except (RuntimeError, pa.ArrowException) as error:
        raise ArtifactError(f"{path} cannot be read: {_reason(error)}") from None
    if (index.ntotal, index.d, len(items)) != (
        description.num_items,
        description.dim,
        description.num_items,
    ):
        raise ArtifactError(f"{path} has other items than its {DESCRIPTION_FILE} says")
    return ItemIndex(items, description, index)


def _faiss() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its bindings warn when they are first imported
            import faiss
    except ImportError:
        raise ModuleNotFoundError(
            "indexes of items need faiss: pip install 'jaxrec[retrieval]'", name="faiss"
        ) from None
    return faiss


def _vectors(
    served: ServedModel, items: pa.Table, output: str | None
) -> Float[np.ndarray, "items dim"]:
    """Predict the vector of each item of a table, by the tower's output of that name."""
    if not len(items):
        raise ValueError("the table of items has no rows")
    if served.encoder is not None:
        outputs = output_columns(served.predict_columns(items))
    else:
        columns = ArgumentColumns(served.manifest.batch)
        if missing := [name for name in columns.names if name not in items.column_names]:
            raise ValueError(
                f"the table of items has no column {missing[0]!r}, which the model reads; its "
                f"columns are {', '.join(items.column_names)}"
            )
        outputs = output_columns(served.predict_request(columns.request(items)))
    if output is None and len(outputs) == 1:
        (output,) = outputs
    if output not in outputs:
        asked = "it has several" if output is None else f"got {output!r}"
        raise ValueError(f"output is one of {', '.join(outputs)}; {asked}")
    return _checked_vectors(outputs[output], f"output {output!r}")


def _checked_vectors(values: Any, name: str) -> Float[np.ndarray, "rows dim"]:
    """Convert vectors to row-major float32; a ValueError names a wrong shape or infinite row."""
    vectors = np.ascontiguousarray(values, np.float32)
    if vectors.ndim != 2 or not vectors.shape[1]:
        raise ValueError(f"{name} must have the shape [rows, dim], got {vectors.shape}")
    is_finite = np.isfinite(vectors).all(axis=1)
    if not is_finite.all():
        raise ValueError(f"{name}, row {int(np.argmin(is_finite))}: a number is not finite")
    return vectors


def _checksum(model: str | os.PathLike[str]) -> str:
    """Return the CRC-32 of a model's manifest, which contains the checksums of all its files."""
    try:
        return f"{zlib.crc32(pathlib.Path(model, MANIFEST_FILE).read_bytes()):08x}"
    except OSError as error:
        raise ArtifactError(f"{os.fspath(model)} is not an exported model: {error}") from None


def _read_description(path: pathlib.Path) -> Description:
    try:
        content = (path / DESCRIPTION_FILE).read_bytes()
    except OSError as error:
        raise ArtifactError(
            f"{path} is not an index of items ({error}); jaxrec.serve.write_index writes one"
        ) from None
    try:
        description = msgspec.json.decode(content, type=Description)
    except msgspec.DecodeError as error:
        raise ArtifactError(f"{path / DESCRIPTION_FILE} is damaged: {error}") from None
    if description.format != FORMAT:
        raise ArtifactError(
            f"{path / DESCRIPTION_FILE} has the format {description.format!r}, and this jaxrec "
            f"reads {FORMAT!r}"
        )
    if missing := {VECTORS_FILE, ITEMS_FILE} - {*description.files}:
        raise ArtifactError(f"{path / DESCRIPTION_FILE} does not list {min(missing)}")
    return description


def _reason(error: Exception) -> str:
    """Return the last line of faiss's error message, without "Error: "; other lines name code."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1].removeprefix("Error: ")
