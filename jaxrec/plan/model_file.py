"""The YAML file of tables and constraints, for planning without a model.

::

    batch_size: 65536
    optimizer: rowwise_adagrad
    dense_parameters: 12000000
    tables:
      - name: product
        num_embeddings: 40000000
        embedding_dim: 128
        pooling: sum
        pooling_factors: 20
      - {name: user, num_embeddings: 4096, embedding_dim: 64, dtype: bfloat16}

A table has the fields of `EmbeddingBagConfig`, or, with ``pooling: none``, of `EmbeddingConfig`,
and those of `jaxrec.plan.ParameterConstraints`. An optimizer is a name of `jaxrec.optim`, or a
mapping with that ``name`` and its arguments.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import yaml

from jaxrec import optim
from jaxrec.arguments import read_yaml
from jaxrec.embed.config import EmbeddingBagConfig, EmbeddingConfig, TableConfig
from jaxrec.mesh.placement import SHARDING_TYPES, Placement
from jaxrec.optim import RowOptimizer
from jaxrec.plan.constraints import ParameterConstraints


@dataclasses.dataclass(frozen=True)
class ModelFile:
    """Contents of a model file; ``dense_bytes`` are those of all other parameters."""

    tables: tuple[TableConfig, ...]
    constraints: dict[str, ParameterConstraints]
    batch_size: int | None
    dense_bytes: int


def read_model_file(path: str | os.PathLike) -> ModelFile:
    """Read a YAML file of a model; a ValueError names the file and the wrong field."""
    path = pathlib.Path(path)
    try:
        return _model(read_yaml(path.read_text()))
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from None


def _model(fields: Any) -> ModelFile:
    _check_fields(fields, "the file", ("batch_size", "optimizer", "dense_parameters", "tables"))
    tables, constraints = [], {}
    default = _optimizer(fields.get("optimizer", "rowwise_adagrad"))
    if not isinstance(fields.get("tables"), list) or not fields["tables"]:
        raise ValueError("tables is a list of at least one table")
    for number, table in enumerate(fields["tables"]):
        config, constraint = _table(table, f"table {number + 1}", default)
        if config.name in constraints:
            raise ValueError(f"two tables are named {config.name!r}; names are unique")
        tables.append(config)
        constraints[config.name] = constraint
    return ModelFile(
        tuple(tables),
        constraints,
        _whole(fields, "batch_size"),
        # Parameters are float32.
        4 * (_whole(fields, "dense_parameters") or 0),
    )


_CONSTRAINTS = tuple(
    field.name for field in dataclasses.fields(ParameterConstraints) if field.name != "dtype"
)
_TABLE = tuple(field.name for field in dataclasses.fields(EmbeddingBagConfig))


def _table(
    fields: Any, where: str, default: RowOptimizer
) -> tuple[TableConfig, ParameterConstraints]:
    if isinstance(fields, Mapping) and isinstance(fields.get("name"), str):
        where = f"table {fields['name']!r}"
    _check_fields(fields, where, (*_TABLE, *_CONSTRAINTS))
    for needed in ("name", "num_embeddings", "embedding_dim"):
        if needed not in fields:
            raise ValueError(f"{where} has no {needed}")
    config = {name: fields[name] for name in _TABLE if name in fields}
    config["optimizer"] = _optimizer(fields["optimizer"]) if "optimizer" in fields else default
    constraint = {name: fields[name] for name in _CONSTRAINTS if name in fields}
    if "placement" in constraint:
        constraint["placement"] = _placement(constraint["placement"], where)
    # YAML reads ``pooling: none`` as a string and ``pooling: null`` or nothing as None: both mean
    # per-id. Without the key, the configuration's default holds.
    is_pooled = config.get("pooling") not in ("none", None) or "pooling" not in config
    kind: type[TableConfig] = EmbeddingBagConfig
    if not is_pooled:
        kind = EmbeddingConfig
        del config["pooling"]
    try:
        return kind(**config), ParameterConstraints(**constraint)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from None


def _optimizer(value: Any) -> RowOptimizer:
    name, arguments = value, {}
    if isinstance(value, Mapping):
        arguments = dict(value)
        name = arguments.pop("name", None)
    kind = getattr(optim, name, None) if isinstance(name, str) else None
    if not (isinstance(kind, type) and issubclass(kind, RowOptimizer)) or kind is RowOptimizer:
        raise ValueError(
            f"optimizer is a name of jaxrec.optim such as rowwise_adagrad, or a mapping with that "
            f"name and its arguments, got {value!r}"
        )
    try:
        return kind(**arguments)
    except TypeError as error:
        raise ValueError(f"optimizer {name}: {error}") from None


def _placement(value: Any, where: str) -> Placement:
    """Read a sharding type, or a mapping of one to its devices or hosts."""
    kind: Any = value
    places: tuple[Any, ...] = ()
    if isinstance(value, Mapping) and len(value) == 1:
        ((kind, numbers),) = value.items()
        places = tuple(numbers) if isinstance(numbers, list) else (numbers,)
    if kind not in SHARDING_TYPES or not all(isinstance(place, int) for place in places):
        raise ValueError(
            f"{where}: placement is a sharding type such as row_wise, or one with its devices or "
            f"hosts such as {{table_wise: 3}}, got {value!r}"
        )
    if not places and SHARDING_TYPES[kind].num_places is not None:
        raise ValueError(f"{where}: placement {kind} is given with where, such as {{{kind}: 0}}")
    return Placement.from_dict({"kind": kind, "places": places})


def _whole(fields: Mapping[str, Any], name: str) -> int | None:
    value = fields.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise ValueError(f"{name} is a whole number, got {value!r}")
    return value


def _check_fields(fields: Any, where: str, known: tuple[str, ...]) -> None:
    if not isinstance(fields, Mapping):
        raise ValueError(f"{where} is a mapping of names to values, got {fields!r}")
    if unknown := [name for name in fields if name not in known]:
        raise ValueError(
            f"{where} has an unknown field {unknown[0]!r}; there are {', '.join(known)}"
        )
