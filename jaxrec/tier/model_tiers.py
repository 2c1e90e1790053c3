"""Making models whose tables have open vocabularies, or most of their rows in a store."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, TypeVar, cast

import jax
import numpy as np
from flax import nnx

from jaxrec.embed.collection import Collection, find_collections
from jaxrec.embed.config import TableConfig
from jaxrec.embed.layout import TableLayout
from jaxrec.embed.row_keys import key_words
from jaxrec.mesh.sharding import ON_SHARDED
from jaxrec.optim import RowOptimizer
from jaxrec.tier.planning.model_tables import (
    TableVocabulary,
    TieredTable,
    collections_of,
)
from jaxrec.tier.planning.tier import Tier, tier_of
from jaxrec.tier.rows.records import RecordLayout
from jaxrec.tier.rows.transfer import RowTransfer
from jaxrec.tier.store import TierStore, cached_tables, with_zeros
from jaxrec.tier.stores import open_store, url_for
from jaxrec.tier.stores.row_store import RowStore
from jaxrec.tier.vocabulary.settings import Cached, Dynamic
from jaxrec.tier.vocabulary.vocabulary import Vocabulary

Model = TypeVar("Model", bound=nnx.Module)

Settings: TypeAlias = Mapping[str, Dynamic | Cached]


def make(model: Model | Callable[[], Model], tables: Settings, *, seed: int | None = None) -> Model:
    """Give tables of a model open vocabularies, or keep most of their rows in a store.

    Call the model with the batches of `jaxrec.tier.ahead`; the training loop stays as it is. Over a
    mesh, call `make` in the function that `jaxrec.shard` calls:
    ``jaxrec.shard(lambda: jaxrec.tier.make(make_model, tables), plan, mesh)``.

    Args:
        model: The model, which is changed in place, or a function that makes it. Tables with
            `Cached` need a function.
        tables: Settings by name of table. If several collections have a table of one name, the
            settings are for each of them. Tables that read the same features must have the same
            settings.
        seed: Seed of the first rows of ids. None: an id's row begins as in a table with all rows,
            drawn with the key of the model's ``rngs``. A copy of a model, or a model made within
            `jax.jit`, has lost this key; None is then 0.

    Returns:
        The model.

    Raises:
        TypeError: An argument has another type; a table has `Cached` and ``model`` is no function;
            or a table is quantized.
        ValueError: A name is not that of a table; tables that share a feature have different
            settings or ``num_embeddings``, or one of them has no settings; two tables have the same
            store; an optimizer changes all rows between steps; or the model has vocabularies
            already.

    Example:
        >>> import jaxrec
        >>> from flax import nnx
        >>> config = jaxrec.EmbeddingBagConfig("item", num_embeddings=1000, embedding_dim=8)
        >>> model = make(
        ...     lambda: jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0)),
        ...     {"item": jaxrec.tier.Dynamic(eviction=jaxrec.tier.lfu(), admit_after=2)})
    """
    _check_arguments(model, tables)
    sizes = {name: each.rows for name, each in tables.items() if isinstance(each, Cached)}
    if not isinstance(model, nnx.Module):
        # The tables are made with the cache's rows: the whole ones may not fit the devices.
        with cached_tables(sizes) as whole:
            made = model()
    elif sizes:
        raise TypeError(
            f"table {next(iter(sizes))!r} has jaxrec.tier.Cached, but the model is made already, "
            "with all of the table's rows; give jaxrec.tier.make a function that makes the model"
        )
    else:
        made, whole = cast(Model, model), {}
    return _with_tiers(made, whole, tables, seed)


def make_cached(make_model: Callable[[], Model], caches: Mapping[str, tuple[int, str]]) -> Model:
    """Make a model with caches: ``caches`` has the rows and the store of `Cached` by table.

    Tables that the model lacks are skipped.
    """
    # For `ShardingPlan.maker`: the model may lack tables of the plan, which is no error.
    sizes = {name: rows for name, (rows, _) in caches.items()}
    with cached_tables(sizes) as whole:
        made = make_model()
    found = find_collections(made).values()
    names = {config.name for module in found for config in module.configs}
    tables = {name: Cached(*caches[name]) for name in caches if name in names}
    return _with_tiers(made, whole, tables, seed=None) if tables else made


def close(model: nnx.Module) -> None:
    """Close the row stores of a model, so that another model or process may open them.

    Rows on their way to the stores are written first. Do not train or evaluate the model
    afterwards. The end of the process closes the stores, too.

    Args:
        model: A model of `jaxrec.tier.make`. A model without row stores stays as it is.

    Raises:
        RuntimeError: Rows could not be written.

    Example:
        >>> import jaxrec, tempfile
        >>> config = jaxrec.EmbeddingBagConfig("user", num_embeddings=1000, embedding_dim=4)
        >>> store = f"file://{tempfile.mkdtemp()}/users"
        >>> def make():
        ...     embeddings = lambda: jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
        ...     return jaxrec.tier.make(embeddings, {"user": jaxrec.tier.Cached(100, store)})
        >>> first = make()
        >>> jaxrec.tier.close(first)
        >>> second = make()
    """
    if (tier := tier_of(model)) is not None:
        tier.close(model)


def divide_stores(model: nnx.Module) -> None:
    """Divide the rows in a model's row stores among the processes, if all share its tables."""
    processes = set(range(jax.process_count()))
    if (tier := tier_of(model)) is None or len(processes) == 1:
        return
    places = [each.tables.get_value().devices for each in collections_of(model).values()]
    if all(
        place.mesh is not None
        and not place.has_replicas  # they have rows of their own until they are averaged
        and {device.process_index for device in place.mesh.devices.flat} == processes
        for place in places
    ):
        tier.divide_stores()


