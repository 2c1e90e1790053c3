"""The command line as a user meets it: real processes, their output and their exit codes."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import yaml

from jaxrec.commands import main
from jaxrec.data import DataError
from jaxrec.embed.variables import dense_variables
from jaxrec.train import checkpoint, load_model
from jaxrec.train.config import DataConfig, TrainConfig, write_options
from jaxrec.train.models.rows import RowModel
from tests.data.criteo.test_log import GOOD, KAGGLE, changed, write
from tests.forks import free_port

pytestmark = pytest.mark.every_case

# Tables of one size, so that little compiles.
SMALL = [
    f"--data={KAGGLE}",
    "--data.eval-fraction=0.2",
    "--data.batch-size=4",
    "--data.table-rows=50",
    "--model.embedding-dim=4",
    "--model.bottom-layer-sizes=4",
    "--model.top-layer-sizes=4",
    "--explain-rows=0",  # of 39 columns
]
STEPS = 10
# -P: the installed package, and not the checkout that the tests are started from.
PROGRAM = (sys.executable, "-P", "-m", "jaxrec")


def run(*arguments, cwd, prefix=()):
    return subprocess.run(
        [*prefix, *PROGRAM, *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def assert_one_sentence(done, code, *words):
    assert done.returncode == code, done.stdout + done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    for word in words:
        assert word in done.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run and what it said."""
    output = tmp_path_factory.mktemp("trained") / "model"
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert main(["train", *SMALL, f"--output={output}"]) == 0
    return output, said.getvalue()


