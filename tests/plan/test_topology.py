"""Topologies that are named, saved and at hand."""

from __future__ import annotations

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
    ],
    ids=["older", "missing", "unknown", "number", "negative", "no hosts"],
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


def test_the_devices_of_one_replica():
    mesh = jax.make_mesh((2, 2, 2), ("replica", "host", "device"))
    topology = Topology.from_mesh(mesh, replica_axis="replica")
    assert (topology.hosts, topology.devices_per_host) == (2, 2)
    with pytest.raises(ValueError, match="replica_axis='copy' is not one of the mesh's axes"):
        Topology.from_mesh(mesh, replica_axis="copy")
