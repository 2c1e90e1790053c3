"""Tables that share features: an id has a row in all of their caches, or in none."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jaxrec.plan.caches import TableCache
from jaxrec.plan.constraints import ParameterConstraints
from jaxrec.plan.problem import Problem, Solution
from jaxrec.plan.workload import TableWorkload

_NO_CONSTRAINTS = ParameterConstraints()


def join_constraints(
    workloads: Sequence[TableWorkload],
    constraints: Mapping[str, ParameterConstraints],
    storages: Sequence[str],
) -> dict[str, ParameterConstraints]:
    """Return the constraints of every table, with storages that tables with common features share.

    Tables that share features get the storages that all of them allow, and the largest
    ``cache_ratio`` of any. ``storages`` are for tables without such a constraint.
    """
    by_name = {workload.name: workload for workload in workloads}
    given = {name: constraints.get(name, _NO_CONSTRAINTS) for name in by_name}
    own = {
        # A fixed placement is for the device, unless its constraint names another storage.
        name: tuple(each.storages or (storages if each.placement is None else ("device",)))
        for name, each in given.items()
    }
    result: dict[str, ParameterConstraints] = {}
    for name, workload in by_name.items():
        # A batch has one array of ids per feature, and a cache replaces ids by its slots. So tables
        # that read a feature must give an id the same slot: all cached alike, or none.
        joined = workload.joined or (name,)
        common = [each for each in own[name] if all(each in own[other] for other in joined)]
        # An id would have a row in one table and be out of range in the other.
        if len({by_name[other].rows for other in joined}) > 1:
            common = [each for each in common if each == "device"]
        if not common:
            of_tables = "; ".join(
                f"{other!r} with {by_name[other].rows:,} rows in {' or '.join(own[other])}"
                for other in joined
            )
            raise ValueError(
                "tables that share features are kept in one storage, and off the devices only with "
                f"equally many rows; got {of_tables}. Change their constraint storages"
            )
        of_joined = [given[other] for other in joined]
        result[name] = dataclasses.replace(
            given[name],
            storages=tuple(common),
            cache_ratio=max((c.cache_ratio for c in of_joined if c.cache_ratio), default=None),
            store=next((c.store for c in of_joined if c.store is not None), None),
        )
    return result


def check_stores(
    workloads: Sequence[TableWorkload],
    constraints: Mapping[str, ParameterConstraints],
    store: str | None,
) -> None:
    """Raise a ValueError if two tables without a common feature may use the same row store."""
    stored: dict[str, TableWorkload] = {}
    for workload in workloads:
        constraint = constraints[workload.name]
        url = constraint.store or store
        if "store" not in (constraint.storages or ()) or url is None or "{table}" in url:
            continue
        other = stored.setdefault(url, workload)
        # Joined tables may share a store: a record has the rows of an id in all of them.
        if other is not workload and other.name not in workload.joined:
            raise ValueError(
                f"tables {other.name!r} and {workload.name!r} may both be kept in the row store "
                f"{url!r}, and the rows of an id would be mixed; write {{table}} where the URL has "
                "their name, as in 'file:///data/{table}'"
            )


def chosen_caches(problem: Problem, solution: Solution) -> dict[str, TableCache]:
    """Return the caches of a solution and of the problem's fixed placements, by table."""
    chosen = [option for option, _ in problem.chosen(solution.choices)]
    caches = {option.table: option.cache for option in (*problem.decided, *chosen)}
    return {name: cache for name, cache in caches.items() if cache is not None}


def join_caches(
    workloads: Sequence[TableWorkload],
    caches: Mapping[str, TableCache],
    constraints: Mapping[str, ParameterConstraints],
) -> dict[str, ParameterConstraints] | None:
    """Return constraints that give tables with common features equal caches.

    ``caches`` is the result of a search. Of tables with common features, the largest one with a
    cache decides the storage of all, and the largest cache decides their number of rows.

    Returns:
        The constraints by table; None where such tables have equal caches already.
    """
    changed: dict[str, ParameterConstraints] = {}
    by_name = {workload.name: workload for workload in workloads}
    for joined in dict.fromkeys(workload.joined for workload in workloads if workload.joined):
        if len({caches.get(name) for name in joined}) == 1:
            continue
        cached = [name for name in joined if name in caches]
        largest = caches[max(cached, key=lambda name: by_name[name].table_bytes)]
        rows = max(caches[name].rows for name in cached)
        for name in joined:
            changed[name] = dataclasses.replace(
                constraints.get(name, _NO_CONSTRAINTS),
                storages=(largest.storage,),
                cache_ratio=rows / by_name[name].rows,
                store=largest.store if largest.storage == "store" else None,
            )
    return {**constraints, **changed} if changed else None