@pytest.fixture
def model(trained, tmp_path, monkeypatch):
    """A copy of that run, in a directory of one's own."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(trained[0], tmp_path / "model")


def test_a_run_on_a_file(trained):
    output, said = trained
    assert "40 rows to train on, 10 held out; 10 steps of 4" in said
    assert "compiling the training step" in said
    for word in ("AUC", "NE", "log loss", "calibration", f"model saved in {output}"):
        assert word in said
    assert "best reachable" not in said
    results = json.loads((output / "results.json").read_text())
    assert results["log_loss"] > 0
    assert load_model(output).embeddings.table("cat_25").shape == (50, 4)
    assert yaml.safe_load((output / "config.yaml").read_text())["seed"] == 0


def test_a_generated_run_prints_the_best_auc(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = ["--data.generated-rows=20", "--data.generated-eval-rows=20"]
    assert main(["train", *SMALL[2:], *rows]) == 0
    assert "best reachable 0." in capsys.readouterr().out
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_results_are_written_before_they_are_explained(model, monkeypatch, capsys):
    def fail(*_):
        raise DataError("no explanation")

    (model / "results.json").unlink()
    monkeypatch.setattr(RowModel, "explain", fail)
    assert main(["train", f"--resume={model}", "--explain-rows=5"]) == 1
    assert "no explanation" in capsys.readouterr().err
    assert json.loads((model / "results.json").read_text())["log_loss"] > 0


def test_a_package_that_the_picture_lacks_is_named_before_the_first_step(
    model, monkeypatch, capsys
):
    (model / "results.json").unlink()
    monkeypatch.setattr(RowModel, "explain", lambda *_: {"explained": True})
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # an import of it fails
    assert main(["train", f"--resume={model}", "--explain-rows=5"]) == 0
    said = capsys.readouterr().out
    wanted = "no summary.png: drawing needs matplotlib: pip install 'jaxrec[plot]'\n"
    assert said.count(wanted) == 1
    assert said.index(wanted) < said.index("NE  ")
    assert json.loads((model / "results.json").read_text())["explained"]


@pytest.mark.slow
def test_an_interrupt_saves_and_says_so(tmp_path):
    """By SIGINT; by SIGTERM one of two processes is stopped below."""
    command = [*PROGRAM, "train", "--output=model", *SMALL, "--data.epochs=1000000"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert "rows to train on" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=300)
    assert process.returncode == 130, errors
    assert errors == ""
    assert "SIGINT: stopping after this step\n" in output
    assert "stopped by SIGINT after step" in output
    assert "jaxrec train --resume model" in output
    load_model(tmp_path / "model")


def test_a_file_of_options(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("data: {eval-fraction: 0.5, batch-size: 10}")
    options = [SMALL[0], "--data.batch-size=5", *SMALL[3:]]
    assert main(["train", "run.yaml", "--output=model", *options]) == 0
    assert "25 rows to train on, 25 held out; 5 steps of 5" in capsys.readouterr().out


def test_a_damaged_checkpoint_is_one_sentence(model, capsys):
    for file in model.rglob("manifest.ocdbt"):
        file.write_bytes(b"x")
    assert main(["train", "--resume=model", "--data.epochs=2"]) == 1
    error = capsys.readouterr().err
    assert f"model/{STEPS}: the checkpoint is damaged" in error
    assert error.count("\n") == 1


def test_stopped_and_resumed(trained, model, capsys):
    """A second epoch on top of what was a whole run."""
    assert main(["train", "--resume=model", "--data.epochs=2"]) == 0
    assert "20 steps of 4, 10 of them made before" in capsys.readouterr().out
    rows, again = (load_model(x).embeddings.table("cat_0") for x in (trained[0], model))
    assert not np.array_equal(rows, again)


LONG = [*SMALL, "--data.epochs=8", "--checkpoint.every=10"]


@pytest.fixture(scope="module")
def never_killed(tmp_path_factory, forks):
    # In a process of its own, as those that are killed: this one has eight devices, and a model on
    # one of several rounds otherwise.
    directory = tmp_path_factory.mktemp("never")
    run = forks.run("jaxrec", "train", *LONG, f"--output={directory / 'model'}")
    assert run.wait(300) == 0, run.errors
    return load_model(directory / "model")


@pytest.mark.slow
def test_killed_and_resumed_ends_with_the_same_bits(tmp_path, never_killed, forks):
    """Killed before the first checkpoint, within one, and between two, one after the other."""
    output = tmp_path / "model"
    moments = [before_the_first, in_a_checkpoint, between]
    begun = time.monotonic()
    while True:
        has_options = (output / "config.yaml").exists()
        options = ["--resume", output] if has_options else [*LONG, "--output", output]
        run = forks.run("jaxrec", "train", *options)
        while run.poll() is None and not (moments and moments[0](output)):
            time.sleep(0.0005)
        if run.stop() == 0:
            break
        assert run.code == -signal.SIGKILL, run.errors
        assert time.monotonic() - begun < 300
        moments.pop(0)
    # None has come too late for its moment.
    assert moments == []
    for name in ("cat_0", "cat_9"):
        got = load_model(output).embeddings.table(name)
        np.testing.assert_array_equal(got, never_killed.embeddings.table(name))
    assert (output / "results.json").exists()


def before_the_first(output):
    return (output / "config.yaml").exists()


def in_a_checkpoint(output):
    return any("checkpoint-tmp" in path.name for path in output.glob("*"))


def between(output):
    # Any but the first, which is there when the run goes on, or might be.
    return any(path.name.isdecimal() and int(path.name) >= 40 for path in output.glob("*"))


@pytest.mark.slow
def test_two_processes_are_stopped_and_one_goes_on(tmp_path, never_killed, forks, capsys):
    """They train on the batches of one, stop together when one is told to, and one speaks."""
    output = tmp_path / "model"
    job = [f"--coordinator=localhost:{free_port()}", "--num-processes=2"]
    options = ["train", *LONG, f"--output={output}", *job]
    running = [
        forks.run("jaxrec", *options, f"--process-id={process}", environ={"JAX_PLATFORMS": "cpu"})
        for process in range(2)
    ]
    try:
        while not list(output.glob("[0-9]*")) and all(x.poll() is None for x in running):
            time.sleep(0.005)
        running[1].send_signal(signal.SIGTERM)
        codes = [process.wait(300) for process in running]
    finally:
        for process in running:
            process.stop()
    assert codes == [143, 143], [process.errors for process in running]
    assert "stopped by SIGTERM after step" in running[0].output
    assert [line for line in running[1].output.splitlines() if "[Gloo]" not in line] == []
    assert main(["train", "--resume", str(output)]) == 0
    assert "of them made before" in capsys.readouterr().out
    for name in ("cat_0", "cat_9"):
        got = load_model(output).embeddings.table(name)
        np.testing.assert_allclose(got, never_killed.embeddings.table(name), atol=1e-6, rtol=1e-5)


@pytest.mark.slow
def test_devices_and_one_device_agree(trained, tmp_path, capsys):
    assert main(["train", f"--output={tmp_path / 'many'}", *SMALL, "--devices=4"]) == 0
    assert "planning where the tables go on 4 devices\n" in capsys.readouterr().out
    one, many = (load_model(path).embeddings for path in (trained[0], tmp_path / "many"))
    for config in one.configs:
        np.testing.assert_allclose(
            one.table(config.name), many.table(config.name), rtol=1e-4, atol=1e-5
        )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:parameter .* stays whole")
def test_sharded_dense_layers_agree(trained, tmp_path, monkeypatch, capsys):
    """With --dense-layers fsdp; the run is then loaded on one device."""
    monkeypatch.setattr("jaxrec.mesh.dense.MIN_SHARDED_SIZE", 16)
    output = tmp_path / "many"
    assert main(["train", f"--output={output}", *SMALL, "--devices=4", "--dense-layers=fsdp"]) == 0
    assert "dense_layers: fsdp\n" in (output / "config.yaml").read_text()
    one, many = (dense_variables(load_model(path)) for path in (trained[0], output))
    for name, variable in one.items():
        np.testing.assert_allclose(variable[...], many[name][...], rtol=1e-4, atol=1e-5)


def test_only_evaluated(trained, model, capsys):
    made = {path: path.stat().st_mtime_ns for path in model.rglob("*")}
    assert main(["train", "--resume=model", "--eval-only"]) == 0
    again = capsys.readouterr().out
    assert [x for x in trained[1].splitlines() if "  NE " in x] == [
        x for x in again.splitlines() if "  NE " in x
    ]
    assert "rows to train on" not in again
    assert made == {path: path.stat().st_mtime_ns for path in model.rglob("*")}


def test_curves_picture_and_trace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = [*SMALL, "--data.epochs=3", "--record-every=5", "--profile"]
    assert main(["train", "--output=model", *options]) == 0
    lines = map(json.loads, (tmp_path / "model/metrics.jsonl").read_text().splitlines())
    lines = list(lines)
    assert [line["step"] for line in lines] == list(range(5, 31, 5))
    assert {"log_loss", "normalized_entropy", "auc", "samples_per_second"} <= set(lines[-1])
    assert all(0 <= line["auc"] <= 1 for line in lines)
    assert (tmp_path / "model/summary.png").read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "model/profile").rglob("*.xplane.pb"))


def test_short_runs_have_curves(trained, tmp_path, capsys):
    """Oftener than every 100 steps, and with the last one."""
    lines = (trained[0] / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, STEPS + 1))
    options = [*SMALL, f"--output={tmp_path / 'model'}", "--record-every=8"]
    assert main(["train", *options]) == 0
    lines = (tmp_path / "model/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [8, STEPS]


@pytest.mark.slow
def test_a_run_that_failed_does_not_block_its_corrected_self(tmp_path, monkeypatch, capsys):
    """Its data were malformed: there is no checkpoint to go on from."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "log", [GOOD] * 20 + [changed(3, "x")] + [GOOD] * 20)
    options = ["train", *SMALL[1:], "--data=log", "--output=[red]m[/b]"]
    assert main([*options, "--record-every=1"]) == 1
    assert "log, line 21" in capsys.readouterr().err
    output = tmp_path / "[red]m[/b]"
    assert (output / "config.yaml").exists()
    (output / "metrics.jsonl").write_text('{"step": 3, "auc": 0.5}\n')  # of its first steps
    assert main([*options, "--data.bad-rows=skip", "--record-every=5"]) == 0
    said = capsys.readouterr().out
    assert "log: 1 bad lines left out" in said
    assert "model saved in [red]m[/b]\n" in said, "brackets in a path are no markup"
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines] == [5, 8]
    assert main(options) == 2
    assert "holds a saved run; go on with it by --resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--seed=3", "--seed 3 makes another log than that of the run, whose seed is 0"),
        ("--data.generated-rows=30", "--data.generated-rows 30 holds out other rows"),
        ("--model=dlrm", "--model dlrm is not that of the run, which is dcn_v2"),
        ("--time=day", "--time differs from that of the run; leave --time out"),
    ],
    ids=["seed", "rows", "model", "time"],
)
def test_the_rows_and_the_model_are_those_of_the_run(tmp_path, capsys, option, message):
    write_options(TrainConfig(data=DataConfig(generated_rows=20)), tmp_path / "config.yaml")
    assert main(["train", f"--resume={tmp_path}", "--eval-only", option]) == 2
    assert message in capsys.readouterr().err


