"""`jaxrec plan`, from the files that it reads to those that it writes."""

from __future__ import annotations

import json
import sys

import jax
import pytest

from jaxrec.commands import main
from jaxrec.mesh import table_wise
from jaxrec.plan import Planner, ShardingPlan, Topology, sample_statistics
from jaxrec.plan.model_file import read_model_file
from tests.plan.models import MODEL, batch_of

pytestmark = pytest.mark.every_case


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.yaml"
    path.write_text(MODEL)
    return path


def run(capsys, *arguments):
    """Exit code, output and errors."""
    code = main(["plan", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_plan_is_printed_drawn_and_written(capsys, model, tmp_path):
    out, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    code, text, _ = run(capsys, model, "--devices", 16, "--output", out, "--plot", picture)
    assert code == 0
    assert "no plan takes less than" in text
    assert "product" in text
    placements = ShardingPlan.from_json(out.read_text()).to_dict()
    assert placements["day"] == table_wise(1)
    assert placements["product"].kind in ("row_wise", "table_wise")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_plan_is_shown_again_and_refused_for_something_else(capsys, model, tmp_path):
    out = tmp_path / "plan.json"
    _, first, _ = run(capsys, model, "--output", out)
    code, again, _ = run(capsys, model, "--load", out)
    assert (code, again) == (0, first)
    code, _, error = run(capsys, model, "--load", out, "--batch-size", 16384)
    assert code == 1
    assert error.startswith("jaxrec plan: the plan was made for something else: batch_size: 8192")
    assert len(error.splitlines()) == 1


def test_a_file_of_devices_and_one_of_statistics_are_read(capsys, model, tmp_path):
    Topology.named("a100", devices=8).save(tmp_path / "here.json")
    sample_statistics([batch_of([1, 2, 3, 4], [4], "user")]).save(tmp_path / "seen.json")
    files = ("--topology", tmp_path / "here.json", "--statistics", tmp_path / "seen.json")
    code, text, _ = run(capsys, model, *files, "--devices", 4)
    assert code == 0
    # Four ids of each of 2048 samples a device.
    (user,) = (line for line in text.splitlines() if line.startswith("user "))
    assert "8,192" in user


def test_a_file_of_devices_that_differ_is_read(capsys, model, tmp_path):
    machines = [Topology.named(name, devices=4) for name in ("a100", "h200")]
    Topology.joined(machines).save(tmp_path / "mixed.json")
    given = (model, "--topology", tmp_path / "mixed.json", "--devices", 8, "--devices-per-host", 4)
    code, text, _ = run(capsys, *given)
    assert code == 0
    assert "of 80.00 GB on each device" in text
    code, text, _ = run(capsys, *given, "--memory", 20)
    assert code == 0
    assert "of 20.00 GB on each device" in text
    code, _, error = run(capsys, *given[:3], "--devices", 4)
    assert code == 2
    assert "2 hosts of 4 devices differ" in error
    assert "plan for its 8 devices" in error


def test_storages_are_asked_for(capsys, model, tmp_path):
    tight = ("--devices", 1, "--memory", 1.5, "--batch-size", 512)
    code, _, error = run(capsys, model, *tight)
    assert code == 1
    assert "table 'day' is placed table_wise on device 1, but the mesh has 1 devices" in error
    model.write_text(MODEL.replace(", placement: {table_wise: 1}", ""))
    code, _, error = run(capsys, model, *tight)
    assert code == 1
    assert "no plan fits 1 device" in error
    assert "storage host for 'product' (with caches on the devices)" in error
    code, text, _ = run(capsys, model, *tight, "--storages", "device", "host")
    assert code == 0
    assert "% cached" in text
    code, _, error = run(capsys, model, *tight, "--storages", "device", "store")
    assert code == 1
    assert "may be kept in storage 'store', and no URL says where" in error
    out = tmp_path / "plan.json"
    store = ("--store", "file:///data/{table}", "--output", out)
    code, text, _ = run(capsys, model, *tight, "--storages", "device", "store", *store)
    assert code == 0
    caches = dict(ShardingPlan.from_json(out.read_text()).caches)
    assert caches["product"].store == "file:///data/{table}"
    secret = ("--store", "redis://:hunter2@host/0")
    code, text, error = run(capsys, model, *tight, "--storages", "device", "store", *secret)
    assert (code, "hunter2" in text + error) == (1, False)


STASHED = """
batch_size: 8192
tables:
  - {name: small, num_embeddings: 1000, embedding_dim: 8, pooling_factors: 100}
  - {name: large, num_embeddings: 1000, embedding_dim: 16, pooling_factors: 100}
"""


def bytes_of(plan):
    return max(sum(device.bytes.values()) for device in plan.estimate.devices)


def test_stashes_are_asked_for(capsys, model, tmp_path):
    model.write_text(STASHED)
    out = tmp_path / "plan.json"
    given = (model, "--reserve", 0, "--time-limit", 2, "--output", out)
    code, text, _ = run(capsys, *given, "--stashes", "none", "recompute", "host")
    assert code == 0
    table = [line.split() for line in text.split("Stashes, ")[1].splitlines()[3:]]
    assert [row[0] for row in table] == ["none", "host", "recompute"]
    # Without need there is no stash; each line has the policy's own memory and step.
    assert [row[-1] for row in table] == ["this", "-", "-"]
    plan = ShardingPlan.from_json(out.read_text())
    assert plan.stash is None
    assert len({tuple(row[1:3]) for row in table}) == 3
    tight = ("--memory", (bytes_of(plan) - 1) / 1e9)
    assert run(capsys, *given, *tight)[0] == 1
    code, text, _ = run(capsys, *given, *tight, "--stashes", "none", "host")
    assert code == 0
    assert "Stash   host, in all collections" in text
    assert ShardingPlan.from_json(out.read_text()).stash == "host"
    code, text, _ = run(capsys, *given[:-2], "--machines", "8xh100", "--stashes", "host")
    assert code == 0
    assert text.splitlines()[1].split()[-1] == "stash"
    assert text.splitlines()[3].split()[-1] == "host"


def test_several_clusters_in_one_table(capsys, model):
    model.write_text(MODEL.replace(", placement: {table_wise: 1}", ""))
    given = (model, "--time-limit", 1, "--batch-size", 1024, "--machines")
    code, text, error = run(capsys, *given, "1xh100", "2x8xh200", "--prices", "h100=2.5")
    assert code == 0
    assert [line.split()[:2] for line in text.splitlines()[3:5]] == [
        ["1xh100", "yes"],
        ["2x8xh200", "yes"],
    ]
    assert error.splitlines() == ["1xh100: ok", "2x8xh200: ok"]
    code, text, _ = run(capsys, *given, "3xh100")
    assert code == 1
    assert "3xh100: the batch is divided among 3 devices" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["m.yaml", "--machines", "8xh100", "--devices", "8"], "leave out --devices"),
        (["m.yaml", "--machines", "8xh100", "--output=x"], "leave out --output"),
        (["m.yaml", "--machines", "h100"], "such as 8xh100 or 2x8xh200, got 'h100'"),
        (["m.yaml", "--machines", "0xh100"], "--machines: "),
        (["m.yaml", "--prices", "h100=2"], "--prices are those of --machines"),
        (["m.yaml", "--machines", "8xh100", "--prices", "h200=2"], "--machines has no 'h200'"),
        (["m.yaml", "--machines", "8xh100", "--prices", "h100"], "MACHINE=NUMBER above 0"),
        (["m.yaml", "--machines", "8xh100", "--prices", "h100=0"], "MACHINE=NUMBER above 0"),
        (["--calibrate", "--machines", "8xh100"], "takes no --machines"),
        ([], "give the YAML file of a model, or --calibrate"),
        (["--calibrate"], "say where to with --output"),
        (["m.yaml", "--calibrate", "--output", "x"], "takes no model"),
        (["m.yaml", "--devices", "0"], "--devices must be 1 or more"),
        (["m.yaml", "--devices", "12"], "12 devices do not fill hosts of 8"),
        (["m.yaml", "--machine", "z80"], "no machine is named 'z80'"),
        (["m.yaml", "--storages", "tape"], "storages"),
        (["m.yaml", "--stashes", "disk"], "stashes"),
        (["m.yaml", "--unheard-of"], "unheard-of"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_are_wrong(capsys, model, monkeypatch, arguments, message):
    monkeypatch.chdir(model.parent)
    model.rename("m.yaml")
    code, _, error = run(capsys, *arguments)
    assert code == 2
    assert message in error


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("batch_size", "batchsize", "the file has an unknown field 'batchsize'"),
        ("num_embeddings: 4096, ", "", "table 'user' has no num_embeddings"),
        ("name: user", "name: product", "two tables are named 'product'"),
        ("pooling: mean", "pooling: most", "table 'product': "),
        ("optimizer: sgd", "optimizer: nothing", "optimizer is a name of jaxrec.optim"),
        ("learning_rate: 0.001", "learn: 0.001", "optimizer adam: "),
        ("{table_wise: 1}", "sideways", "placement is a sharding type such as row_wise"),
        ("{table_wise: 1}", "table_wise", "placement table_wise is given with where"),
        ("pooling_factors: 20", "pooling_factors: -1", "pooling_factors are numbers above 0"),
        ("dense_parameters: 1000000", "dense_parameters: many", "dense_parameters is a whole"),
        ("tables:", "tables: [", "model.yaml: while parsing"),
        ("tables:", "batch_size: 1\ntables:", "'batch_size' is given twice, the second time in"),
        ("pooling: mean", "poolings: mean", "table 'product' has an unknown field 'poolings'"),
    ],
    ids=lambda value: "",
)
def test_model_files_that_are_wrong(capsys, model, old, new, message):
    assert old in MODEL
    model.write_text(MODEL.replace(old, new, 1))
    code, _, error = run(capsys, model)
    assert code == 1
    assert "model.yaml: " in error
    assert message in error
    assert len(error.splitlines()) == 1


