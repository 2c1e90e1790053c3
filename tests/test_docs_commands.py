"""The list of the commands in the docs, which .ci/docs_commands.py runs."""

from __future__ import annotations

import importlib.util
import pathlib

SCRIPT = pathlib.Path(__file__).parents[1] / ".ci/docs_commands.py"


def test_each_command_of_the_docs_is_listed_once(capsys):
    spec = importlib.util.spec_from_file_location("docs_commands", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.wrong_entries()
    assert capsys.readouterr().out == ""
