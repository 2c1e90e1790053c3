"""Statistics of batches, and the heat of rows."""

from __future__ import annotations

import numpy as np
import pytest

import jaxrec
from jaxrec.plan import ParameterConstraints, Planner, Statistics, Topology, sample_statistics
from jaxrec.plan.feature_statistics import EvenHeat, SampledHeat
from tests.plan.models import batch_of, log_uniform


def test_lengths_and_repeats_of_a_sample():
    batches = [batch_of([3, 5, 3, 9], [2, 0, 2]), batch_of([3, 8], [1, 1, 0])]
    seen = sample_statistics(batches).features["f"]
    assert seen.bags == 6
    assert seen.mean_length == 1.0
    assert seen.length_deviation == pytest.approx(np.std([2, 0, 2, 1, 1, 0]))
    assert seen.lookups == 6
    assert seen.largest_id == 9
    assert dict(zip(seen.times, seen.counts, strict=True)) == {3: 1, 1: 3}
    assert seen.distinct == 4
    assert sum(seen.row_bins) == 4
    assert sum(seen.lookup_bins) == 6


def test_batches_may_be_in_any_tree_and_have_weights_and_padding():
    weighted = jaxrec.KeyedJaggedArray.from_lengths(
        ["f"],
        np.array([1, 2, 3], np.int32),
        np.array([3], np.int32),
        weights=np.ones(3, np.float32),
    )
    seen = sample_statistics([{"x": (weighted, np.zeros(3))}])
    assert seen.features["f"].lookups == 3
    assert "f " in str(seen)
    with pytest.raises(ValueError, match="batches with KeyedJaggedArrays"):
        sample_statistics([np.zeros(3)])


def test_a_feature_without_ids():
    seen = sample_statistics([batch_of([], [0, 0])]).features["f"]
    assert (seen.lookups, seen.largest_id, seen.distinct) == (0, -1, 0)
    heat = seen.heat(100)
    assert heat.distinct(10) == EvenHeat(100).distinct(10)
    np.testing.assert_array_equal(heat.shares(np.ones(4), of_rows=True), 0.25)


def test_statistics_go_to_a_file_and_back(tmp_path):
    seen = sample_statistics([batch_of([3, 5, 3], [2, 1])])
    seen.save(tmp_path / "seen.json")
    assert Statistics.load(tmp_path / "seen.json") == seen
    (tmp_path / "other.json").write_text('{"f": {"bags": 3}}')
    with pytest.raises(ValueError, match=r"other\.json: these are not saved statistics"):
        Statistics.load(tmp_path / "other.json")


def test_statistics_take_the_place_of_guesses():
    random = np.random.default_rng(0)
    rows, bags = 100_000, 2048
    lengths = random.integers(0, 21, bags)
    ids = log_uniform(random, rows, int(lengths.sum()))
    seen = sample_statistics([batch_of(ids, lengths)])
    table = jaxrec.EmbeddingBagConfig("t", rows, 32, feature_names=("f",))
    topology = Topology.named("h100", devices=4)
    guessed = Planner(topology).plan([table], batch_size=bags).estimate.tables[0]
    found = Planner(topology, statistics=seen).plan([table], batch_size=bags).estimate.tables[0]
    assert guessed.lookups == bags / 4
    assert found.lookups == pytest.approx(lengths.sum() / 4)
    drawn = np.unique(log_uniform(random, rows, int(found.lookups))).size
    assert found.distinct == pytest.approx(drawn, rel=0.05)
    # Constraints override statistics.
    constraints = {"t": ParameterConstraints(pooling_factors=3)}
    planner = Planner(topology, constraints, statistics=seen)
    assert planner.plan([table], batch_size=bags).estimate.tables[0].lookups == 3 * bags / 4


def test_skewed_rows_make_their_owner_the_slowest():
    """Hot ids lie together: the device of the first rows gets more, and shards are turned so that
    it is not the same for every table."""
    random = np.random.default_rng(0)
    rows = 10_000
    batches = [batch_of(log_uniform(random, rows, 4096), [1] * 4096, f"f{i}") for i in range(4)]
    tables = [
        jaxrec.EmbeddingBagConfig(f"t{i}", rows, 32, feature_names=(f"f{i}",)) for i in range(4)
    ]
    constraints = {t.name: ParameterConstraints(sharding_types=["row_wise"]) for t in tables}
    planner = Planner(
        Topology.named("h100", devices=4), constraints, statistics=sample_statistics(batches)
    )
    plan = planner.plan(tables, batch_size=4096)
    first = [placement.places[:1] or (0,) for placement in plan.to_dict().values()]
    assert len(set(first)) > 1


@pytest.mark.parametrize("rows", [1, 10, 1000])
@pytest.mark.parametrize("lookups", [0, 1, 50, 2000])
def test_even_heat_beside_drawing(rows, lookups):
    random = np.random.default_rng(0)
    drawn = [np.unique(random.integers(0, rows, lookups)).size for _ in range(300)]
    error = 4 * np.std(drawn) / np.sqrt(300) + 1e-9
    assert EvenHeat(rows).distinct(lookups) == pytest.approx(np.mean(drawn), abs=error)


@pytest.mark.parametrize("part", [0.1, 0.5, 1.0])
def test_distinct_rows_of_a_part_of_the_sample_beside_drawing(part):
    random = np.random.default_rng(0)
    ids = log_uniform(random, 10_000, 5000)
    heat = sample_statistics([batch_of(ids, [1] * 5000)]).features["f"].heat(10_000)
    count = int(5000 * part)
    drawn = [np.unique(random.permutation(ids)[:count]).size for _ in range(50)]
    assert heat.distinct(count) == pytest.approx(np.mean(drawn), rel=0.01)


@pytest.mark.parametrize("times", [2, 8])
def test_distinct_rows_of_more_than_the_sample_beside_drawing(times):
    random = np.random.default_rng(0)
    sample = log_uniform(random, 100_000, 20_000)
    heat = sample_statistics([batch_of(sample, [1] * 20_000)]).features["f"].heat(100_000)
    drawn = np.unique(log_uniform(random, 100_000, 20_000 * times)).size
    assert heat.distinct(20_000 * times) == pytest.approx(drawn, rel=0.2)


def test_shares_of_runs_of_rows_beside_counting():
    random = np.random.default_rng(0)
    ids = log_uniform(random, 1024, 50_000)
    heat = sample_statistics([batch_of(ids, [1] * 50_000)]).features["f"].heat(1024)
    for sizes in ([1, 1], [1] * 8, [512, 256, 128, 128], [0, 768, 256]):
        sizes = np.array(sizes)
        ends = np.cumsum(sizes) * 1024 // sizes.sum()
        run = np.searchsorted(ends, np.arange(1024), side="right")
        expected = np.bincount(run[ids], minlength=sizes.size) / ids.size
        np.testing.assert_allclose(heat.shares(sizes, of_rows=False), expected, atol=0.01)
        rows = np.bincount(run[np.unique(ids)], minlength=sizes.size)
        np.testing.assert_allclose(heat.shares(sizes, of_rows=True), rows / rows.sum(), atol=0.02)


def test_a_table_larger_than_the_ids_seen():
    heat = sample_statistics([batch_of([0, 1, 2, 3], [4])]).features["f"].heat(8)
    np.testing.assert_allclose(heat.shares(np.ones(2), of_rows=True), [1, 0])


def test_heat_is_never_more_than_there_is():
    heat = SampledHeat(10, 8, (1,), (8,), (8.0,), (8.0,))
    assert heat.distinct(1_000_000) <= 10
    assert heat.distinct(4) <= 4