# `jaxrec.mesh` may not import this package, so that it is told whom to call.
ON_SHARDED.append(divide_stores)


def _with_tiers(
    made: Model, whole: Mapping[str, TableConfig], tables: Settings, seed: int | None
) -> Model:
    """Give a model's tables their vocabularies and stores.

    ``whole`` has the user's configurations of the tables that were made with fewer rows.
    """
    # All checks come before the first store is opened: an open store would stay locked after an
    # error.
    found = find_collections(made)
    all_tables = [
        TieredTable(path, whole.get(config.name, config), _optimizer(module, config.name))
        for path, module in found.items()
        for config in module.configs
    ]
    _check_names(tables, all_tables, found)
    _check_tables(tables, all_tables, whole)
    parts = _by_feature(all_tables, tables)
    _check_stores(parts, tables)
    vocabularies = [_vocabulary(part, tables, found) for part in parts]
    tier = Tier(vocabularies, {path: _first_key(module, seed) for path, module in found.items()})
    # Compiled and donated, so that the tables are not copied for one row each.
    set_zeros = jax.jit(with_zeros, static_argnums=1, donate_argnums=0)
    for path, module in found.items():
        here = [
            (table.config, each.vocabulary.settings.unknown.kind)
            for each in vocabularies
            for table in each.tables
            if table.collection == path
        ]
        if here:
            features = {feature for config, _ in here for feature in config.feature_names}
            zeros = tuple(config.name for config, kind in here if kind == "zeros")
            store = set_zeros(module.tables.get_value(), zeros)
            configs = tuple(table.config for table in all_tables if table.collection == path)
            module.tables.set_value(
                TierStore(store, tier, tuple(sorted(features)), zeros, configs, path)
            )
    return made


