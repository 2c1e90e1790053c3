"""Layout of a collection: tables stored together in groups, and the features that read them."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from jaxrec.embed.config import MAX_ROWS, EmbeddingBagConfig, TableConfig
from jaxrec.embed.formats import RowFormat
from jaxrec.embed.kernels import BagLayout
from jaxrec.embed.padding import padding_ids
from jaxrec.optim import RowOptimizer, frozen
from jaxrec.ragged import KeyedJaggedArray
from jaxrec.ragged.key_segments import starts_of


@dataclasses.dataclass(frozen=True)
class Group:
    """Tables of equal width, format and optimizer, stored as one ``[num_rows, dim]`` array.

    Tables with max pooling have groups of their own.
    """

    name: str  # such as "float32_64"
    tables: tuple[TableConfig, ...]  # one under the other, in this order
    optimizer: RowOptimizer

    @property
    def dim(self) -> int:
        return self.tables[0].embedding_dim

    @property
    def row_format(self) -> RowFormat:
        """Format of the stored rows."""
        return self.tables[0].row_format

    @property
    def is_pooled(self) -> bool:
        """Whether bags are pooled, rather than read row by row."""
        return isinstance(self.tables[0], EmbeddingBagConfig)

    @property
    def takes_max(self) -> bool:
        """Whether bags have the largest element of each column of their rows."""
        return getattr(self.tables[0], "pooling", None) == "max"

    @property
    def num_rows(self) -> int:
        return sum(table.num_embeddings for table in self.tables)

    @functools.cached_property
    def row_offsets(self) -> tuple[int, ...]:
        """First row of each table."""
        return starts_of(table.num_embeddings for table in self.tables)

    @property
    def features(self) -> tuple[tuple[str, int], ...]:
        """The features that read the group, table after table: (feature, index of its table)."""
        return tuple(
            (feature, index)
            for index, table in enumerate(self.tables)
            for feature in table.feature_names
        )

    def bags(self, features: KeyedJaggedArray) -> BagLayout:
        """Return the layout of the group's features in a batch.

        Raises a KeyError if the batch lacks a feature.
        """
        # Static numbers from the batch's keys and capacities: no array is read.
        if not jnp.issubdtype(features.values.dtype, np.integer):
            raise TypeError(f"ids are integers, but the batch holds {features.values.dtype}")
        index = {key: i for i, key in enumerate(features.keys)}
        id_starts, length_starts = starts_of(features.capacities), starts_of(features.strides)
        keys = []
        for feature, table in self.features:
            if feature not in index:
                raise KeyError(
                    f"table {self.tables[table].name!r} reads feature {feature!r}, which the batch "
                    f"lacks; its keys are {', '.join(map(repr, features.keys))}"
                )
            keys.append(index[feature])
        tables = [table for _, table in self.features]
        return BagLayout(
            id_starts=tuple(id_starts[key] for key in keys),
            capacities=tuple(features.capacities[key] for key in keys),
            length_starts=tuple(length_starts[key] for key in keys),
            strides=tuple(features.strides[key] for key in keys),
            row_offsets=tuple(self.row_offsets[table] for table in tables),
            row_counts=tuple(self.tables[table].num_embeddings for table in tables),
            means=tuple(
                getattr(self.tables[table], "pooling", "sum") == "mean" for table in tables
            ),
            takes_max=self.takes_max,
        )


@dataclasses.dataclass(frozen=True)
class Output:
    """One block of a collection's output: a feature's embeddings from one table."""

    key: str  # the feature, or "feature@table" if several tables read it
    feature: str
    group: int  # index of the table's group
    position: int  # of the feature among the group's features
    dim: int  # columns of the block: the first ones of the group's rows


@dataclasses.dataclass(frozen=True, repr=False)
class TableLayout:
    """The tables of a collection, in groups, and its outputs, by table and then by feature."""

    configs: tuple[TableConfig, ...]  # in the order that the user gave
    groups: tuple[Group, ...]
    outputs: tuple[Output, ...]  # in the order of the collection's output

    # Flax prints a model with its stores. All fields of a hundred tables would fill pages.
    def __repr__(self) -> str:
        groups = (
            f"{group.name}: {', '.join(table.name for table in group.tables)}"
            for group in self.groups
        )
        return f"TableLayout({'; '.join(groups)})"

    @property
    def is_pooled(self) -> bool:
        """Whether bags of rows are pooled."""
        return self.groups[0].is_pooled

    @property
    def output_keys(self) -> tuple[str, ...]:
        """Names of the outputs."""
        return tuple(output.key for output in self.outputs)

    @property
    def output_dims(self) -> tuple[int, ...]:
        """Numbers of columns of the outputs."""
        return tuple(output.dim for output in self.outputs)

    @property
    def bounds(self) -> dict[str, int]:
        """Number of valid ids of each feature: the rows of the smallest table that it reads."""
        bounds: dict[str, int] = {}
        for table in self.configs:
            for feature in table.feature_names:
                bounds[feature] = min(
                    table.num_embeddings, bounds.get(feature, table.num_embeddings)
                )
        return bounds

    def find(self, name: str) -> tuple[Group, int]:
        """Return a table's group and its index there; raise a KeyError if no table has the name."""
        for group in self.groups:
            for index, table in enumerate(group.tables):
                if table.name == name:
                    return group, index
        names = ", ".join(repr(table.name) for table in self.configs)
        raise KeyError(f"no table is named {name!r}; there are {names}")

    def column_runs(self) -> list[tuple[int, slice]]:
        """Return the collection's columns, in order, as slices of the outputs of the groups.

        A slice is (number of the group, columns). The output of a group is ``[batch, features *
        dim]``; outputs that are neighbours in both are one slice.
        """
        # Most collections are a few runs: then the output is a few slices, not one for each
        # feature.
        runs: list[tuple[int, slice]] = []
        for output in self.outputs:
            start = output.position * self.groups[output.group].dim
            columns = slice(start, start + output.dim)
            if runs and runs[-1][0] == output.group and runs[-1][1].stop == columns.start:
                columns = slice(runs.pop()[1].start, columns.stop)
            runs.append((output.group, columns))
        return runs


