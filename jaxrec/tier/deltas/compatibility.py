"""Whether a copy can take over the tables and variables of a version."""

from __future__ import annotations

import numpy as np
from flax import nnx

from jaxrec.embed.variables import dense_variables, plain
from jaxrec.tier.deltas.manifest import TableFacts
from jaxrec.tier.deltas.table import PublishedTable


def check_tables(
    tables: dict[str, PublishedTable], published: dict[str, TableFacts], with_state: bool
) -> None:
    """Check that the tables of a copy can take over those that were published.

    Raises:
        ValueError: A table is missing or of another form.
    """
    if different := sorted(tables.keys() ^ published.keys()):
        where = "the copy has not" if different[0] in published else "was not published"
        raise ValueError(
            f"table {different[0]!r} {where}; make the copy as the model that is published"
        )
    for name, table in tables.items():
        mine, theirs = table.facts, published[name]
        for field in ("embedding_dim", "dtype", "is_open", "unknown"):
            _require_same(name, field, getattr(mine, field), getattr(theirs, field))
        if not theirs.is_open:
            _require_same(name, "num_embeddings", mine.num_embeddings, theirs.num_embeddings)
        if isinstance(theirs.seed, int):
            raise ValueError(
                f"table {name!r} was published by an earlier jaxrec, in which ids without a row "
                f"begin in another way (seed={theirs.seed}); publish it by this one"
            )
        if theirs.seed is not None:
            _require_same(name, "initializer", table.initializer, theirs.initializer)
        if with_state:
            if theirs.state is None:
                raise ValueError(
                    f"table {name!r} was published without its optimizer state; publish with_state="
                    "True, or leave with_state out here"
                )
            _require_same(name, "state", mine.state, theirs.state)


def _require_same(table: str, field: str, mine: object, theirs: object) -> None:
    if mine != theirs:
        raise ValueError(
            f"table {table!r} was published with {field}={theirs!r}, but the copy has {mine!r}; "
            "make the copy as the model that is published"
        )


def check_dense(copy: nnx.Module, published: dict[str, np.ndarray]) -> None:
    """Check that a copy has the variables that were published.

    Raises:
        ValueError: It has others.
    """
    mine = {name: plain(x.get_raw_value()) for name, x in dense_variables(copy).items()}
    if different := sorted(mine.keys() ^ published.keys()):
        where = "the copy has not" if different[0] in published else "was not published"
        raise ValueError(
            f"variable {different[0]!r} {where}; make the copy as the model that is published"
        )
    for name, value in mine.items():
        forms = [f"{np.dtype(x.dtype).name}{list(x.shape)}" for x in (published[name], value)]
        if forms[0] != forms[1]:
            raise ValueError(
                f"variable {name!r} was published as {forms[0]}, but the copy has {forms[1]}; make "
                "the copy as the model that is published"
            )