def _check_arguments(model: object, tables: object) -> None:
    if not isinstance(model, nnx.Module) and not callable(model):
        raise TypeError(f"a model is an nnx.Module, or a function that makes one, got {model!r}")
    if not isinstance(tables, Mapping) or not all(
        isinstance(name, str) and isinstance(each, Dynamic | Cached)
        for name, each in tables.items()
    ):
        raise TypeError(
            "tables are settings by name, such as {'item': jaxrec.tier.Dynamic()}, got "
            f"{tables!r}"
        )
    if not tables:
        raise ValueError("tables names no table; give {'item': jaxrec.tier.Dynamic()}")


def _check_names(
    tables: Settings, all_tables: Sequence[TieredTable], found: Mapping[str, Collection]
) -> None:
    names = {table.config.name for table in all_tables}
    if unknown := sorted(set(tables) - names):
        raise ValueError(
            f"the model has no table {unknown[0]!r}; it has {', '.join(map(repr, sorted(names)))}"
        )
    if any(isinstance(module.tables.get_value(), TierStore) for module in found.values()):
        raise ValueError(
            "the model has open vocabularies already; name all their tables in one call of "
            "jaxrec.tier.make"
        )


def _check_tables(
    tables: Settings, all_tables: Sequence[TieredTable], whole: Mapping[str, TableConfig]
) -> None:
    """Raise an error if a table with settings cannot have some of its rows elsewhere.

    Such tables are quantized, have an optimizer that changes all rows between steps, or are
    `Cached` and missing in ``whole``: the tables that were made with their cache's rows.
    """
    for config, optimizer in ((table.config, table.optimizer) for table in all_tables):
        if config.name not in tables:
            continue
        if config.inference_format is not None:
            raise TypeError(
                f"table {config.name!r} is quantized ({config.row_format.name}) and has all of its "
                f"rows on the devices; give jaxrec.tier.{type(tables[config.name]).__name__} to a "
                "table of the model that was quantized"
            )
        if optimizer.sweeps:
            raise ValueError(
                f"table {config.name!r} has the optimizer {type(optimizer).__name__}, which "
                "changes all of its rows between steps, also those that are in a row store; use "
                "jaxrec.optim.ema, which changes the rows of a batch, or leave the table out of "
                "jaxrec.tier.make"
            )
        if isinstance(tables[config.name], Cached) and config.name not in whole:
            raise ValueError(
                f"table {config.name!r} has jaxrec.tier.Cached, but its collection was made with a "
                "store of its own, or before; make it in the function, without store="
            )


def _by_feature(all_tables: Sequence[TieredTable], tables: Settings) -> list[list[TieredTable]]:
    """Return the tables with settings, in lists of tables that share features.

    A ValueError is raised if tables that read one feature cannot share its rows.
    """
    # A batch has one row index for each id of a feature, so all tables that read it must agree on
    # the row. Sharing is transitive: where a second feature joins two lists, they become one.
    readers: dict[str, list[TieredTable]] = collections.defaultdict(list)
    for table in all_tables:
        for feature in table.config.feature_names:
            readers[feature].append(table)
    parts: dict[TieredTable, list[TieredTable]] = {
        table: [table] for table in all_tables if table.config.name in tables
    }
    for feature, of_feature in readers.items():
        dynamic = [table for table in of_feature if table in parts]
        for table in of_feature:
            if dynamic and table not in parts:
                raise ValueError(
                    f"feature {feature!r} is read by table {dynamic[0].config.name!r}, which has "
                    f"{_kind(tables[dynamic[0].config.name])}, and by {table.config.name!r}, which "
                    "has not; give both the same settings, or each a feature of its own"
                )
        for table in dynamic[1:]:
            _check_alike(feature, dynamic[0], table, tables)
            if parts[table] is not parts[dynamic[0]]:
                joined = parts[dynamic[0]] + parts[table]
                parts.update(dict.fromkeys(joined, joined))
    return list({id(part): part for part in parts.values()}.values())  # each list once


