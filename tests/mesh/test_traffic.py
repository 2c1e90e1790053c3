"""What compiled programs send, read from their text."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxrec.mesh.traffic import Collective, collectives, sent_bytes

SPLIT, WHOLE = PartitionSpec("data"), PartitionSpec()


@pytest.mark.parametrize(
    ("function", "out", "kind", "sent"),
    [
        # [32, 4] float32 on each of 8 devices: 512 bytes.
        (lambda x: jax.lax.all_to_all(x, "data", 0, 0, tiled=True), SPLIT, "all-to-all", 448),
        (lambda x: jax.lax.all_gather(x, "data", tiled=True), WHOLE, "all-gather", 3584),
        (lambda x: jax.lax.psum_scatter(x, "data", tiled=True), SPLIT, "reduce-scatter", 448),
        (lambda x: jax.lax.psum(x, "data"), WHOLE, "all-reduce", 896),
    ],
    ids=["all_to_all", "all_gather", "psum_scatter", "psum"],
)
def test_bytes_of_a_collective(function, out, kind, sent):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x = jax.device_put(jnp.zeros((256, 4)), NamedSharding(mesh, SPLIT))
    mapped = jax.shard_map(function, mesh=mesh, in_specs=SPLIT, out_specs=out, check_vma=False)
    found = collectives(jax.jit(mapped).lower(x).compile())
    assert [collective.kind for collective in found] == [kind]
    assert sent_bytes(found) == sent


PROGRAM = """HloModule step, num_partitions=4

%further (x: f32[8]) -> f32[8] {
  ROOT %again = f32[8]{0} all-to-all(%x), replica_groups={{0,1,2,3}}
}

%large (x: f32[8]) -> f32[64] {
  ROOT %a = f32[64]{0} all-gather(%x), replica_groups=[1,4]<=[4]
}

%small (x: f32[8]) -> f32[64] {
  %b = f32[16]{0} all-gather(%x), replica_groups=[2,2]<=[4]
  ROOT %pad = f32[64]{0} pad(%b)
}

%inner (x: f32[8]) -> (f32[8], u8[4]) {
  ROOT %c = (f32[8]{0}, u8[4]{0}) all-reduce(%x, %y), replica_groups={}
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %called = (f32[8]{0}, u8[4]{0}) call(%x), to_apply=%inner
  %taken = f32[64]{0} conditional(%p, %x, %x), branch_computations={%large, %small}
  %looped = f32[8]{0} while(%x), condition=%done, body=%further
  %start = (f32[2]{0:T(128)}, f32[8]{0:T(128)}) all-gather-start(%x), replica_groups={}
  %done = f32[8]{0} all-gather-done(%start)
  ROOT %permuted = bf16[3,2]{1,0} collective-permute(%x), source_target_pairs={{0,1}}
}
"""


def test_what_runs_on_a_batch_that_fits():
    """The branch that sends least, no further rounds, and what is called or begun early."""
    shapes = [(c.kind, c.shape, c.devices, c.sent_bytes) for c in collectives(PROGRAM)]
    assert shapes == [
        ("all-reduce", "f32[8], u8[4]", 4, 54),
        ("all-gather", "f32[16]", 2, 32),
        ("all-gather", "f32[8]", 4, 24),
        ("collective-permute", "bf16[3,2]", 4, 12),
    ]


def test_a_program_without_any():
    assert collectives(jax.jit(lambda x: x + 1).lower(jnp.zeros(3)).compile()) == []


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("{{3,1,0,2}}", ((3, 1, 0, 2),)),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['host'=2,'device'=4] {'device'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['host'=2,'device'=4] {'host'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['host'=2,'device'=4] {'host','device'}", (tuple(range(8)),)),
        ("mesh['axis_0'=8,'axis_1'=1] {'axis_0':(2)4}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['axis_0'=8] {'axis_0':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("{}", (tuple(range(8)),)),
    ],
)
def test_groups_of_devices(groups, expected):
    program = f"""HloModule step, num_partitions=8
ENTRY %main (x: f32[8]) -> f32[8] {{
  ROOT %sum = f32[8]{{0}} all-reduce(%x), replica_groups={groups}, to_apply=%add
}}
"""
    (found,) = collectives(program)
    assert found.groups == expected
    assert found.devices == len(expected[0])


ALL, PAIRS, ACROSS = (tuple(range(8)),), ((0, 1), (2, 3), (4, 5), (6, 7)), ((0, 4), (1, 5))


@pytest.mark.parametrize(
    ("kind", "groups", "devices_per_host", "expected"),
    [
        # Of 800 bytes, 100 for each device, those for the four of the other host.
        ("all-to-all", ALL, 4, 400),
        ("all-to-all", ALL, 8, 0),
        ("all-to-all", PAIRS, 4, 0),
        ("all-to-all", ACROSS, 4, 400),
        # Around a ring each device sends 7 x 800 bytes, and 2 of 8 devices send to another host.
        ("reduce-scatter", ALL, 4, 1400),
        ("all-gather", ALL, 4, 175),
        ("all-reduce", ALL, 2, 700),
        ("all-gather", PAIRS, 2, 0),
    ],
)
def test_bytes_between_hosts(kind, groups, devices_per_host, expected):
    collective = Collective(kind, "f32[200]", 800, groups)
    assert collective.sent_between_hosts(devices_per_host) == expected


@pytest.mark.parametrize(
    ("axes", "devices"), [(("host",), 2), (("device",), 4), (("host", "device"), 8)]
)
def test_devices_of_some_axes(axes, devices):
    mesh = jax.make_mesh((2, 4), ("host", "device"), axis_types=(AxisType.Auto,) * 2)
    mapped = jax.shard_map(
        lambda x: jax.lax.all_gather(x, axes, tiled=True),
        mesh=mesh, in_specs=PartitionSpec(("host", "device")), out_specs=WHOLE, check_vma=False,
    )  # fmt: skip
    (found,) = collectives(jax.jit(mapped).lower(jnp.zeros(8)).compile())
    assert (found.kind, found.devices) == ("all-gather", devices)
