"""Machines that are known, saved, measured and at hand."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest

from jaxrec.plan import Topology
from jaxrec.plan.calibrate import Measurement, _fit, calibrate
from jaxrec.plan.machines import MACHINES, find_machine
from jaxrec.plan.rates import Links, Rate


@pytest.mark.parametrize("name", list(MACHINES))
def test_known_machines(name):
    topology = Topology.named(name, devices=16)
    assert topology.num_devices == 16
    assert topology.hosts * topology.devices_per_host == 16
    for rate in ("gather", "update", "sort", "copy"):
        assert 0 < getattr(topology, rate).seconds(items=1, bytes=1) < 1
    assert topology.within.all_to_all.byte <= topology.between.all_to_all.byte


def test_newer_machines_are_faster():
    names = ("a100", "h100", "h200", "b200")
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
        ("tpu", "TPU v5 lite", None),
        ("gpu", "Quadro", None),
        ("cpu", "cpu", "cpu"),
    ],
)
def test_machines_are_known_by_what_their_devices_call_themselves(platform, kind, machine):
    assert find_machine(platform, kind) == machine


@pytest.mark.parametrize(
    ("devices", "per_host", "shape"),
    [(16, None, (2, 8)), (4, None, (1, 4)), (12, 4, (3, 4)), (1, None, (1, 1))],
)
def test_devices_fill_hosts(devices, per_host, shape):
    topology = Topology.named("h100", devices=devices, devices_per_host=per_host)
    assert (topology.hosts, topology.devices_per_host) == shape
    again = Topology.named("h100", devices=8).with_devices(devices, per_host)
    assert (again.hosts, again.devices_per_host) == shape


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"devices": 12}, "12 devices do not fill hosts of 8"),
        ({"devices": 0}, "devices is an integer of 1 or more"),
        ({"devices": 8, "devices_per_host": 3}, "do not fill hosts of 3"),
    ],
)
def test_devices_that_do_not(arguments, message):
    with pytest.raises(ValueError, match=message):
        Topology.named("h100", **arguments)


def test_unknown_machines():
    with pytest.raises(ValueError, match="no machine is named 'z80'; there are a100, h100"):
        Topology.named("z80", devices=8)


def test_a_topology_goes_to_a_file_and_back(tmp_path):
    topology = Topology.named("b200", devices=16)
    topology.save(tmp_path / "b200.json")
    assert Topology.load(tmp_path / "b200.json") == topology


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.pop("gather"), "the topology has no field 'gather'"),
        (lambda f: f.update(extra=1), "the topology has an unknown field 'extra'"),
        (lambda f: f.update(gather=3), "not what `jaxrec plan --calibrate` writes"),
        (lambda f: f["gather"].update(byte=-1), "a rate's byte is seconds, 0 or more"),
        (lambda f: f.update(hosts=0), "hosts is an integer of 1 or more"),
    ],
    ids=["missing", "unknown", "number", "negative", "no hosts"],
)
def test_files_that_are_no_topologies(tmp_path, change, message):
    fields = Topology.named("h100", devices=8).to_dict()
    change(fields)
    path = tmp_path / "t.json"
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=rf"t\.json: .*{message}"):
        Topology.load(path)


def test_a_mesh_of_two_axes_has_hosts():
    topology = Topology.from_mesh(jax.make_mesh((2, 4), ("host", "device")))
    assert (topology.hosts, topology.devices_per_host) == (2, 4)
    one = Topology.from_mesh(jax.make_mesh((8,), ("data",)), memory=10**9)
    assert (one.hosts, one.devices_per_host, one.memory) == (1, 8, 10**9)


def test_a_fit_finds_the_rate_that_times_were_made_of():
    rate = Rate(call=1e-4, item=2e-8, byte=3e-9)
    found = [
        Measurement("gather", items, items * width, rate.seconds(items=items, bytes=items * width))
        for items in (1000, 10_000, 100_000)
        for width in (64, 256, 1024)
    ]
    fitted = _fit(found)
    for field in ("call", "item", "byte"):
        assert getattr(fitted, field) == pytest.approx(getattr(rate, field), rel=1e-6)


def test_a_fit_takes_off_what_is_known_and_never_falls_below_zero():
    found = [
        Measurement("update", items, items * 64, 3e-8 * items, known=1e-8 * items)
        for items in (1000, 10_000, 100_000)
    ]
    fitted = _fit(found)
    assert fitted.seconds(items=10_000, bytes=640_000) == pytest.approx(2e-4)
    all_known = [dataclasses.replace(m, known=2 * m.seconds) for m in found]
    assert _fit(all_known) == Rate(0.0, 0.0, 0.0)


def test_calibration_measures_every_operation():
    mesh = jax.make_mesh((2, 2), ("host", "device"), devices=jax.devices()[:4])
    measured: list[Measurement] = []
    topology = calibrate(mesh, name="here", seconds=1e-4, report=measured.append)
    assert {m.operation for m in measured} == {
        *("sort", "gather", "update", "copy", "host_link", "disk_link"),
        *("all_to_all", "reduce_scatter", "all_gather"),
    }
    assert (topology.name, topology.hosts, topology.devices_per_host) == ("here", 2, 2)
    assert all(m.seconds > 0 for m in measured)
    for rate in (topology.gather, topology.sort, topology.copy, topology.within.all_to_all):
        assert rate.seconds(items=10_000, bytes=1_000_000) > 0
    # Links within hosts and between them are measured apart.
    assert sum(m.operation == "all_to_all" for m in measured) == 6


def test_one_device_has_links_that_take_nothing():
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    topology = calibrate(mesh, seconds=1e-4)
    assert topology.within == Links.of(0.0, 1e12)
    assert np.isfinite(topology.gather.byte)
