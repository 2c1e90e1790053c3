"""Options of the command line, and what is said when they are wrong."""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Sequence
from typing import TypeVar

import tyro

Options = TypeVar("Options")


class ConfigError(ValueError):
    """An option, or a file of options, that cannot be used; one sentence for the user."""


def parse(command: str, options: Sequence[str], default: Options) -> Options:
    """What command-line options say.

    Args:
        command: Name of the command, such as "train".
        options: As they stand on the command line.
        default: A dataclass of what holds where they say nothing.

    Raises:
        ConfigError: An option is unknown or has a wrong value.
        SystemExit: They ask for help, which has been printed.
    """
    problem = io.StringIO()
    try:
        with contextlib.redirect_stderr(problem):
            found, unknown = tyro.cli(
                type(default),
                prog=f"jaxrec {command}",
                args=list(options),
                default=default,
                return_unknown_args=True,
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise ConfigError(_sentence(problem.getvalue())) from None
    if unknown:
        raise ConfigError(
            f"unknown option {unknown[0]}; `jaxrec {command} --help` lists all options"
        )
    return found


def _sentence(text: str) -> str:
    """What tyro says is wrong, as one sentence: what stands between title and next rule."""
    lines = [line.strip(" │") for line in text.strip().splitlines()][1:]
    # Without a terminal the title has a rule of its own.
    lines = lines[1:] if lines and _is_rule(lines[0]) else lines
    message = " ".join(itertools.takewhile(lambda line: not _is_rule(line), lines))
    return message or " ".join(text.split())


def _is_rule(line: str) -> bool:
    return set(line) <= set("-─╰╯")
