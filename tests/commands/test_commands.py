"""The command line apart from its commands."""

from __future__ import annotations

import importlib
import subprocess
import sys

import jaxrec
from jaxrec.commands import main
from tests.commands.test_train import run


def test_commands(capsys):
    assert main([]) == 0
    assert "train" in capsys.readouterr().out
    assert main(["bogus"]) == 2
    assert "unknown command 'bogus'\n" in capsys.readouterr().err
    assert main(["trian"]) == 2
    assert "unknown command 'trian', did you mean train?" in capsys.readouterr().err
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"jaxrec {jaxrec.__version__}\n"


def test_the_module_is_the_command(tmp_path):
    done = run("--version", cwd=tmp_path)
    assert (done.returncode, done.stdout.split()[0], done.stderr) == (0, "jaxrec", "")


def test_help_waits_for_no_imports(tmp_path):
    program = "import sys, jaxrec.commands as c; c.main(['--help']); print('jax' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.endswith("\nFalse\n"), done.stderr


def test_an_interrupt_while_a_command_is_imported(monkeypatch, capsys):
    def import_module(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", import_module)
    assert main(["train"]) == 130
    assert capsys.readouterr().err == "jaxrec train: interrupted\n"


def test_a_package_that_is_missing_is_one_sentence(monkeypatch, capsys):
    def run(options):
        raise ImportError("drawing needs matplotlib: pip install 'jaxrec[plot]'")

    monkeypatch.setattr("jaxrec.commands.plan.run", run)
    assert main(["plan", "model.yaml"]) == 1
    error = capsys.readouterr().err
    assert error == "jaxrec plan: drawing needs matplotlib: pip install 'jaxrec[plot]'\n"
