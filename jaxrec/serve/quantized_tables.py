"""Tables of packed rows on one device, for inference."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Shaped

from jaxrec.embed import kernels
from jaxrec.embed.config import TableConfig, check_num_rows
from jaxrec.embed.formats import PackedRows, RowFormat, as_table, check_rows
from jaxrec.embed.layout import Group, layout_tables
from jaxrec.embed.row_gradients import Activations, Residuals, RowGradients
from jaxrec.embed.tables import Tables, copy_rows
from jaxrec.optim import frozen
from jaxrec.optim.hyperparameter import Step


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedTables(Tables):
    """Tables whose rows are stored in any `RowFormat`, for inference.

    Lookups read the stored rows. Rows that are written are packed, and those that the format cannot
    hold are refused. `update` and the gradients of rows are refused.

    Attributes:
        rows: Rows of each group, in its format.
        state: No optimizer state.
        layout: The tables in groups of one width and format, none of them trained.
        formats: The format of each of the layout's groups, in their order.
    """

    formats: tuple[RowFormat, ...] = dataclasses.field(metadata={"static": True})

    @classmethod
    def zeros(
        cls, configs: Sequence[TableConfig], formats: Mapping[str, RowFormat]
    ) -> QuantizedTables:
        """Make tables whose stored bytes are zeros.

        Args:
            configs: The tables.
            formats: The format of each table, by name.

        Raises:
            ValueError: int32 cannot number the rows of a table.
        """
        check_num_rows(configs)
        configs = [dataclasses.replace(config, trainable=False) for config in configs]
        layout = layout_tables(configs, frozen(), apart=lambda table: formats[table.name])
        of_groups = tuple(formats[group.tables[0].name] for group in layout.groups)
        groups = tuple(
            dataclasses.replace(group, name=f"{row_format.name}_{group.name}")
            for group, row_format in zip(layout.groups, of_groups, strict=True)
        )
        rows = {}
        for group, row_format in zip(groups, of_groups, strict=True):
            zeros = jnp.zeros(row_format.width(group.dim), row_format.dtype)
            stored = kernels.new_rows(zeros, group.num_rows)
            rows[group.name] = as_table(stored, row_format, group.dim)
        state: dict[str, dict] = {group.name: {} for group in groups}
        return cls(rows, state, dataclasses.replace(layout, groups=groups), of_groups)

    def row_format(self, name: str) -> RowFormat:
        """Return the format of a table's rows.

        Raises:
            KeyError: No table has that name.
        """
        return self._format(self.layout.find(name)[0])

    def num_bytes(self, name: str) -> int:
        """Return the number of bytes of a table's rows.

        Raises:
            KeyError: No table has that name.
        """
        group, rows = self._find(name)
        return self._format(group).row_bytes(group.dim) * (rows.stop - rows.start)

    def packed_rows(self, name: str) -> Shaped[Array, "num_embeddings width"]:
        """Return the rows of a table as they are stored, a copy.

        Raises:
            KeyError: No table has that name.
        """
        group, rows = self._find(name)
        array = self.rows[group.name]
        return copy_rows(array.stored if isinstance(array, PackedRows) else array, rows)

    def _format(self, group: Group) -> RowFormat:
        names = [each.name for each in self.layout.groups]
        return self.formats[names.index(group.name)]

    def _check(self, group: Group, where: str, rows: Array | np.ndarray) -> None:
        check_rows(self._format(group), where, rows)

    def _refuse_update(self) -> NoReturn:
        formats = ", ".join(
            f"{config.name!r} ({self.row_format(config.name).name})" for config in self.configs
        )
        raise TypeError(
            f"tables {formats} are quantized for inference and cannot be trained; train the model "
            "that jaxrec.serve.quantize was given, and quantize it again"
        )

    def row_gradients(
        self, residuals: Residuals, cotangents: Activations
    ) -> dict[str, RowGradients]:
        self._refuse_update()

    def update(
        self,
        calls: Sequence[dict[str, RowGradients]],
        step: Step | int,
        is_applied: Bool[Array, ""] | None = None,
    ) -> QuantizedTables:
        self._refuse_update()

    def table_squares(
        self, calls: Sequence[dict[str, RowGradients]]
    ) -> dict[str, Float[Array, ""]]:
        self._refuse_update()

    def check_dense_gradient(self, name: str) -> None:
        self._refuse_update()
