"""Command-line options and their errors."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import itertools
import pathlib
import re
import typing
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, TypeVar

import tyro
import yaml

Options = TypeVar("Options")

# Default of required paths: a path that no file can have. With a default the command itself
# reports a missing path, in a sentence, where tyro would print a box.
NOT_GIVEN = pathlib.Path("\0")

# Largest number of options that an error lists.
_MAX_LISTED = 8


class ConfigError(ValueError):
    """An option or a file of options is wrong; the message is a sentence for the user."""


def parse(command: str, options: Sequence[str], default: Options) -> Options:
    """Parse the options after a command's name, with the values of a dataclass as defaults.

    Raises `ConfigError` for a wrong option, and `SystemExit` after printing help.
    """
    # tyro prints its errors in a box on standard error: catch the text and make it a sentence.
    problem = io.StringIO()
    try:
        with contextlib.redirect_stderr(problem):
            parsed, unknown = tyro.cli(
                type(default),
                prog=f"jaxrec {command}",
                args=list(options),
                default=default,
                return_unknown_args=True,
            )
    except SystemExit as stop:
        # Code 0: --help was printed.
        if not stop.code:
            raise
        # If a path is missing, too, tyro does not come to an option that it does not know.
        if option := _unknown_option(options, type(default)):
            raise ConfigError(_describe_unknown(command, option, type(default))) from None
        raise ConfigError(_sentence(problem.getvalue())) from None
    if unknown:
        # The shell has replaced an unquoted pattern by its files.
        if not unknown[0].startswith("-") and pathlib.Path(unknown[0]).exists():
            raise ConfigError(
                f"{unknown[0]} is a file too many; put a pattern of files in quotes, such as "
                "'parts/*.parquet'"
            )
        option = unknown[0].partition("=")[0]
        raise ConfigError(_describe_unknown(command, option, type(default)))
    return parsed


def required(name: str) -> Any:
    """Return the annotation of an option whose default is `NOT_GIVEN`; help names it ``name``."""
    return tyro.conf.arg(metavar=name, help_behavior_hint="(required)")


def read_yaml(text: str) -> Any:
    """Parse YAML; raise `yaml.YAMLError` if it is not valid or repeats a key."""
    return yaml.load(text, _UniqueKeys)


class _UniqueKeys(yaml.SafeLoader):
    """Loader that refuses repeated keys, as YAML demands; PyYAML takes the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for index, key in enumerate(keys):
            # "<<" merges another mapping, and may come several times.
            if key in keys[:index] and key != "<<":
                line = node.value[index][0].start_mark.line + 1
                raise yaml.YAMLError(f"{key!r} is given twice, the second time in line {line}")
        return super().construct_mapping(node, deep)


@dataclasses.dataclass(frozen=True)
class OptionNames:
    """The names of an option, without dashes first.

    Attributes:
        name: The whole name, such as "data.batch-size".
        aliases: Its other names, such as "batch-size".
        path: Name of a path that is given without the option's name, such as "RUN"; else None.
    """

    name: str
    aliases: tuple[str, ...] = ()
    path: str | None = None


def option_names(kind: type, prefix: str = "") -> Iterator[OptionNames]:
    """Yield the names of each option of a dataclass, and of the groups of options in it."""
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        name = f"{prefix}{field.name.replace('_', '-')}"
        if dataclasses.is_dataclass(field.default):
            yield from option_names(type(field.default), f"{name}.")
            continue
        marks = typing.get_args(hints[field.name])[1:]
        aliases = [x.lstrip("-") for mark in marks for x in getattr(mark, "aliases", None) or ()]
        metavars = [x for mark in marks if (x := getattr(mark, "metavar", None))]
        is_path = tyro.conf.Positional in marks
        yield OptionNames(name, tuple(aliases), (name, *metavars)[-1] if is_path else None)


def _unknown_option(words: Sequence[str], kind: type) -> str | None:
    """Return the first word that looks like an option and is none."""
    known = {"help", "h"}
    for each in option_names(kind):
        if each.path is not None:
            continue
        # tyro puts the "no-" of a flag in a group after the group's name.
        group, dot, last = each.name.rpartition(".")
        known |= {each.name, f"{group}{dot}no-{last}", *each.aliases}
    for word in words:
        option = word.partition("=")[0]
        if option.startswith("--") and option[2:].replace("_", "-") not in known:
            return option
    return None


def _describe_unknown(command: str, option: str, kind: type) -> str:
    """Return a sentence about an option that a command does not have, and what it has."""
    names = [*option_names(kind)]
    paths = [each.path for each in names if each.path is not None]
    options = [f"--{each.name}" for each in names if each.path is None]
    similar = similar_names(option, options)
    text = f"unknown option {option}" + (
        f", did you mean {' or '.join(similar)}?" if similar else ";"
    )
    shown = f"`jaxrec {command} --help` lists all options"
    if len(options) <= _MAX_LISTED:
        shown = f"the options are {', '.join(options)}"
    if paths:
        return f"{text} `jaxrec {command}` takes {' '.join(paths)} without names, and {shown}"
    return f"{text} {shown}"


def similar_names(option: str, names: Sequence[str]) -> list[str]:
    """Return the options that a user may have meant."""
    # --batch-size instead of --data.batch-size is more likely than a slip: compare the names
    # without their groups first.
    option = option.replace("_", "-")
    in_groups = {name: name.rpartition(".")[2].lstrip("-") for name in names}
    if same := [name for name, last in in_groups.items() if last == option.lstrip("-")]:
        return same
    if alike := difflib.get_close_matches(option, names, n=2, cutoff=0.8):
        return alike
    lasts = difflib.get_close_matches(option.lstrip("-"), in_groups.values(), n=1, cutoff=0.8)
    return [name for name, last in in_groups.items() if last in lasts]


def _sentence(text: str) -> str:
    """Return tyro's error as one sentence: the lines between the title and the next rule."""
    lines = [line.strip(" │") for line in text.strip().splitlines()][1:]
    # Without a terminal a rule follows the title.
    lines = lines[1:] if lines and _is_rule(lines[0]) else lines
    message = " ".join(itertools.takewhile(lambda line: not _is_rule(line), lines))
    # The message of incompatible options names them; drop tyro's name of their group.
    message = re.sub(r"^Error parsing (?!-)\S+( \S+)?: ", "", message)
    return message or " ".join(text.split())


def _is_rule(line: str) -> bool:
    return set(line) <= set("-─╰╯")
