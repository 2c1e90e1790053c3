"""Machines that are known."""

from __future__ import annotations

import pytest

from jaxrec.plan import Topology
from jaxrec.plan.machines import MACHINES, find_machine


@pytest.mark.parametrize("name", list(MACHINES))
def test_known_machines(name):
    topology = Topology.named(name, devices=16)
    assert topology.num_devices == 16
    assert topology.hosts * topology.devices_per_host == 16
    for rate in ("gather", "update", "sort", "copy"):
        assert 0 < getattr(topology, rate).seconds(items=1, bytes=1) < 1
    assert topology.within.all_to_all.byte <= topology.between.all_to_all.byte


@pytest.mark.parametrize(
    "names",
    [("a100", "h100", "h200", "b200"), ("tpu-v5e", "tpu-v6e", "tpu-v5p")],
    ids=["gpu", "tpu"],
)
def test_faster_memory_gathers_faster(names):
    gather = [Topology.named(name, devices=8).gather.byte for name in names]
    assert gather == sorted(gather, reverse=True)


@pytest.mark.parametrize(
    ("platform", "kind", "machine"),
    [
        ("gpu", "NVIDIA H100 80GB HBM3", "h100"),
        ("gpu", "NVIDIA H200", "h200"),
        ("gpu", "NVIDIA A100-SXM4-80GB", "a100"),
        ("gpu", "NVIDIA B200", "b200"),
        ("tpu", "TPU v5p", "tpu-v5p"),
        ("tpu", "TPU v5", "tpu-v5p"),
        ("tpu", "TPU v5 lite", "tpu-v5e"),
        ("tpu", "TPU v6 lite", "tpu-v6e"),
        ("tpu", "TPU v4", None),
        ("gpu", "Quadro", None),
        ("cpu", "cpu", "cpu"),
    ],
)
def test_machines_are_known_by_what_their_devices_call_themselves(platform, kind, machine):
    assert find_machine(platform, kind) == machine
