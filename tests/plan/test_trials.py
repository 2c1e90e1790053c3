"""Dry runs: one model on several clusters, in one table."""

from __future__ import annotations

import pytest

import jaxrec
from jaxrec.plan import ParameterConstraints, Planner, Topology, dry_run, render_trials
from jaxrec.plan.trials import parse_machines

pytestmark = pytest.mark.every_case

TABLES = [jaxrec.EmbeddingBagConfig("user", 10**9, 64), jaxrec.EmbeddingBagConfig("day", 40, 64)]


@pytest.fixture(scope="module")
def trials():
    constraints = {"user": ParameterConstraints(pooling_factors=10)}
    planner = Planner(Topology.named("a100", devices=1), constraints, time_limit=1)
    machines = ["1xh100", "8xh100", "2x8xh200", "6xh100"]
    return list(
        dry_run(planner, TABLES, machines, batch_size=4096, prices={"h100": 2.0, "a100": 1.0})
    )


def test_a_plan_for_each_cluster_that_can_have_one(trials):
    assert [trial.plan is not None for trial in trials] == [False, True, True, False]
    assert trials[0].reason.startswith("no plan fits 1 device")
    assert "divided among 6 devices, got batch_size=4096" in trials[3].reason
    assert [trial.reason for trial in trials[1:3]] == ["", ""]
    # Each plan is the one that a planner for that cluster makes.
    for trial in trials[1:3]:
        assert trial.plan.num_devices == trial.topology.num_devices
        planner = Planner(
            trial.topology, {"user": ParameterConstraints(pooling_factors=10)}, time_limit=1
        )
        alone = planner.plan(TABLES, batch_size=4096)
        assert (alone.to_dict(), alone.context) == (trial.plan.to_dict(), trial.plan.context)


def test_costs_are_prices_of_the_step(trials):
    seconds = trials[1].plan.estimate.seconds
    assert trials[1].cost == pytest.approx(8 * 2.0 * seconds / 3600 * 10**9 / 4096)
    assert [trials[i].cost for i in (0, 2, 3)] == [None, None, None]


def test_the_table(trials):
    text = render_trials(trials)
    header, _, *rows = text.splitlines()[1:7]
    lines = {row.split()[0]: row for row in rows}
    assert "prefetch" not in header  # no cluster has caches
    assert [lines[trial.machines].split()[1] for trial in trials] == ["no", "yes", "yes", "no"]
    cells = [cell for cell in lines["8xh100"].split() if cell.endswith("%")]
    shares = [int(cell[:-1]) for cell in cells[:-1]]  # and the gap
    assert sum(shares) == pytest.approx(100, abs=2)
    estimate = trials[1].plan.estimate
    assert shares[0] == round(100 * estimate.phases["forward compute"] / estimate.seconds)
    assert lines["8xh100"].endswith(f"{trials[1].cost:.4g}")
    assert "cost" not in render_trials(trials[2:3])
    assert "1xh100: no plan fits 1 device" in text


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("8xh100", ("h100", 1, 8)),
        ("16xH100", ("h100", 2, 8)),
        ("2x4xtpu-v5p", ("tpu-v5p", 2, 4)),
        ("128x1xa100", ("a100", 128, 1)),
    ],
)
def test_clusters_by_name(text, shape):
    topology = parse_machines(text)
    assert (topology.name, topology.hosts, topology.devices_per_host) == shape


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h100", "such as 8xh100 or 2x8xh200, got 'h100'"),
        ("8 x h100", "got '8 x h100'"),
        ("8xz80", "no machine is named 'z80'"),
        ("12xh100", "12 devices do not fill hosts of 8"),
        ("0xh100", "devices is an integer of 1 or more, got 0"),
        ("0x8xh100", "devices is an integer of 1 or more, got 0"),
        ("2x0xh100", "devices is an integer of 1 or more, got 0"),
    ],
)
def test_clusters_that_are_none(text, message):
    with pytest.raises(ValueError, match=message):
        parse_machines(text)
