"""The tables of a model that versions hold."""

from __future__ import annotations

from flax import nnx

from jaxrec.embed.collection import Collection
from jaxrec.embed.taps import tapped_modules
from jaxrec.tier.deltas.open_table import OpenTable
from jaxrec.tier.deltas.plain_table import PlainTable
from jaxrec.tier.deltas.table import PublishedTable
from jaxrec.tier.planning.tier import tier_of


def published_tables(model: nnx.Module) -> dict[str, PublishedTable]:
    """Return the tables of a model by name.

    Raises:
        TypeError: The model is no Flax module.
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(f"a model is an nnx.Module, got {model!r}")
    tier = tier_of(model)
    places = {
        (table.collection, table.config.name): (of, number)
        for of in (() if tier is None else tier.vocabularies)
        for number, table in enumerate(of.tables)
    }
    tables: dict[str, PublishedTable] = {}
    for path, collection in tapped_modules(model).items():
        if not isinstance(collection, Collection):
            continue
        for config in collection.configs:
            table: PublishedTable
            if tier is None or (path, config.name) not in places:
                table = PlainTable(path, collection, config)
            else:
                of, number = places[path, config.name]
                table = OpenTable(path, collection, config, model, tier, of, number)
            tables[table.name] = table
    return tables
