"""Comparison of a checkpoint with a model: the parts that fit, and the differences."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from flax import nnx

from jaxrec.embed.collection import Collection
from jaxrec.embed.config import TableConfig
from jaxrec.embed.variables import ArrayVariable, dense_variables, plain, variables
from jaxrec.tier.planning.tier import RUN_STATE, Tier, tier_of
from jaxrec.tier.saved_stores import vocabulary_difference
from jaxrec.train.checkpoint.files import CheckpointError, Difference
from jaxrec.train.checkpoint.tree import collections, placed_configs

_NOT_SAVED, _ONLY_SAVED = "is not in the checkpoint", "is in the checkpoint alone"

_PLURALS = {"vocabulary": "vocabularies"}


@dataclasses.dataclass
class Match:
    """The parts of a checkpoint that fit a model.

    Attributes:
        tables: Tables that fit, by collection and name; True if their optimizer state fits too.
        vocabularies: Names of the vocabularies that fit.
        dense, optimizer: Pairs of a variable of the model or the optimizer and its saved value.
        differences: The parts that do not fit.
    """

    tables: dict[str, dict[str, bool]] = dataclasses.field(default_factory=dict)
    vocabularies: list[str] = dataclasses.field(default_factory=list)
    dense: list[tuple[ArrayVariable, np.ndarray]] = dataclasses.field(default_factory=list)
    optimizer: list[tuple[ArrayVariable, np.ndarray]] = dataclasses.field(default_factory=list)
    differences: list[Difference] = dataclasses.field(default_factory=list)

    def common(
        self, kind: str, wanted: Iterable[str], saved: Iterable[str], collection: str = ""
    ) -> list[str]:
        """Return the names that model and checkpoint share, and note the others as differences."""
        wanted, saved = list(wanted), set(saved)
        for name in sorted(set(wanted) - saved):
            self.note(kind, name, _NOT_SAVED, collection)
        for name in sorted(saved - set(wanted)):
            self.note(kind, name, _ONLY_SAVED, collection)
        return [name for name in wanted if name in saved]

    def note(self, kind: str, name: str, reason: str, collection: str = "") -> None:
        """Add a difference."""
        self.differences.append(Difference(kind, name, reason, collection))

    def leave(self, collection: str, name: str, reason: str) -> None:
        """Leave out a table whose shape fits, and note why."""
        if self.tables.get(collection, {}).pop(name, None) is not None:
            self.note("table", name, reason, collection)


def match_checkpoint(
    model: nnx.Module,
    optimizer: nnx.Optimizer | None,
    saved: Mapping[str, dict[str, Any]],
    shapes: Mapping[str, Mapping[str, Any]],
    forms: Mapping[str, Any],
    *,
    resized: bool,
) -> Match:
    """Compare a model and its optimizer with a checkpoint; neither changes.

    ``saved`` has the arrays of "dense", "optimizer" and "vocabularies"; ``forms`` the shapes of the
    tables' files. Without an optimizer, the state of tables is not compared.
    """
    match, named, tier = Match(), collections(model), tier_of(model)
    cached = set() if tier is None else tier.cached_tables
    for path in match.common("collection", named, shapes):
        match.tables[path] = {}
        configs = {table.name: table for table in placed_configs(named[path])}
        for name in match.common("table", configs, shapes[path], path):
            # A cache may have another number of rows than the one that was saved: its rows are
            # found by their ids.
            may_differ = resized or name in cached
            reason = _shape_difference(configs[name], tuple(shapes[path][name]), may_differ)
            if reason:
                match.note("table", name, reason, path)
                continue
            match.tables[path][name] = optimizer is not None
            if optimizer is not None and (
                reason := _state_difference(named[path], name, forms.get(path, {}).get(name, {}))
            ):
                match.tables[path][name] = False
                match.note("optimizer of table", name, reason, path)
    _match_vocabularies(match, tier, saved["vocabularies"], has_state=optimizer is not None)
    match.dense = _match_variables(match, "variable", dense_variables(model), saved["dense"])
    if optimizer is not None:
        named_variables = variables(optimizer)
        match.optimizer = _match_variables(
            match, "optimizer variable", named_variables, saved["optimizer"]
        )
    return match


def refusal(path: pathlib.Path, differences: list[Difference], *, resized: bool) -> CheckpointError:
    """Return a `CheckpointError` that names the first differences of checkpoint and model."""
    first = differences[0]
    # One kind in one collection: a model that changed much would have an error of pages.
    alike = [x for x in differences if (x.kind, x.collection) == (first.kind, first.collection)]
    kinds = _PLURALS.get(first.kind, f"{first.kind}s")
    missing = [each.name for each in alike if each.reason == _NOT_SAVED]
    extra = [each.name for each in alike if each.reason == _ONLY_SAVED]
    texts = []
    if missing:
        texts.append(f"lacks the model's {kinds} {listed(missing)}")
    if extra:
        texts.append(f"has {kinds} {listed(extra)} that the model lacks")
    if texts:
        return CheckpointError(
            f"{path}: the checkpoint {' and '.join(texts)}; build the model as the saved one was, "
            "or load what fits it with restore(..., partial=True)"
        )
    advice = "load what fits the model with restore(..., partial=True)"
    if first.kind == "table" and not resized and first.reason.startswith(_SAVED_WITH_SHAPE):
        advice = f"load it with resized=True to keep the rows that both have, or {advice}"
    return CheckpointError(f"{path}: {first}; {advice}")


def listed(names: list[str], limit: int = 8) -> str:
    """Return names as text, at most the first ``limit`` of them."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(repr, names[:limit])) + more if names else "nothing"


