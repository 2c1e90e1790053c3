"""Training configurations from the command line and from files."""

from __future__ import annotations

import dataclasses
import pathlib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from jaxrec.arguments import ConfigError, parse, read_yaml
from jaxrec.train.config import TrainConfig

_DEFAULT = TrainConfig()

# The first line of the options that a run writes.
_HEADER = "# Written by jaxrec train."


def read_options(path: pathlib.Path) -> list[str]:
    """The options of a YAML or TOML file, as they would stand on the command line.

    Options are keys, groups are mappings of them; dashes and underscores are the same.

    Raises:
        OSError: The file cannot be read.
        ConfigError: It is not YAML or TOML, or names an option that there is not.
    """
    try:
        text = path.read_text()
        options = tomllib.loads(text) if path.suffix == ".toml" else read_yaml(text)
    except (tomllib.TOMLDecodeError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(" ".join(str(error).split())) from None
    if options is None:
        return []
    if not isinstance(options, Mapping):
        raise ConfigError(f"expected options and their values, got {options!r}")
    return [token for option in _tokens(TrainConfig, options, "") for token in option]


def _tokens(config: type, options: Mapping[str, Any], prefix: str) -> Iterator[list[str]]:
    known = {
        field.name: field.default if dataclasses.is_dataclass(field.default) else None
        for field in dataclasses.fields(config)
        if field.name != "config"
    }
    for key, value in options.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ConfigError(
                f"unknown option {prefix}{key}; "
                f"{'options of ' + prefix[:-1] if prefix else 'options'} are "
                f"{', '.join(name.replace('_', '-') for name in known)}"
            )
        option = f"{prefix}{name.replace('_', '-')}"
        group = known[name]
        if group is None:
            values = value if isinstance(value, list) else [value]
            yield [f"--{option}", *map(str, values)]
        elif isinstance(value, Mapping):
            yield from _tokens(type(group), value, f"{option}.")
        else:
            raise ConfigError(f"{option} is a group of options, got {value!r}")


def load_config(path: pathlib.Path) -> TrainConfig:
    """The configuration that a YAML or TOML file describes, everything else as it is by default.

    Raises:
        OSError: The file cannot be read.
        ConfigError: It is not YAML or TOML, or an option is none or has a wrong value.
    """
    try:
        return parse_options(read_options(path))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def parse_options(options: Sequence[str], default: TrainConfig = _DEFAULT) -> TrainConfig:
    """The configuration that command-line options describe.

    Args:
        options: As they stand on the command line.
        default: What holds where they say nothing.

    Raises:
        ConfigError: An option is unknown or has a wrong value.
        SystemExit: They ask for help, which has been printed.
    """
    return parse("train", options, default)


def write_options(config: TrainConfig, path: pathlib.Path) -> None:
    """Writes options so that `read_options` finds them again, all of them or, if killed, none."""
    options = _plain(config)
    for own in ("config", "resume", "output", "eval_only", "step", "profile", "job"):
        del options[own]
    # A run has a schema of its own, in its features.
    for own in ("schema", "label"):
        del options["data"][own]
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(f"{_HEADER}\n{yaml.safe_dump(options, sort_keys=False)}")
    unfinished.replace(path)


def is_written(path: pathlib.Path) -> bool:
    """Whether a file is one that `write_options` wrote."""
    return path.exists() and path.read_bytes().startswith(f"{_HEADER}\n".encode())


def _plain(config: Any) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            return _plain(value)
        if isinstance(value, tuple):
            return list(value)
        return str(value.absolute()) if isinstance(value, pathlib.Path) else value

    return {field.name: plain(getattr(config, field.name)) for field in dataclasses.fields(config)}
