"""Training configurations from the command line and from files."""

from __future__ import annotations

import dataclasses
import pathlib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from jaxrec.arguments import ConfigError, parse, read_yaml
from jaxrec.data.encoder import SCHEMA_FILE
from jaxrec.files.atomic import write_atomically
from jaxrec.train.config import TrainConfig
from jaxrec.train.features import FEATURES_DIRECTORY

_DEFAULT = TrainConfig()

# First line of the options file of a run.
_HEADER = "# Written by jaxrec train."


def read_options(path: pathlib.Path) -> list[str]:
    """Read a YAML or TOML file and return its options as command-line arguments.

    Keys are option names, groups are mappings; dashes and underscores are equivalent.

    Raises:
        OSError: The file cannot be read.
        ConfigError: The file is neither YAML nor TOML, or an option is unknown.
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
    """Read the configuration of a YAML or TOML file; other options have their defaults.

    Raises:
        OSError: The file cannot be read.
        ConfigError: The file is neither YAML nor TOML, or an option is unknown or has a bad value.
    """
    try:
        config = parse_options(read_options(path))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if config.data.schema is not None and is_written(path):
        data = dataclasses.replace(config.data, schema=path.parent / config.data.schema)
        config = dataclasses.replace(config, data=data)
    return config


def parse_options(options: Sequence[str], default: TrainConfig = _DEFAULT) -> TrainConfig:
    """Parse command-line arguments.

    Args:
        options: The arguments.
        default: Values of the options that are not given.

    Raises:
        ConfigError: An option is unknown or has a wrong value.
        SystemExit: The arguments ask for help, which has been printed.
    """
    return parse("train", options, default)


def write_options(config: TrainConfig, path: pathlib.Path) -> None:
    """Write a configuration to a YAML file for `read_options`, complete or not at all."""
    options = _plain(config)
    for name in ("config", "resume", "output", "eval_only", "step", "profile", "job"):
        del options[name]
    if config.data.schema is not None:
        # The copy in the run's encoder, so that the run can be repeated and moved.
        options["data"]["schema"] = str(pathlib.PurePath(FEATURES_DIRECTORY, SCHEMA_FILE))
    with write_atomically(path) as unfinished:
        unfinished.write_text(f"{_HEADER}\n{yaml.safe_dump(options, sort_keys=False)}")


def is_written(path: pathlib.Path) -> bool:
    """Return whether `write_options` wrote a file."""
    return path.exists() and path.read_bytes().startswith(f"{_HEADER}\n".encode())


def _plain(config: Any) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            return _plain(value)
        if isinstance(value, tuple):
            return list(value)
        return str(value.absolute()) if isinstance(value, pathlib.Path) else value

    return {field.name: plain(getattr(config, field.name)) for field in dataclasses.fields(config)}
