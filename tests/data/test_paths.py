"""Readers and writers take paths as text."""

from __future__ import annotations

import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jaxrec.data import (
    CriteoFile,
    Interactions,
    NpyGroups,
    ParquetGroups,
    movielens_movies,
    movielens_ratings,
    movielens_users,
)
from jaxrec.data.contiguous import ContiguousMap
from jaxrec.data.criteo.conversion import convert, is_converted, read_summary
from jaxrec.data.criteo.parts import Conversion
from tests.data.criteo.test_log import KAGGLE


def test_paths_as_text(tmp_path):
    here, log = str(tmp_path), os.fspath(KAGGLE)
    rows = CriteoFile(log, table_rows=(50,) * 26).num_rows
    assert convert(log, f"{here}/parts", Conversion(table_rows=(50,))).rows == rows
    assert is_converted(f"{here}/parts")
    assert read_summary(f"{here}/parts").rows == rows
    groups = ParquetGroups.of_directory(f"{here}/parts", ["label"])
    assert sum(groups.sizes) == rows
    pq.write_table(pa.table({"id": [1, 2, 3]}), f"{here}/ids.parquet")
    groups = ParquetGroups((f"{here}/ids.parquet",))
    assert groups.read(0)["id"].to_pylist() == [1, 2, 3]
    assert groups.location(0) == (tmp_path / "ids.parquet", 0)
    np.save(f"{here}/x.npy", np.arange(3))
    assert NpyGroups({"x": f"{here}/x.npy"}).sizes == (3,)
    numbers = ContiguousMap(np.array([5], np.uint32), np.array([2], np.int32))
    numbers.save(f"{here}/map.parquet")
    assert ContiguousMap.load(f"{here}/map.parquet").numbers.tolist() == [2]
    (tmp_path / "x.txt").write_text("1 5\n1 6\n1 7\n")
    assert Interactions.read(f"{here}/x.txt").num_items == 7


def test_movielens(tmp_path):
    here = str(tmp_path)
    (tmp_path / "ratings.dat").write_text("1::1193::5::978300760\n")
    (tmp_path / "movies.dat").write_text("1193::Title (1975)::Drama\n")
    (tmp_path / "users.dat").write_text("1::F::1::10::48067\n")
    for read in (movielens_ratings, movielens_movies, movielens_users):
        assert len(read(here)) == 1