def test_a_missing_package_is_named_before_the_search(capsys, model, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # an import of it fails
    monkeypatch.setattr(Planner, "plan", lambda *_, **__: pytest.fail("searched"))
    code, _, error = run(capsys, model, "--plot", tmp_path / "plan.png")
    assert code == 1
    assert error == ("jaxrec plan: drawing needs matplotlib: pip install 'jaxrec[plot]'\n")


def test_no_such_files(capsys, tmp_path):
    code, _, error = run(capsys, tmp_path / "none.yaml")
    assert code == 1
    assert "none.yaml" in error


def test_a_model_file_without_tables_or_batch_size(capsys, model):
    model.write_text("tables: []")
    assert "tables is a list of at least one table" in run(capsys, model)[2]
    model.write_text("tables: [{name: a, num_embeddings: 10, embedding_dim: 8}]")
    code, _, error = run(capsys, model)
    assert code == 2
    assert "has no batch_size; give --batch-size" in error
    assert run(capsys, model, "--batch-size", 80)[0] == 0


def test_calibration_writes_a_file_to_plan_with(capsys, model, tmp_path, monkeypatch):
    assert jax.device_count() == 8  # and so started
    known = Topology.named("cpu", devices=2)
    asked = {}

    def calibrate(mesh, **arguments):
        asked["devices"] = mesh.devices.size
        return known

    def calibrate_caches(topology, mesh, **arguments):
        asked["caches"] = mesh.devices.size
        return topology

    monkeypatch.setattr("jaxrec.plan.calibration.calibrate", calibrate)
    monkeypatch.setattr("jaxrec.tier.calibration.calibrate_caches", calibrate_caches)
    out = tmp_path / "here.json"
    code, text, _ = run(capsys, "--calibrate", "--devices=2", "--output", out)
    assert (code, asked) == (0, {"devices": 2, "caches": 2})
    assert "rates written to" in text
    assert json.loads(out.read_text())["name"] == "cpu"
    assert Topology.load(out) == known
    memory = ("--memory", 40, "--devices", 2)
    assert run(capsys, model, "--topology", out, *memory)[0] == 0


def test_more_devices_than_there_are(capsys, tmp_path):
    assert jax.device_count() == 8
    code, _, error = run(capsys, "--calibrate", "--devices", 99, "--output", tmp_path / "x")
    assert code == 2
    assert "--devices 99, but there are 8 at hand" in error


def test_the_command_and_the_planner_agree(capsys, model, tmp_path):
    out = tmp_path / "plan.json"
    run(capsys, model, "--devices", 8, "--machine", "h200", "--output", out)
    found = read_model_file(model)
    planner = Planner(
        Topology.named("h200", devices=8), found.constraints, dense_bytes=found.dense_bytes
    )
    made_for = planner.context(found.tables, batch_size=8192)
    assert ShardingPlan.from_json(out.read_text(), made_for).estimate is not None
