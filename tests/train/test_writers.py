"""Files as pandas, fastparquet, polars, DuckDB, Dask and Spark write them, before training.

`tests/data/writers/write.py` has written them.
"""

from __future__ import annotations

import dataclasses
import io
import pathlib
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from jaxrec.arguments import ConfigError
from jaxrec.data import DataError, SchemaError
from jaxrec.train.config import DataConfig, ModelConfig, TrainConfig
from jaxrec.train.features import learn_features, split_groups
from jaxrec.train.models import KINDS

pytestmark = pytest.mark.every_case

WRITERS = pathlib.Path(__file__).parents[1] / "data/writers"


def learned(path, **options):
    """Return the encoder, what was said, and the rows to train on and those held out."""
    data = DataConfig(path=path, **options)
    text = io.StringIO()
    encoder = learn_features(data, Console(file=text, width=1000, markup=False))
    training, held_out = (
        pa.concat_tables(
            [rows.read(group) for group in range(len(rows.sizes))], promote_options="permissive"
        )
        for rows in split_groups(data, encoder.schema)
    )
    return encoder, text.getvalue(), training, held_out


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What is wanted of a writer's files: features, what is said, and where the last rows are."""

    dense: str
    categorical: str
    said: tuple[str, ...]
    last: tuple[str, object] | None = None


