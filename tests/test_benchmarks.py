"""The benchmarks that people run beside the peers still run, on small shapes."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[1]
SHAPE = {"name": "small", "T": 2, "V": 100, "D": 8, "B": 4, "L": 3, "ids": "uniform"}


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("name", ["embedding", "dlrm"])
def test_benchmarks_run(tmp_path, name):
    shapes = tmp_path / "shapes.json"
    shapes.write_text(json.dumps({"shapes": [SHAPE]}))
    options = {
        "embedding": ["--shapes", str(shapes), "--seconds", "0.01"],
        "dlrm": ["--batch", "64", "--steps", "2", "--max-rows", "100"],
    }
    # With -P Python does not import jaxrec from the checkout, and so needs the path of benchmarks.
    program = f"import runpy, sys; sys.path.append({str(ROOT)!r}); runpy.run_module"
    program += f"('benchmarks.{name}', run_name='__main__', alter_sys=True)"
    command = [sys.executable, "-P", "-c", program, *options[name]]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    times = [value for line in lines for key, value in line.items() if "ms" in key]
    assert len(lines) == (2 if name == "embedding" else 1)
    assert times
    assert np.min(times) > 0
