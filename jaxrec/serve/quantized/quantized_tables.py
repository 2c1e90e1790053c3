"""Tables of packed rows on one device, for inference."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NoReturn

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from jaxrec.embed import kernels
from jaxrec.embed.config import TableConfig, check_num_rows, refuse_training
from jaxrec.embed.formats import RowFormat, as_table
from jaxrec.embed.layout import layout_tables
from jaxrec.embed.row_gradients import Activations, Residuals, RowGradients
from jaxrec.embed.tables import Tables
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
    """

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
        tables = [
            dataclasses.replace(config, trainable=False, inference_format=formats[config.name])
            for config in configs
        ]
        check_num_rows(tables)
        layout = layout_tables(tables, frozen())
        rows = {}
        for group in layout.groups:
            row_format = group.row_format
            zeros = jnp.zeros(row_format.width(group.dim), row_format.dtype)
            stored = kernels.new_rows(zeros, group.num_rows)
            rows[group.name] = as_table(stored, row_format, group.dim)
        return cls(rows, {group.name: {} for group in layout.groups}, layout)

    @property
    def formats(self) -> tuple[RowFormat, ...]:
        """The format of each of the layout's groups, in their order."""
        return tuple(group.row_format for group in self.layout.groups)

    def row_format(self, name: str) -> RowFormat:
        """Return the format of a table's rows.

        Raises:
            KeyError: No table has that name.
        """
        return self.layout.find(name)[0].row_format

    def num_bytes(self, name: str) -> int:
        """Return the number of bytes of a table's rows.

        Raises:
            KeyError: No table has that name.
        """
        group, rows = self.find(name)
        return group.row_format.row_bytes(group.dim) * (rows.stop - rows.start)

    def packed_rows(self, name: str) -> Shaped[Array, "num_embeddings width"]:
        """Return the rows of a table as they are stored, a copy.

        Raises:
            KeyError: No table has that name.
        """
        return self.stored_rows(name)

    def _refuse_update(self) -> NoReturn:
        refuse_training(self.configs)
        raise AssertionError("every table is for inference")

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
