"""The command line as a user meets it: real processes, their output and their exit codes."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import yaml

from jaxrec.cli import main
from jaxrec.train import load_model
from tests.data.test_criteo import GOOD, KAGGLE, changed, write

SMALL = [
    "--data.batch-size=16",
    "--data.generated-rows=200",
    "--data.generated-eval-rows=50",
    "--data.table-rows=50",
    "--model.embedding-dim=4",
    "--model.bottom-layer-sizes=4",
    "--model.top-layer-sizes=4",
]
# -P: the installed package, and not the checkout that the tests are started from.
PROGRAM = (sys.executable, "-P", "-m", "jaxrec.cli")


def jaxrec(*arguments, cwd, prefix=()):
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


def test_a_run_on_a_file(tmp_path):
    done = jaxrec("train", "--data", KAGGLE, "--output", "model", *SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "45 rows to train on, 5 held out" in done.stdout
    for word in ("AUC", "NE", "log loss", "calibration", "model saved in model"):
        assert word in done.stdout
    assert "best reachable" not in done.stdout
    results = json.loads((tmp_path / "model/results.json").read_text())
    assert results["log_loss"] > 0
    model = load_model(tmp_path / "model")
    assert model.embeddings.table("cat_25").shape == (50, 4)
    assert yaml.safe_load((tmp_path / "model/config.yaml").read_text())["seed"] == 0


def test_a_generated_run_prints_the_best_auc(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *SMALL]) == 0
    assert "best reachable 0." in capsys.readouterr().out
    assert len(list((tmp_path / "runs").iterdir())) == 1


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_saves_and_says_so(tmp_path, sent, code):
    command = [*PROGRAM, "train", "--output=model", *SMALL, "--data.generated-rows=100000000"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert "rows to train on" in process.stdout.readline()
        process.send_signal(sent)
        output, errors = process.communicate(timeout=300)
    assert process.returncode == code, errors
    assert errors == ""
    assert f"stopped by {sent.name} after step" in output
    assert "jaxrec train --resume model" in output
    load_model(tmp_path / "model")


def test_a_file_of_options(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("data: {generated-rows: 100, batch-size: 10}")
    assert main(["train", "run.yaml", "--output=model", "--data.batch-size=20", *SMALL[2:]]) == 0
    assert "100 rows to train on, 50 held out; 5 steps of 20" in capsys.readouterr().out


def test_a_damaged_checkpoint_is_one_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--output=model", *SMALL]) == 0
    for file in (tmp_path / "model").rglob("manifest.ocdbt"):
        file.write_bytes(b"x")
    capsys.readouterr()
    assert main(["train", "--resume=model", "--data.epochs=2"]) == 1
    error = capsys.readouterr().err
    assert "model/13: the checkpoint is damaged" in error
    assert error.count("\n") == 1


def test_stopped_and_resumed(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--output=model", *SMALL, "--data.epochs=1"]) == 0
    rows = np.asarray(load_model(tmp_path / "model").embeddings.table("cat_0"))
    # A second epoch on top of what was a whole run.
    assert main(["train", "--resume=model", "--data.epochs=2"]) == 0
    assert "26 steps of 16, 13 of them made before" in capsys.readouterr().out
    again = np.asarray(load_model(tmp_path / "model").embeddings.table("cat_0"))
    assert not np.array_equal(rows, again)


KILLED = [*SMALL, "--data.generated-rows=800", "--data.batch-size=8", "--checkpoint.every=10"]


@pytest.mark.parametrize("moment", ["before-the-first", "in-a-checkpoint", "between"])
def test_killed_and_resumed_ends_with_the_same_bits(tmp_path, never_killed, moment):
    output = tmp_path / "model"
    begun, number = time.monotonic(), 0
    while True:
        options = ["--resume", output] if (output / "config.yaml").exists() else KILLED
        if options is KILLED:
            options = [*KILLED, "--output", output]
        command = [*PROGRAM, "train", *map(str, options)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as run:
            while run.poll() is None and not (number == 0 and is_moment(output, moment)):
                time.sleep(0.0005)
            run.kill()
            _, errors = run.communicate()
        number += 1
        if run.returncode == 0:
            break
        assert run.returncode == -signal.SIGKILL, errors
        assert time.monotonic() - begun < 300
    # A quick machine may finish a run before it is killed, but not in all of these.
    assert number == 2
    for name in ("cat_0", "cat_9"):
        got = load_model(output).embeddings.table(name)
        np.testing.assert_array_equal(got, never_killed.embeddings.table(name))
    assert (output / "results.json").exists()


def is_moment(output, moment):
    if moment == "before-the-first":
        return (output / "config.yaml").exists()
    names = [path.name for path in output.glob("*")]
    if moment == "in-a-checkpoint":
        return any("checkpoint-tmp" in name for name in names)
    return any(name.isdecimal() and int(name) >= 50 for name in names)


@pytest.fixture(scope="module")
def never_killed(tmp_path_factory):
    output = tmp_path_factory.mktemp("never") / "model"
    assert main(["train", *KILLED, "--output", str(output)]) == 0
    return load_model(output)


def test_devices_and_one_device_agree(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, devices in (("one", 1), ("many", 4)):
        assert main(["train", f"--output={name}", *SMALL, f"--devices={devices}"]) == 0
    one, many = (load_model(tmp_path / name).embeddings for name in ("one", "many"))
    for config in one.configs:
        np.testing.assert_allclose(
            one.table(config.name), many.table(config.name), rtol=1e-4, atol=1e-5
        )


def test_only_evaluated(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--output=model", *SMALL]) == 0
    report = capsys.readouterr().out
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "model").rglob("*")}
    assert main(["train", "--resume=model", "--eval-only"]) == 0
    again = capsys.readouterr().out
    assert [x for x in report.splitlines() if "NE " in x] == [
        x for x in again.splitlines() if "NE " in x
    ]
    assert "rows to train on" not in again
    assert made == {path: path.stat().st_mtime_ns for path in (tmp_path / "model").rglob("*")}


def test_curves_picture_and_trace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = [*SMALL, "--data.epochs=3", "--record-every=5", "--profile"]
    assert main(["train", "--output=model", *options]) == 0
    lines = map(json.loads, (tmp_path / "model/metrics.jsonl").read_text().splitlines())
    lines = list(lines)
    assert [line["step"] for line in lines] == list(range(5, 39, 5))
    assert {"log_loss", "normalized_entropy", "auc", "samples_per_second"} <= set(lines[-1])
    assert all(0 <= line["auc"] <= 1 for line in lines)
    assert (tmp_path / "model/summary.png").read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "model/profile").rglob("*.xplane.pb"))


def test_loss_that_is_no_number_keeps_the_last_good_checkpoint(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--output=model", *SMALL, "--checkpoint.every=4"]) == 0
    options = ["--data.epochs=2", "--optimizer.learning-rate=1e30", "--checkpoint.every=1"]
    assert main(["train", "--resume=model", *options]) == 1
    assert "at step" in capsys.readouterr().err
    assert np.isfinite(np.asarray(load_model(tmp_path / "model").embeddings.table("cat_0"))).all()


def test_a_missing_file(tmp_path):
    done = jaxrec("train", "--data", "missing.tsv", *SMALL, cwd=tmp_path)
    assert_one_sentence(done, 1, "missing.tsv: No such file or directory")


def test_a_malformed_line(tmp_path):
    write(tmp_path / "log", [GOOD] * 20 + [changed(3, "x")] + [GOOD] * 20)
    done = jaxrec("train", "--data", "log", *SMALL, cwd=tmp_path)
    assert_one_sentence(done, 1, "log, line 21, column 4 (I3)", "'x'")


def test_an_unknown_option(tmp_path):
    assert_one_sentence(
        jaxrec("train", "--bogus", cwd=tmp_path), 2, "unknown option --bogus", "--help"
    )


def test_a_full_disk(tmp_path):
    """A real one, a file system of 200 kB; making it takes a namespace of one's own."""
    unshare = shutil.which("unshare")
    namespace = [unshare or "unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    mount = f"mount -t tmpfs -o size=200k none '{tmp_path}'"
    allowed = (
        unshare
        and not subprocess.run([*namespace, mount], check=False, capture_output=True).returncode
    )
    if not allowed:
        pytest.skip("this system allows no file systems in user namespaces")
    done = jaxrec(
        "train", "--output", tmp_path / "model", *SMALL, "--model.embedding-dim=32",
        cwd="/", prefix=(*namespace, f'{mount} && exec "$@"', "sh"),
    )  # fmt: skip
    assert_one_sentence(done, 1, str(tmp_path / "model"), "No space left on device")


IN_PROCESS = {
    "config-missing": (["--config=missing.yaml"], 1, "missing.yaml: No such file"),
    "config-key": (["--config=bad.yaml"], 2, "bad.yaml: unknown option data.bogus"),
    "config-no-value": (["--config"], 2, "followed by a path"),
    "resume-nothing": (["--resume=nothing"], 1, "nothing: there is no saved run here"),
    "resume-and-config": (["--resume=a", "--config=b"], 2, "leave --config out"),
    "directory": (["--data=."], 1, "summary.json is missing"),
    "one-row": (["--data=one"], 1, "1 rows are too few"),
    "empty": (["--data=empty"], 1, "the file is empty"),
    "taken": (["--output=taken"], 2, "taken holds a saved run"),
    "no-directory": (["--output=one/below"], 1, "one/below: Not a directory"),
    "devices": (["--devices=9", "--data.batch-size=9"], 2, "devices is 9, but there are 8"),
    "divides": (["--devices=3"], 2, "does not divide by 3 devices"),
    "eval-nothing": (["--eval-only"], 2, "say which with --resume"),
    "record-every": (["--record-every=0"], 2, "record-every is above 0"),
    "checkpoint": (["--checkpoint.every=0"], 2, "checkpoint.every is above 0"),
    "not-finite": (["--optimizer.learning-rate=1e30"], 1, "the loss is"),
}


@pytest.mark.parametrize(("options", "code", "message"), IN_PROCESS.values(), ids=IN_PROCESS)
def test_what_goes_wrong_is_one_sentence(tmp_path, monkeypatch, capsys, options, code, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "one", [GOOD])
    (tmp_path / "empty").touch()
    (tmp_path / "bad.yaml").write_text("data: {bogus: 1}")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/config.yaml").touch()
    assert main(["train", *SMALL, *options]) == code
    error = capsys.readouterr().err
    assert error.startswith("jaxrec train: ")
    assert message in error
    assert error.count("\n") == 1


def test_commands(capsys):
    assert main([]) == 0
    assert "train" in capsys.readouterr().out
    assert main(["bogus"]) == 2
    assert "unknown command 'bogus'" in capsys.readouterr().err