_SAVED_WITH_SHAPE = "was saved with shape"


def _shape_difference(table: TableConfig, saved: tuple[int, ...], may_differ: bool) -> str:
    wanted = (table.num_embeddings, table.embedding_dim)
    if saved == wanted or (may_differ and saved[1:] == wanted[1:]):
        return ""
    return f"{_SAVED_WITH_SHAPE} {saved}, but the model's has {wanted}"


def _state_difference(collection: Collection, name: str, saved: Mapping[str, Any]) -> str:
    """Return how a table's saved optimizer state differs in names and widths; "" if it fits."""
    wanted = collection.tables.get_value().checkpoint_shapes(name).state
    state = saved.get("state") or {}
    if _widths(wanted) == _widths(state):
        return ""
    return f"keeps {_kept(wanted)}, but {_kept(state)} was saved"


def _widths(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(array.shape[1:]) for key, array in state.items()}


def _kept(state: Mapping[str, Any]) -> str:
    return listed([f"{key}{list(width) or ''}" for key, width in sorted(_widths(state).items())])


def _match_vocabularies(
    match: Match, tier: Tier | None, saved: Mapping[str, Mapping[str, Any]], *, has_state: bool
) -> None:
    """Match vocabularies, and leave out tables whose vocabulary is not loaded with them."""
    vocabularies = {} if tier is None else {each.name: each for each in tier.vocabularies}
    others = set(saved) - {RUN_STATE}
    common = match.common("vocabulary", vocabularies, others)
    for name, each in vocabularies.items():
        tables = [(table.collection or ".", table.config.name) for table in each.tables]
        needs_state = has_state and each.transfer is not None  # which the records of its store have
        left = [
            table
            for path, table in tables
            if not (has := match.tables.get(path, {}).get(table)) and (needs_state or has is None)
        ]
        reason = ""
        if name in common:
            reason = vocabulary_difference(each, saved[name])
            if not reason and left:
                reason = f"is that of table {left[0]!r}, which is not loaded whole"
            if reason:
                match.note("vocabulary", name, reason)
                common.remove(name)
        if name not in common:
            for path, table in tables:
                match.leave(path, table, "has a vocabulary that is not loaded")
    # A vocabulary that the model lacks chose the order of these tables' rows. Vocabularies that
    # several tables share are named "a+b".
    unordered = {table for name in others - set(vocabularies) for table in (name, *name.split("+"))}
    for path, of_path in match.tables.items():
        for table in sorted(unordered & set(of_path)):
            match.leave(path, table, "was saved with a vocabulary that the model lacks")
    match.vocabularies = common


def _match_variables(
    match: Match, kind: str, named: Mapping[str, ArrayVariable], saved: Mapping[str, np.ndarray]
) -> list[tuple[ArrayVariable, np.ndarray]]:
    """Return pairs of a variable and its saved value, for those of equal shape; note the others."""
    pairs = []
    for name in match.common(kind, named, saved):
        wanted = plain(named[name].get_raw_value()).shape
        if saved[name].shape == wanted:
            pairs.append((named[name], saved[name]))
        else:
            reason = f"{_SAVED_WITH_SHAPE} {saved[name].shape}, but the model's has {wanted}"
            match.note(kind, name, reason)
    return pairs