BRANDS = "floats that are all whole, taken as ids: brand; --schema can make them dense\n"
INDEX = "of type int64, an index of pandas\n"
CASES = {
    "pandas": Wanted(
        "price row", "user brand is_new", (BRANDS, f"left out: column '__index_level_0__' {INDEX}")
    ),
    "fastparquet": Wanted(
        "price row", "user brand is_new", (BRANDS, f"left out: column 'index' {INDEX}")
    ),
    "polars": Wanted(
        "price row",
        "user brand is_new category",
        (
            "left out: column 'wide' of type extension<arrow.opaque[storage_type=fixed_size_binary",
            "left out: column 'nothing' of type null, which has no values\n",
        ),
    ),
    "dask": Wanted(
        "price row",
        "user brand is_new",
        (BRANDS, f"left out: column '__null_dask_index__' {INDEX}"),
    ),
    "duckdb": Wanted(
        "price row day.age",
        "user brand is_new day.weekday day.month hour country",
        (
            BRANDS,
            "left out: column 'request', since no value of it is in 2 training rows or more",
            "warning: column 'country' may come from the label 'label': it tells 100.0% of 54 lab",
        ),
        ("hour", 9),
    ),
    "spark": Wanted(
        "price row",
        "user brand tags date",
        ("warning: column 'date' is text for categories that looks like dates",),
        ("date", "2024-03-02"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_files_of(name):
    wanted = CASES[name]
    # A number for each row is no category.
    encoder, said, training, held_out = learned(WRITERS / name, dense=("row",))
    assert [*encoder.schema.dense] == wanted.dense.split()
    assert [*encoder.schema.categorical] == wanted.categorical.split()
    for sentence in wanted.said:
        assert sentence in said
    for kind in ("left out: ", "warning: ", "floats that"):
        assert said.count(kind) == str(wanted.said).count(kind)
    # All rows are there, and the last of them are held out.
    rows = sorted([*training["row"].to_pylist(), *held_out["row"].to_pylist()])
    assert rows == [row for row in range(60) if row != 3 or name not in ("pandas", "fastparquet")]
    if wanted.last is None:
        assert held_out["row"].to_pylist() == [*range(54, 60)]
    else:
        key, value = wanted.last
        assert held_out[key].to_pylist() == [value] * 6
    # A brand is what it is in all files: an id, or none.
    brands = encoder.vocabularies["brand"].values.to_pylist()
    assert sorted(brands) == [1, 2, 3, 4]
    batch = encoder.batch(training)
    known = {brand: 1 + place for place, brand in enumerate(brands)}
    values = [row["brand"] for row in training.to_pylist()]
    expected = [[0 if b is None or np.isnan(b) else known[int(b)]] for b in values]
    assert batch.features["brand"].to_lists() == expected


def write(directory: pathlib.Path, *tables: dict) -> pathlib.Path:
    """Write part files, each with labels."""
    directory.mkdir()
    for number, columns in enumerate(tables):
        rows = len(next(iter(columns.values())))
        labels = np.arange(rows) % 2
        pq.write_table(pa.table({"label": labels, **columns}), directory / f"p{number}.parquet")
    return directory


def test_parts_whose_types_differ_are_named_before_anything_is_learned(tmp_path):
    path = write(tmp_path / "x", {"user": ["a"] * 9}, {"user": [["a"]] * 9})
    with pytest.raises(DataError, match=r"p1.parquet, column 'user' is of type list<.*p0.parquet"):
        learned(path)
    schema = tmp_path / "schema.yaml"
    schema.write_text("{label: label, categorical: [user]}")
    with pytest.raises(DataError, match=r"p1.parquet, column 'user' is of type list<.*p0.parquet"):
        learned(path, schema=schema)
    with pytest.raises(SchemaError, match="there is no categorical column"):
        learned(path, exclude=("user",))


def test_parts_without_values_or_with_other_numbers(tmp_path):
    """A part of nulls alone, and integers that are floats where a null is among them."""
    path = write(
        tmp_path / "x",
        {"user": [None] * 4, "brand": [7, 8, 7, 8], "tags": [[]] * 4, "on": [None] * 4},
        {"user": ["a"] * 4, "brand": [7, None, 8.0, 8], "tags": [["t"]] * 4, "on": [True] * 4},
        {"user": ["a"] * 3, "brand": [7.0, 8, 7], "tags": [["t"]] * 3, "on": [None] * 3},
    )
    encoder, said, training, _ = learned(path)
    assert BRANDS in said
    assert not encoder.schema.dense
    assert encoder.vocabularies["brand"].values.to_pylist() == [8, 7]
    batch = encoder.batch(pa.table(training))
    ids = {name: batch.features[name].to_lists() for name in ("user", "brand", "tags")}
    assert ids["user"] == [[0]] * 4 + [[1]] * 6
    assert ids["brand"] == [[2], [1], [2], [1], [2], [0], [1], [1], [2], [1]]
    assert ids["tags"] == [[]] * 4 + [[1]] * 6
    assert batch.features["on"].to_lists() == [[0]] * 4 + [[1]] * 4 + [[0]] * 2
    # A new user, of whom nothing is known.
    batch = encoder.batch(pa.Table.from_pylist([dict.fromkeys(training.column_names)]))
    assert [batch.features[name].to_lists() for name in ids] == [[[0]], [[0]], [[]]]


def test_whole_numbers_stay_numbers_where_nothing_says_ids(tmp_path):
    path = write(tmp_path / "x", {"city": ["a"] * 20, "age": np.arange(20.0)})
    encoder, said, *_ = learned(path)
    assert [*encoder.schema.dense] == ["age"]
    assert "taken as numbers: age; --schema can make them categorical\n" in said


def test_a_pattern_held_out_by_another(tmp_path):
    part = {"city": ["a"] * 20, "age": np.arange(20.0)}
    for day in (1, 2, 3):
        write(tmp_path / f"day={day}", part)
    encoder, _, training, held_out = learned(tmp_path / "day=[12]", eval_path=tmp_path / "day=3")
    assert [*encoder.schema.categorical] == ["city", "day"]
    assert training["day"].to_pylist() == [1] * 20 + [2] * 20
    assert held_out["day"].to_pylist() == [3] * 20


def test_a_model_that_cannot_take_the_columns_is_refused_before_anything_is_learned(tmp_path):
    path = write(tmp_path / "x", {"city": ["a"] * 20})

    def learn(name):
        config = TrainConfig(data=DataConfig(path=path), model=ModelConfig(name=name))
        KINDS[name].learn(config, Console(quiet=True))

    with pytest.raises(ConfigError, match=r"and there is none; take --model.name dcn_v2 or --mod"):
        learn("dlrm")
    learn("deepfm")


def test_suspects_are_said(tmp_path):
    rng = np.random.default_rng(0)
    weights, clicks = rng.random(40), rng.integers(0, 2, 40)
    columns = {"city": ["a"] * 40, "weight": weights, "click": clicks}
    path = write(tmp_path / "x", columns | {"loved": np.arange(40) % 2 == 1})
    *_, said = learned(path)[:2]
    assert [line.split(";")[0] for line in said.splitlines() if line.startswith("warning")] == [
        "warning: column 'weight' looks like weights of the rows",
        "warning: column 'click' looks like another label, and is a feature",
        "warning: column 'loved' may come from the label 'label': it tells 100.0% of 36 labels",
    ]
    encoder, said, *_ = learned(path, weight="weight", exclude=("click", "loved"))
    assert "warning" not in said
    assert encoder.schema.columns == ("label", "weight", "city")
    assert encoder.batch(pq.read_table(path / "p0.parquet")).weights.tolist() == pytest.approx(
        weights
    )


def test_progress_ends_at_its_total(tmp_path):
    """Of the rows to train on and those held out, which are checked, too."""
    path = write(tmp_path / "x", {"tags": [["a"]] * 30})
    other = write(tmp_path / "y", {"tags": [["a"]] * 10})
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=200)
    learn_features(DataConfig(path=path, eval_path=other), console)
    assert re.findall(r"(\d+)/(\d+)", text.getvalue())[-1] == ("40", "40")
