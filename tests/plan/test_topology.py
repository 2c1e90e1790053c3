"""Topologies that are named, saved and at hand."""

from __future__ import annotations

import dataclasses
import json

import jax
import pytest

from jaxrec.plan import Topology


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
        (lambda f: f.update(host_link=1), "measure it again by `jaxrec plan --calibrate`"),
        (lambda f: f.pop("gather"), "the topology has no field 'gather'"),
        (lambda f: f.update(extra=1), "the topology has an unknown field 'extra'"),
        (lambda f: f.update(gather=3), "not what `jaxrec plan --calibrate` writes"),
        (lambda f: f["gather"].update(byte=-1), "a rate's byte is seconds, 0 or more"),
        (lambda f: f.update(hosts=0), "hosts is an integer of 1 or more"),
        (lambda f: f.update(device_speed=[1, 2]), "device_speed has 2 numbers for 1 hosts of 8"),
        (lambda f: f.update(device_memory=80), "device_memory is a sequence of numbers, got 80"),
    ],
    ids=["older", "missing", "unknown", "number", "negative", "no hosts", "two speeds", "memory"],
)
def test_files_that_are_no_topologies(tmp_path, change, message):
    fields = Topology.named("h100", devices=8).to_dict()
    change(fields)
    path = tmp_path / "t.json"
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=rf"t\.json: .*{message}"):
        Topology.load(path)


def test_devices_that_differ_go_to_a_file_and_back(tmp_path):
    plain = Topology.named("h100", devices=16)
    mixed = dataclasses.replace(
        plain, device_memory=(80 * 10**9, 40 * 10**9), device_speed=range(1, 17)
    )
    assert mixed.device_memory == (80 * 10**9,) * 8 + (40 * 10**9,) * 8
    assert mixed.memory == 40 * 10**9
    assert mixed.relative_speeds == mixed.device_speed == tuple(range(1, 17))
    mixed.save(tmp_path / "mixed.json")
    assert Topology.load(tmp_path / "mixed.json") == mixed
    assert not {"device_memory", "device_speed"} & set(plain.to_dict())
    assert plain.relative_speeds == (1.0,) * 16
    assert mixed.with_devices(16) is mixed
    with pytest.raises(ValueError, match=r"2 hosts of 8 devices differ, .* plan for its 16 dev"):
        mixed.with_devices(8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"device_speed": (1, 0)}, "device_speed is numbers above 0, got 0"),
        ({"device_speed": (1, float("inf"))}, "device_speed is numbers above 0, got inf"),
        ({"device_speed": (1, True)}, "device_speed is numbers above 0, got True"),
        ({"packed_copies": -1.0}, "packed_copies is a number of 0 or more, got -1.0"),
        ({"packed_copies": float("nan")}, "packed_copies is a number of 0 or more, got nan"),
        ({"device_speed": "12"}, "device_speed is a sequence of numbers, got '12'"),
        ({"device_speed": (1,) * 5}, "5 numbers for 2 hosts of 4 devices; give one for each"),
        ({"device_memory": (1, 2.5)}, "device_memory is bytes, integers of 1 or more, got 2.5"),
        ({"device_memory": (1, 0)}, "device_memory is bytes, integers of 1 or more, got 0"),
    ],
)
def test_differences_that_are_not_possible(fields, message):
    topology = Topology.named("h100", devices=8, devices_per_host=4)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(topology, **fields)


def test_the_slowest_of_devices():
    plain = Topology.named("h100", devices=4)
    mixed = dataclasses.replace(plain, device_memory=(4, 3, 2, 5), device_speed=(2, 0.5, 1, 2))
    slowest = mixed.slowest
    assert (slowest.memory, slowest.device_memory, slowest.device_speed) == (2, (), ())
    assert slowest.gather == dataclasses.replace(plain.gather, byte=2 * plain.gather.byte)
    assert slowest.sort == dataclasses.replace(plain.sort, item=2 * plain.sort.item)
    assert slowest.within == plain.within
    assert mixed.relative_speeds == (4.0, 1.0, 2.0, 4.0)
    assert plain.slowest is plain


def test_clusters_are_joined():
    a100 = Topology.named("a100", devices=16)
    h200 = dataclasses.replace(Topology.named("h200", devices=8), device_speed=(0.5,) + (1,) * 7)
    both = Topology.joined([a100, h200])
    assert (both.hosts, both.devices_per_host, both.granule) == (3, 8, 64)
    assert both.packed_copies == 20
    assert both.device_memory == (80 * 10**9,) * 16 + (141 * 10**9,) * 8
    assert both.gather == a100.gather
    assert both.between == a100.between
    ratio = 4.8 / 2.039
    assert both.device_speed == pytest.approx((1,) * 16 + (ratio / 2,) + (ratio,) * 7)
    with pytest.raises(ValueError, match=r"as many devices, got \[8, 4\] on the hosts"):
        Topology.joined([a100, Topology.named("h100", devices=4)])
    with pytest.raises(ValueError, match="as many devices, got"):
        Topology.joined([])


def test_a_mesh_of_two_axes_has_hosts():
    topology = Topology.from_mesh(jax.make_mesh((2, 4), ("host", "device")))
    assert (topology.hosts, topology.devices_per_host) == (2, 4)
    one = Topology.from_mesh(jax.make_mesh((8,), ("data",)), memory=10**9)
    assert (one.hosts, one.devices_per_host, one.memory) == (1, 8, 10**9)


def test_the_devices_of_one_replica():
    mesh = jax.make_mesh((2, 2, 2), ("replica", "host", "device"))
    topology = Topology.from_mesh(mesh, replica_axis="replica")
    assert (topology.hosts, topology.devices_per_host) == (2, 2)
    with pytest.raises(ValueError, match="replica_axis='copy' is not one of the mesh's axes"):
        Topology.from_mesh(mesh, replica_axis="copy")
