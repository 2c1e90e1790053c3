"""A run that is killed again and again, at random moments, ends with the same bits.

Minutes for twenty kills: JAXREC_TEST_KILLS=20 runs it (with -s it says where they fell); a kill at
each of three moments is in tests/commands/test_train.py.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import signal
import subprocess
import time

import jax
import numpy as np
import pytest

from jaxrec.data.criteo import conversion
from jaxrec.data.criteo.parts import Conversion
from jaxrec.data.transforms import NUM_CATEGORICAL
from jaxrec.train import checkpoint
from jaxrec.train.checkpoint.arrays import read_arrays
from jaxrec.train.checkpoint.files import UNFINISHED
from tests.commands.test_train import PROGRAM, SMALL
from tests.data.criteo.test_log import KAGGLE

KILLS = int(os.environ.get("JAXREC_TEST_KILLS", "0"))

# Steps of ten epochs, each shuffled anew. Writing a checkpoint takes about as long as the steps
# between two.
STEPS, EVERY = 8000, 200
LONG = [*SMALL[1:], "--data.epochs=10", f"--checkpoint.every={EVERY}", "--checkpoint.keep-last=2"]

# Seconds that a program may take to start, and a run may go on before it is killed.
TO_START, TO_RUN = 6.0, 0.8


@pytest.mark.skipif(KILLS == 0, reason="takes minutes: JAXREC_TEST_KILLS=20 runs it")
def test_killed_at_random_moments(tmp_path, monkeypatch):
    (tmp_path / "log").write_bytes(KAGGLE.read_bytes() * 80)
    monkeypatch.setattr(conversion, "BLOCK_BYTES", 20_000)  # row groups of 800 rows
    conversion.convert(tmp_path / "log", tmp_path / "rows", Conversion(table_rows=(50,)))
    options = [f"--data={tmp_path / 'rows'}", *LONG]
    never, output = tmp_path / "never", tmp_path / "killed"
    subprocess.run([*PROGRAM, "train", *options, "--output", never], check=True, timeout=600)

    moments = random.Random(0)
    seen = [kill(output, options, kind, moments) for kind in kinds(KILLS)]
    assert run(output, options).wait(timeout=600) == 0

    print(f"{KILLS} kills: {seen.count('checkpoint')} within a checkpoint, ", end="")
    print(f"{seen.count('step')} between two, {seen.count('start')} before training went on")
    assert seen.count("checkpoint") >= KILLS // 5
    same_bits(never, output)


def kinds(kills):
    """Of five kills one while the program starts, one within a checkpoint, three anywhere."""
    return [("start", "checkpoint", "any", "any", "any")[i % 5] for i in range(kills)]


def run(output, options):
    has_options = (output / "config.yaml").exists()
    said = ["--resume", output] if has_options else [*options, "--output", output]
    return subprocess.Popen([*PROGRAM, "train", *map(str, said)], stdout=subprocess.DEVNULL)


def kill(output: pathlib.Path, options: list[str], kind: str, moments: random.Random) -> str:
    """Starts a run or goes on with it, and kills it; returns what it was at."""
    start = time.time()
    with run(output, options) as process:
        if kind == "start":
            wait(moments.uniform(0, TO_START), process)
        else:
            while not saved_since(start, output):
                wait(0.001, process)
            if kind == "any":
                wait(moments.uniform(0, TO_RUN), process)
            while kind == "checkpoint" and not unfinished(output, start):
                wait(0.001, process)
            wait(moments.uniform(0, 0.01), process)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    if unfinished(output, start):
        return "checkpoint"
    return "start" if kind == "start" and not saved_since(start, output) else "step"


def wait(seconds, process):
    time.sleep(seconds)
    assert process.poll() is None, "the run ended before it was killed"


def saved_since(start, output):
    """The checkpoints of this run, finished or not."""
    return [path for path in output.glob("[0-9]*") if changed_at(path) >= start]


def unfinished(output, start):
    return [path for path in saved_since(start, output) if UNFINISHED in path.name]


def changed_at(path):
    try:
        return path.stat().st_ctime
    except FileNotFoundError:  # it has just got its name, or has been removed
        return 0.0


def same_bits(first, second):
    """All that the last checkpoint holds, and what came out on the rows that were held out."""
    assert checkpoint.all_steps(first)[-1] == checkpoint.all_steps(second)[-1] == STEPS
    saved = [
        jax.tree.leaves_with_path(read_arrays(path / str(STEPS), {"dense", "optimizer", "tables"}))
        for path in (first, second)
    ]
    assert len(saved[0]) > 2 * NUM_CATEGORICAL  # rows and state of each table, and the dense part
    for (name, one), (other_name, other) in zip(*saved, strict=True):
        assert name == other_name
        assert one.tobytes() == other.tobytes(), jax.tree_util.keystr(name)
    one, other = (json.loads((path / "results.json").read_text()) for path in (first, second))
    for name in ("auc", "log_loss", "normalized_entropy", "calibration"):
        np.testing.assert_array_equal(one[name], other[name])