def layout_tables(
    tables: Sequence[TableConfig],
    optimizer: RowOptimizer,
    apart: Callable[[TableConfig], Hashable] = lambda table: None,
) -> TableLayout:
    """Group tables and name the outputs of a collection; raise if they cannot form a collection.

    Tables for which ``apart`` returns different values do not share a group.
    """
    tables = tuple(tables)
    if not tables:
        raise ValueError("a collection has at least one table, got none")
    if len({type(table) for table in tables}) > 1:
        raise TypeError(
            "a collection has tables of one kind, got both EmbeddingBagConfig and EmbeddingConfig"
        )
    for name, count in Counter(table.name for table in tables).items():
        if count > 1:
            raise ValueError(f"{count} tables are named {name!r}; names are unique")

    padding_ids(tables)  # raises if tables that read one feature disagree
    groups = _group(tables, optimizer, apart)
    readers = Counter(feature for table in tables for feature in table.feature_names)
    place = {
        (group.tables[table].name, feature): (g, position)
        for g, group in enumerate(groups)
        for position, (feature, table) in enumerate(group.features)
    }
    outputs = tuple(
        Output(
            feature if readers[feature] == 1 else f"{feature}@{table.name}",
            feature,
            *place[table.name, feature],
            table.embedding_dim,
        )
        for table in tables
        for feature in table.feature_names
    )
    return TableLayout(tables, groups, outputs)


def inference_layout(
    configs: Sequence[TableConfig], formats: Mapping[str, RowFormat]
) -> TableLayout:
    """Group tables that are stored for inference; ``formats`` are by the table's name."""
    tables = [
        dataclasses.replace(config, trainable=False, inference_format=formats[config.name])
        for config in configs
    ]
    return layout_tables(tables, frozen())


def _group(
    tables: tuple[TableConfig, ...],
    default: RowOptimizer,
    apart: Callable[[TableConfig], Hashable],
) -> tuple[Group, ...]:
    """Group the tables of equal width, format and optimizer, with the same value of ``apart``."""
    members: dict[tuple, list[TableConfig]] = {}
    for table in tables:
        # The optimizer is part of what groups tables, so that one call updates the whole array.
        optimizer = (table.optimizer or default) if table.trainable else frozen()
        if (reason := optimizer.refuse(table.embedding_dim)) is not None:
            raise ValueError(f"table {table.name!r}: {reason}")
        takes_max = getattr(table, "pooling", None) == "max"
        kind = (table.row_format, table.embedding_dim, optimizer, apart(table), takes_max)
        members.setdefault(kind, []).append(table)

    groups: list[Group] = []
    taken: Counter[str] = Counter()
    for (row_format, dim, optimizer, *_), alike in members.items():
        for part in _within_int32(alike):
            # Groups that differ in the optimizer or in pooling are float32_64, float32_64_2, ...
            name = f"{row_format.name}_{dim}"
            taken[name] += 1
            suffix = "" if taken[name] == 1 else f"_{taken[name]}"
            groups.append(Group(name + suffix, part, optimizer))
    return tuple(groups)


def _within_int32(tables: list[TableConfig]) -> Iterator[tuple[TableConfig, ...]]:
    """Cut a list of tables into parts, so that int32 numbers the rows of each part."""
    part: list[TableConfig] = []
    for table in tables:
        num_rows = sum(other.num_embeddings for other in [*part, table])
        if part and num_rows > MAX_ROWS:
            yield tuple(part)
            part = []
        part.append(table)
    yield tuple(part)
