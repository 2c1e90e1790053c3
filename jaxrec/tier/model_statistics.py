"""Statistics of a model's open vocabularies, caches and row stores."""

from __future__ import annotations

from flax import nnx

from jaxrec.tier.planning.tier import Tier, tier_of


def statistics(model: nnx.Module) -> dict[str, dict[str, float]]:
    """Return counts of what the vocabularies of a model did since the start of the process.

    Counts are of training batches, and include batches that `ahead` has planned but not yielded.
    Tables that read the same features have the same statistics.

    Args:
        model: A model of `jaxrec.tier.make`.

    Returns:
        For each table, by name:

        - ``lookups``: number of ids in batches, with repeats;
        - ``hits``: lookups of ids that had a row before the batch;
        - ``new``: distinct ids of each batch without a row, summed over batches;
        - ``admitted``: number of ids that got a row;
        - ``evicted``: number of ids that lost their row;
        - ``refused``: lookups that read the rows of `Dynamic.unknown`;
        - ``resident``: number of ids that have a row now;
        - ``load``: ``resident`` divided by the number of rows for ids;
        - ``hit_rate``: ``hits`` divided by ``lookups``.

        For each table with a row store also the following. Rows count with their optimizer state,
        and those that evaluations move count, too. With several processes they are the rows of
        this process's store. Milliseconds are wall-clock time in this
        process, divided by the number of training batches that the loop has taken:

        - ``fetched``, ``fetched_bytes``: rows that came back to the devices, and their bytes;
        - ``initialized``: rows that the store did not have, which got their first values;
        - ``written``, ``written_bytes``: evicted rows that were written to the store;
        - ``read_ms``, ``write_ms``: time that the store took to read and to write;
        - ``stall_ms``: time that the training thread waited for rows of the table;
        - ``last_stall_ms``: the same of the last batch alone.

    Raises:
        TypeError: The model has no table of `jaxrec.tier.make`.

    Example:
        >>> import jaxrec
        >>> config = jaxrec.EmbeddingBagConfig("item", num_embeddings=9, embedding_dim=4)
        >>> model = jaxrec.tier.make(
        ...     lambda: jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0)),
        ...     {"item": jaxrec.tier.Dynamic()})
        >>> batch = jaxrec.KeyedJaggedArray.from_lists({"item": [[2**60, 7], [7]]}, id_bits=64)
        >>> for features in jaxrec.tier.ahead(model, [batch, batch]):
        ...     _ = model(features)
        >>> values = statistics(model)["item"]
        >>> values["lookups"], values["hits"], values["admitted"], values["load"]
        (6, 3, 2, 0.25)
    """
    tier = _tier(model)
    of_vocabulary = tier.statistics()
    return {
        table.config.name: dict(of_vocabulary[each.name])
        for each in tier.vocabularies
        for table in each.tables
    }


def totals(model: nnx.Module) -> dict[str, float]:
    """Return the statistics of all vocabularies together.

    Raises:
        TypeError: The model has no table of `jaxrec.tier.make`.
    """
    tier = _tier(model)
    each = list(tier.statistics().values())
    names = dict.fromkeys(name for values in each for name in values)
    summed = {name: sum(values.get(name, 0) for values in each) for name in names}
    room = sum(of_table.vocabulary.room for of_table in tier.vocabularies)
    return summed | {
        "load": summed["resident"] / room,
        "hit_rate": summed["hits"] / max(1, summed["lookups"]),
    }


def _tier(model: nnx.Module) -> Tier:
    if (tier := tier_of(model)) is None:
        raise TypeError(
            "the model has no table with an open vocabulary; make it with jaxrec.tier.make(model, "
            "{table: jaxrec.tier.Dynamic()})"
        )
    return tier
