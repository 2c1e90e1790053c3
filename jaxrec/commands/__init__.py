"""The command line: ``jaxrec COMMAND``.

Each command is a module of this package with a function ``run(options)``, which returns the exit
code. The module's ``USAGE_ERRORS`` and ``FAILURES`` are exception types for which the user gets the
message and no traceback.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import sys
from collections.abc import Sequence

from jaxrec.memory import keep_freed_memory

USAGE_ERROR = 2
FAILURE = 1

COMMANDS = {
    "train": "trains a model on files of columns or click logs",
    "quantize": "makes the tables of a trained model smaller",
    "data": "writes click logs as Parquet files",
    "plan": "finds the best sharding of tables over devices",
    "export": "writes a trained model for prediction",
    "predict": "predicts the rows of files",
    "serve": "answers requests over HTTP",
    "tune": "times the kernels on your shapes and keeps the fastest",
    "doctor": "says what runs on this machine, and what is missing",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``jaxrec``; return the exit code.

    0: success. 1: the command failed. 2: an option is wrong. 130 and 143: stopped by SIGINT or
    SIGTERM; ``jaxrec train`` saves the model before. An error is a sentence on standard error.
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
    if name == "train":
        keep_freed_memory()  # only before the imports does it work for all threads
    # Imported now: a command, and `jaxrec --help`, must not wait for the imports of the others.
    command = importlib.import_module(f"jaxrec.commands.{name}")
    try:
        return command.run(options)
    except command.USAGE_ERRORS as error:
        return _complain(USAGE_ERROR, f"jaxrec {name}: {error}")
    except command.FAILURES as error:
        return _complain(FAILURE, f"jaxrec {name}: {error}")


def _usage() -> str:
    commands = "\n".join(f"  {name:8} {summary}" for name, summary in COMMANDS.items())
    return (
        f"usage: jaxrec COMMAND [OPTIONS]\n\n{commands}\n\n"
        "`jaxrec COMMAND --help` lists options, `jaxrec --version` prints the version."
    )


def _complain(code: int, message: str) -> int:
    print(message, file=sys.stderr)
    return code
