"""Fingerprints of plans, as checkpoints keep them."""

from __future__ import annotations

import json

import pytest

import jaxrec
from jaxrec.mesh import row_wise
from jaxrec.plan import Fingerprint, Planner, ShardingPlan, Topology
from jaxrec.train.devices import Devices

pytestmark = pytest.mark.every_case


def plan(machine="h100", devices=8, *, rows=1000, dim=16, name="user", batch_size=64):
    tables = [
        jaxrec.EmbeddingBagConfig(name, rows, dim),
        jaxrec.EmbeddingBagConfig("day", 7, 16),
    ]
    planner = Planner(Topology.named(machine, devices=devices), time_limit=1, is_exact=False)
    return planner.plan(tables, batch_size=batch_size)


@pytest.mark.parametrize(
    ("now", "changes"),
    [
        ({}, []),
        ({"batch_size": 128}, []),  # the tables are the same
        ({"devices": 16}, ["machine: h100, 1 host of 8; now h100, 2 hosts of 8"]),
        ({"machine": "h200"}, ["machine: h100, 1 host of 8; now h200, 1 host of 8"]),
        ({"rows": 1001}, ["table 'user' is another"]),
        ({"dim": 32}, ["table 'user' is another"]),
        ({"name": "item"}, ["table 'user' is gone", "table 'item' is new"]),
    ],
    ids=["same", "batch", "devices", "machine", "rows", "columns", "name"],
)
def test_changes_since_a_plan_was_saved(now, changes):
    assert plan(**now).changes_since(plan().to_json()) == changes


def test_other_versions():
    fields = json.loads(plan().to_json())
    fields["fingerprint"]["version"] = "jaxrec 0.1, JAX 0.8.0"
    (change,) = plan().changes_since(json.dumps(fields))
    assert change.startswith("version: jaxrec 0.1, JAX 0.8.0; now jaxrec ")


def test_a_plan_by_hand_knows_its_version_alone():
    by_hand = ShardingPlan.from_dict({"user": row_wise()})
    assert by_hand.changes_since(plan().to_json()) == []
    assert plan().changes_since(by_hand.to_json()) == []


def test_a_run_on_one_device_says_so():
    (change,) = Devices().changes_since(plan().to_json())
    assert change == "machine: h100, 1 host of 8; now one device, without a plan"
    assert Devices(plan=plan()).changes_since(plan().to_json()) == []


@pytest.mark.parametrize(
    "text", ["{}", "", "[]", "null", '{"fingerprint": 1}', '{"fingerprint": {"tables": []}}']
)
def test_texts_without_a_fingerprint(text):
    assert Fingerprint.read(text) is None
    assert plan().changes_since(text) == []


def test_the_json_of_a_plan_is_read_as_before():
    saved = plan()
    assert ShardingPlan.from_json(saved.to_json(), saved.context) == saved
