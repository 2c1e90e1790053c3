"""Training steps of groups of modules, each group one compiled program."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

import jaxrec
from jaxrec import nn
from tests.nn.cases import CASES
from tests.nn.steps import (
    differentiate,
    draw,
    make,
    on_device,
    on_mesh,
    rows_of_tables,
)
from tests.walk.programs import named

GROUPS = {
    "positions": (
        nn.FeatureProcessedEmbeddingBagCollection,
        nn.PositionEmbedding,
        nn.PositionWeightedModule,
        nn.PositionWeightedModuleCollection,
        nn.PrunedEmbeddings,
        nn.TargetAttention,
    ),
    "blocks": (
        nn.BERT4RecBlock,
        nn.EventPositions,
        nn.HSTUBlock,
        nn.JaggedSelfAttention,
        nn.SASRecBlock,
        nn.TransductionStack,
        nn.TransductionUnit,
    ),
    "histories": (nn.LONGER, nn.OneTrans, nn.TransAct),
    "backbones": (
        nn.FinalMLP,
        nn.GDCN,
        nn.MaskNet,
        nn.PEPNet,
        nn.RankMixer,
        nn.Wukong,
    ),
    "sequences": (nn.BERT4Rec, nn.DIN, nn.HSTU, nn.HSTURanker, nn.SASRec),
    "clicks": (
        nn.DCNv2,
        nn.DLRM,
        nn.DLRM_DCN,
        nn.DLRM_Projection,
        nn.DeepFM,
        nn.LinearPart,
        nn.SimpleDeepFMNN,
        nn.WideDeep,
    ),
    "towers": (
        nn.DisaggregatedMultiTower,
        nn.EmbeddingTower,
        nn.EmbeddingTowerCollection,
        nn.TwoTower,
    ),
}
GROUPS["layers"] = tuple(
    kind for kind in CASES if not any(kind in group for group in GROUPS.values())
)

# Modules that drop out, or use the batch's statistics, in training.
TRAINED = (nn.BERT4Rec, nn.DIN, nn.DeepFM, nn.Dice, nn.HSTU, nn.HSTURanker, nn.SASRec)

Kinds = tuple[type[nnx.Module], ...]


@dataclasses.dataclass(frozen=True)
class Step:
    """What a training step of some modules gives, by module, on the host."""

    values: dict[str, Any]
    gradients: dict[str, Any]
    rows: dict[str, Any]
    uses: Any


def modules_of(kinds: Kinds) -> dict[str, nnx.Module]:
    modules = {kind.__name__: make(kind) for kind in kinds}
    if "PrunedEmbeddings" in modules:
        modules["PrunedEmbeddings"].train()  # count ids
    return modules


def sharded(module: nnx.Module, mesh: Mesh) -> nnx.Module:
    """Put a module on a mesh, its tables cut by rows."""
    tables = {name: jaxrec.mesh.row_wise() for _, name in rows_of_tables(module)}
    return jaxrec.shard(module, jaxrec.plan.ShardingPlan.from_dict(tables), mesh)


@functools.cache
def program(kinds: Kinds) -> Any:
    """Compile a step of each of some modules."""

    def run(modules: dict[str, nnx.Module], inputs: dict[str, Any]) -> Any:
        values, gradients = {}, {}
        for kind in kinds:
            name = kind.__name__
            with named(name):
                value, _, *found = differentiate(kind, modules[name], inputs[name])
            values[name], gradients[name] = value, found
        return values, gradients

    return nnx.jit(run)


def take_step(kinds: Kinds, modules: dict[str, nnx.Module], inputs: dict[str, Any]) -> Step:
    values, gradients = jax.device_get(program(kinds)(modules, inputs))
    rows = {name: rows_of_tables(module) for name, module in modules.items()}
    uses = None
    if "PrunedEmbeddings" in modules:
        uses = np.asarray(modules["PrunedEmbeddings"].addresses["a"].get_value().uses)
    return Step(values, gradients, rows, uses)


def inputs_of(kinds: Kinds, mesh: Mesh | None = None) -> dict[str, list[Any]]:
    """Return drawn inputs of each of some modules."""
    samples = {kind.__name__: draw(CASES[kind]) for kind in kinds}
    if mesh is None:
        return {name: on_device(each) for name, each in samples.items()}
    return {name: [on_mesh(sample, mesh) for sample in each] for name, each in samples.items()}


@functools.cache
def on_one_device(kinds: Kinds) -> Step:
    return take_step(kinds, modules_of(kinds), inputs_of(kinds))