def _check_alike(feature: str, first: TieredTable, second: TieredTable, tables: Settings) -> None:
    """Raise a ValueError if two tables that read a feature differ in settings or in their rows."""
    names = first.config.name, second.config.name
    rows = first.config.num_embeddings, second.config.num_embeddings
    paddings = first.config.padding_id, second.config.padding_id
    both = (
        f"tables {names[0]!r} and {names[1]!r} both read feature {feature!r}, so that an id "
        "has the same row in both, but"
    )
    if tables[names[0]] != tables[names[1]]:
        raise ValueError(f"{both} their settings differ; give both the same")
    if rows[0] != rows[1]:
        raise ValueError(
            f"{both} they have {rows[0]} and {rows[1]} rows; give both the same num_embeddings"
        )
    if paddings[0] != paddings[1]:
        raise ValueError(
            f"{both} they have padding_id={paddings[0]} and {paddings[1]}; give both the same"
        )


def _check_stores(parts: Sequence[Sequence[TieredTable]], tables: Settings) -> None:
    """Raise a ValueError if tables that do not share a vocabulary have the same store."""
    names: dict[str | RowStore, str] = {}
    for part in parts:
        name = part[0].config.name
        store = _store(tables[name].store, part)
        if store is None or store == "memory://":
            continue  # each open of "memory://" is a store of its own
        if (other := names.setdefault(store, name)) != name:
            raise ValueError(
                f"tables {other!r} and {name!r} have the same store {store!r}, and the rows of an "
                "id would be mixed; give each table a store of its own, or one URL with {table} in "
                "the place of the name, such as 'file:///data/{table}'"
            )


def _store(store: str | RowStore | None, part: Sequence[TieredTable]) -> str | RowStore | None:
    """Return the store of a vocabulary's tables, with the URL of this process."""
    if not isinstance(store, str):
        return store
    return url_for(store, _name(part), jax.process_index(), jax.process_count())


def _name(part: Sequence[TieredTable]) -> str:
    return "+".join(dict.fromkeys(table.config.name for table in part))


def _vocabulary(
    part: Sequence[TieredTable], tables: Settings, found: Mapping[str, Collection]
) -> TableVocabulary:
    given = tables[part[0].config.name]
    num_embeddings = part[0].config.num_embeddings
    if isinstance(given, Cached):
        settings, num_ids, rows = given.vocabulary, num_embeddings, min(given.rows, num_embeddings)
    else:
        settings, num_ids, rows = given, None, num_embeddings
    name = _name(part)
    features = dict.fromkeys(f for table in part for f in table.config.feature_names)
    try:
        vocabulary = Vocabulary(rows, settings, num_ids)
    except ValueError as error:
        raise ValueError(f"table {name}: {error}") from None
    transfer = None
    if settings.store is not None:
        names = [table.config.name for table in part]
        stores = [found[table.collection].tables.get_value() for table in part]
        shapes = [s.checkpoint_shapes(n) for s, n in zip(stores, names, strict=True)]
        layout = RecordLayout.of(shapes)
        format = layout.record_format(names, num_ids)
        try:
            store = open_store(cast(str | RowStore, _store(settings.store, part)))
            transfer = RowTransfer(store, layout, format)
        except (ValueError, OSError) as error:
            error.add_note(f"this is the store of table {name}")
            raise
    return TableVocabulary(name, tuple(features), tuple(part), vocabulary, transfer, num_ids)


def _optimizer(collection: Collection, table: str) -> RowOptimizer:
    layout = collection.tables.get_value().layout
    # The layout of tables on a mesh contains the one that they had on one device.
    whole = layout if isinstance(layout, TableLayout) else layout.whole
    return whole.find(table)[0].optimizer


def _first_key(collection: Collection, seed: int | None) -> np.ndarray:
    """Return the key of a collection's first rows, uint32 ``[2]``."""
    key = collection.first_key if seed is None else None
    return np.asarray(key_words(jax.random.key(seed or 0) if key is None else key))


def _kind(settings: Dynamic | Cached) -> str:
    return "an open vocabulary" if isinstance(settings, Dynamic) else "jaxrec.tier.Cached"