def test_the_batches_of_a_run_keep_their_size(model, capsys):
    """The number of steps says which rows come next."""
    assert main(["train", "--resume=model", "--data.epochs=2", "--batch-size=8"]) == 2
    assert "--batch-size 8 would skip rows or repeat some" in capsys.readouterr().err
    assert main(["train", "--resume=model", "--eval-only", "--batch-size=8"]) == 0


def test_the_order_of_a_file_is_that_of_the_run(model, capsys):
    assert main(["train", "--resume=model", "--data.epochs=2", "--seed=3"]) == 2
    assert "--seed 3 makes another order of the rows" in capsys.readouterr().err


@pytest.mark.slow
def test_the_best_checkpoints_stay(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--checkpoint.every=3", "--checkpoint.keep-best=1", "--evaluate-every=2"]
    by = ["--checkpoint.best-by=log_loss", "--optimizer.learning-rate=0.3"]
    assert main(["train", "--output=model", *SMALL, *options, *by]) == 0
    out = capsys.readouterr().out
    lines = (tmp_path / "model/metrics.jsonl").read_text().splitlines()
    lines = [x for x in map(json.loads, lines) if "held_out_log_loss" in x]
    seen = {x["step"]: x["held_out_log_loss"] for x in lines}
    # Every second step, and those of checkpoints; each once.
    assert [*seen] == [2, 3, 4, 6, 8, 9, 10]
    assert len(lines) == len(seen)
    for step in seen:
        assert f"step {step} of 10, held out: AUC 0." in out
    best = min((3, 6, 9, 10), key=seen.__getitem__)
    assert best < 9, "so that what is best and what is last are two"
    assert checkpoint.all_steps(tmp_path / "model") == [best, 10]
    assert f"best of the checkpoints that stay: step {best}\n" in out
    results = json.loads((tmp_path / "model/results.json").read_text())
    assert results["best_step"] == best
    assert results["log_loss"] == seen[10]
    assert main(["train", "--resume=model", "--eval-only", f"--step={best}"]) == 0
    assert f"log loss     {seen[best]:.4f} nats" in capsys.readouterr().out
    assert main(["train", "--resume=model", "--eval-only", "--step=2"]) == 1
    assert "step 2 was not saved" in capsys.readouterr().err


def test_loss_that_is_no_number_keeps_the_last_good_checkpoint(model, capsys):
    options = ["--data.epochs=2", "--optimizer.learning-rate=1e30", "--checkpoint.every=1"]
    assert main(["train", "--resume=model", *options]) == 1
    assert "at step" in capsys.readouterr().err
    assert np.isfinite(np.asarray(load_model(model).embeddings.table("cat_0"))).all()


@pytest.mark.slow
def test_a_full_disk(tmp_path):
    """A real one, a file system of 200 kB; making it takes a namespace of one's own.

    There seems to be room, and while the checkpoint is written there is none any more.
    """
    unshare = shutil.which("unshare")
    namespace = [unshare or "unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    mount = f"mount -t tmpfs -o size=200k none '{tmp_path}'"
    allowed = (
        unshare
        and not subprocess.run([*namespace, mount], check=False, capture_output=True).returncode
    )
    if not allowed:
        pytest.skip("this system allows no file systems in user namespaces")
    done = run(
        "train", "--output", tmp_path / "model", *SMALL, "--model.embedding-dim=32",
        cwd="/", prefix=(*namespace, f'{mount} && exec "$@"', "sh"),
    )  # fmt: skip
    assert_one_sentence(done, 1, str(tmp_path / "model"), "No space left on device")


IN_PROCESS = {
    "malformed": (["--data=bad.tsv"], 1, "bad.tsv, line 21, column 4 (I3)"),
    "csv": (["--data=x.txt"], 1, "x.txt is CSV: 2 columns separated by commas (a, b); name it"),
    "missing": (["--data=missing.tsv"], 1, "missing.tsv: No such file or directory"),
    "unknown": (["--bogus"], 2, "unknown option --bogus; `jaxrec train --help`"),
    "config-missing": (["--config=missing.yaml"], 1, "missing.yaml: No such file"),
    "config-key": (["--config=bad.yaml"], 2, "bad.yaml: unknown option data.bogus"),
    "config-no-value": (["--config"], 2, "followed by a path"),
    "resume-nothing": (["--resume=nothing"], 1, "nothing: there is no saved run here"),
    "resume-and-config": (["--resume=a", "--config=b"], 2, "leave --config out"),
    "directory": (["--data=."], 1, "bad.tsv is not a Parquet file; columns"),
    "one-row": (["--data=one"], 1, "1 rows are too few"),
    "empty": (["--data=empty"], 1, "the file is empty"),
    "taken": (["--output=taken"], 2, "taken holds a config.yaml that no run has written"),
    "no-directory": (["--output=one/below"], 1, "one/below: Not a directory"),
    "devices": (["--devices=9", "--data.batch-size=9"], 2, "devices is 9, but there are 8"),
    "divides": (["--devices=3"], 2, "does not divide by 3 devices"),
    "eval-nothing": (["--eval-only"], 2, "say which with --resume"),
    "record-every": (["--record-every=0"], 2, "record-every must be above 0"),
    "checkpoint": (["--checkpoint.every=0"], 2, "checkpoint.every must be above 0"),
    "keep-best": (["--checkpoint.keep-best=-1"], 2, "keep-best must be 0 or more, got -1"),
    "evaluate-every": (["--evaluate-every=-1"], 2, "evaluate-every must be 0 or more, got -1"),
    "step": (["--step=3"], 2, "which checkpoint --eval-only evaluates"),
    "job": (["--coordinator=a:1"], 2, "needs --num-processes and --process-id"),
    "process-id": (["--num-processes=2", "--process-id=2"], 2, "got 2 of 2"),
    "job-begun": (["--coordinator=a:1", "--num-processes=2", "--process-id=1"], 1, "do not find"),
    "not-finite": (["--optimizer.learning-rate=1e30"], 1, "the loss is"),
}


@pytest.mark.parametrize(("options", "code", "message"), IN_PROCESS.values(), ids=IN_PROCESS)
def test_what_goes_wrong_is_one_sentence(tmp_path, monkeypatch, capsys, options, code, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "one", [GOOD])
    write(tmp_path / "bad.tsv", [GOOD] * 20 + [changed(3, "x")] + [GOOD] * 20)
    (tmp_path / "empty").touch()
    (tmp_path / "x.txt").write_text("a,b\n1,2\n")
    (tmp_path / "bad.yaml").write_text("data: {bogus: 1}")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/config.yaml").touch()
    assert main(["train", *SMALL, *options]) == code
    error = capsys.readouterr().err
    assert error.startswith("jaxrec train: ")
    assert message in error
    assert error.count("\n") == 1


def test_a_malformed_held_out_line_is_found_before_training(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "bad.tsv", [GOOD] * 20 + [changed(3, "x")])
    assert main(["train", *SMALL, "--data=bad.tsv", "--output=model"]) == 1
    assert "bad.tsv, line 21, column 4 (I3)" in capsys.readouterr().err
    assert not (tmp_path / "model/config.yaml").exists()
