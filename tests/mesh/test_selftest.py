"""The check of an installation: what it says, and that it finds what is wrong."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxrec.mesh import selftest
from jaxrec.mesh.selftest import Options
from tests.forks import free_port

QUICK = Options(types=("row_wise:pooled",), samples=4, rows=20, steps=2, mebibytes=(1,))


@pytest.fixture
def joined(monkeypatch):
    """These tests' devices are there already."""
    monkeypatch.setattr(selftest, "join_processes", lambda *options: None)


@pytest.mark.usefixtures("joined")
def test_everything_is_well(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")  # no name is cut
    assert selftest.main(QUICK) == 0
    out = capsys.readouterr().out
    assert "processes: 1, devices: 8" in out
    assert "process 0: 8 cpu" in out
    assert "row_wise:pooled" in out
    assert "reduce-scatter" in out
    for collective in ("all_to_all", "all_gather", "psum_scatter", "psum"):
        assert collective in out
    assert "All 1 sharding types give what one device gives." in out


@pytest.mark.slow
@pytest.mark.usefixtures("joined")
@pytest.mark.parametrize("devices", [4, 8])
def test_sums_of_cut_rows_are_well(monkeypatch, devices):
    """With the options that a user gets, rounding does not fail the check."""
    if devices < 8:
        shape = (2, devices // 2)
        axes = (AxisType.Auto,) * 2
        mesh = jax.make_mesh(shape, ("host", "device"), axes, devices=jax.devices()[:devices])
        monkeypatch.setattr(selftest, "make_mesh", lambda kind: mesh)
    checked = selftest.check("grid:pooled", Options())
    assert checked.error is None
    assert checked.deviation < 0.1


def wrong_weight(monkeypatch):
    """One element of one table on the mesh is off by a little."""
    made = selftest.init_on_mesh

    def off(*args):
        tables = made(*args)
        name = next(iter(tables.rows))
        tables.rows[name] = tables.rows[name].at[3, 1].add(jnp.float32(1e-3))
        return tables

    monkeypatch.setattr(selftest, "init_on_mesh", off)


def wrong_row(monkeypatch):
    """One lookup goes to the row beside its own."""
    made = selftest.shard_batch

    def shifted(batch, mesh):
        values = np.array(batch.values)
        values[0] ^= 1
        return made(dataclasses.replace(batch, values=values), mesh)

    monkeypatch.setattr(selftest, "shard_batch", shifted)


def wrong_update(monkeypatch):
    """The tables on the mesh learn a hundredth too much."""
    made = selftest.layout_tables

    def off(configs, optimizer):
        return made(configs, dataclasses.replace(optimizer, learning_rate=0.101))

    monkeypatch.setattr(selftest, "layout_tables", off)


@pytest.mark.usefixtures("joined")
@pytest.mark.parametrize("kind", ["row_wise:pooled", "grid:pooled"])
@pytest.mark.parametrize("spoil", [wrong_weight, wrong_row, wrong_update])
def test_what_is_wrong_is_found(capsys, monkeypatch, spoil, kind):
    spoil(monkeypatch)
    assert selftest.main(dataclasses.replace(QUICK, types=(kind,), mebibytes=())) == 1
    out, err = capsys.readouterr()
    assert f"process 0: {kind} FAILED:" in err
    assert "times the difference allowed to one device's result" in err
    assert "FAILED: 1 of 1 sharding types differ" in out


@pytest.mark.usefixtures("joined")
def test_an_error_is_reported_and_the_others_go_on(capsys, monkeypatch):
    made = selftest.make_mesh

    def broken(kind):
        if kind == "data_parallel":
            raise RuntimeError("no link to device 3\nmore of it")
        return made(kind)

    monkeypatch.setattr(selftest, "make_mesh", broken)
    types = ("data_parallel", *QUICK.types)
    options = Options(types=types, samples=4, rows=20, steps=1, mebibytes=())
    assert selftest.main(options) == 1
    out, err = capsys.readouterr()
    assert err == "process 0: data_parallel FAILED: RuntimeError: no link to device 3\n"
    assert "FAILED: 1 of 2 sharding types differ" in out


@pytest.mark.parametrize("kind", selftest.TYPES)
@pytest.mark.parametrize("devices", [(1, 1), (1, 6), (3, 2), (2, 8)], ids=str)
def test_every_type_fits_every_mesh(kind, devices):
    """Meshes that are not there: their shapes are enough."""
    shape = selftest.MeshShape(*devices)
    configs = selftest.make_configs(QUICK, shape)
    for config in configs:
        placement = selftest.place(kind, configs, shape)[config.name]
        blocks = placement.cut(config, shape)
        covered = sum(
            (block.rows[1] - block.rows[0]) * (block.columns[1] - block.columns[0])
            for block in blocks
        )
        assert covered == config.num_embeddings * config.embedding_dim


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"types": ("rows",)}, "--types: 'rows' is not one of data_parallel"),
        ({"steps": 0}, "--steps 0 is less than 1"),
        ({"coordinator": "host:1"}, "--coordinator needs --num-processes and --process-id"),
    ],
    ids=["types", "steps", "coordinator"],
)
def test_options(fields, message):
    with pytest.raises(ValueError, match=message):
        Options(**fields)


@pytest.mark.slow
def test_processes_that_slurm_started(forks):
    """What JAX looks at is the environment that srun makes."""
    slurm = {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "JAX_COORDINATOR_PORT": str(free_port()),
    }
    options = ["--cpu-devices", "1", "--types", "row_wise:rows", "--rows", "20", "--samples", "4"]
    options += ["--steps", "1", "--mebibytes", "1"]
    processes = [
        forks.run(
            "jaxrec.mesh.selftest",
            *options,
            environ=slurm | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank},
        )
        for rank in "01"
    ]
    try:
        codes = [process.wait(300) for process in processes]
    finally:
        for process in processes:
            process.stop()
    first, second = processes
    assert codes == [0, 0], first.errors + second.errors
    assert f"JAX {jax.__version__}; processes: 2, devices: 2" in first.output
    assert "All 1 sharding types give what one device gives." in first.output
    assert "sharding types" not in second.output
