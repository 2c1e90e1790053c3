"""The command line: ``jaxrec COMMAND``.

Each command has a module, which is imported when the command is given, so that a command does not
wait for the imports of others.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.metadata
import sys
from collections.abc import Sequence

from jaxrec.memory import keep_freed_memory

USAGE_ERROR = 2
FAILURE = 1


@dataclasses.dataclass(frozen=True)
class Command:
    """A command of ``jaxrec``.

    Attributes:
        module: Name of a module with a function ``run(options) -> int``, which returns the exit
            code, and with tuples of exception types ``USAGE_ERRORS`` and ``FAILURES``, of which
            only the message is printed.
        summary: Description for the list of commands.
        keeps_memory: Whether the process keeps freed memory.
    """

    module: str
    summary: str
    keeps_memory: bool = False


COMMANDS = {
    "train": Command(
        "jaxrec.train.cli", "trains a model on Parquet files or click logs", keeps_memory=True
    ),
    "quantize": Command(
        "jaxrec.serve.commands.quantize", "makes the tables of a trained model smaller"
    ),
    "data": Command("jaxrec.data.cli", "writes click logs as Parquet files"),
    "plan": Command("jaxrec.plan_command", "finds the best sharding of tables over devices"),
    "export": Command("jaxrec.serve.commands.export", "writes a trained model for prediction"),
    "predict": Command("jaxrec.serve.commands.predict", "predicts the rows of Parquet files"),
    "serve": Command("jaxrec.serve.commands.serve", "answers requests over HTTP"),
    "tune": Command("jaxrec.tune.cli", "times the kernels on your shapes and keeps the fastest"),
    "doctor": Command("jaxrec.doctor", "says what runs on this machine, and what is missing"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``jaxrec``; return the exit code.

    0: success. 1: the command failed. 2: an option is wrong. 130 and 143: stopped by SIGINT or
    SIGTERM, after saving. An error is one sentence on standard error.
    """
    name, *options = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print(_usage())
        return 0
    if name == "--version":
        print(f"jaxrec {importlib.metadata.version('jaxrec')}")
        return 0
    if name not in COMMANDS:
        similar = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f", did you mean {similar[0]}?" if similar else ""
        return _complain(USAGE_ERROR, f"jaxrec: unknown command {name!r}{hint}\n{_usage()}")
    try:
        return _run(name, options)
    except ImportError as error:
        return _complain(FAILURE, f"jaxrec {name}: {error}")
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        return _complain(FAILURE, f"jaxrec {name}: {where}{error.strerror or error}")
    except KeyboardInterrupt:
        return _complain(130, f"jaxrec {name}: interrupted")


def _run(name: str, options: Sequence[str]) -> int:
    if COMMANDS[name].keeps_memory:
        keep_freed_memory()  # before the imports
    command = importlib.import_module(COMMANDS[name].module)
    try:
        return command.run(options)
    except command.USAGE_ERRORS as error:
        return _complain(USAGE_ERROR, f"jaxrec {name}: {error}")
    except command.FAILURES as error:
        return _complain(FAILURE, f"jaxrec {name}: {error}")


def _usage() -> str:
    commands = "\n".join(f"  {name:8} {command.summary}" for name, command in COMMANDS.items())
    return (
        f"usage: jaxrec COMMAND [OPTIONS]\n\n{commands}\n\n"
        "`jaxrec COMMAND --help` lists options, `jaxrec --version` prints the version."
    )


def _complain(code: int, message: str) -> int:
    print(message, file=sys.stderr)
    return code
