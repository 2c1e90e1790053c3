"""A case of every public module: how it is made, what it takes, how it is called."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxrec
from jaxrec import nn
from jaxrec.nn.positions import positions_in_rows

ROWS, DIM = 40, 4


@dataclasses.dataclass(frozen=True)
class Dense:
    """An input of ``[batch, *shape]``."""

    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Bags:
    """An input of ragged ids."""

    keys: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Column:
    """An input of ragged vectors."""

    dim: int


@dataclasses.dataclass(frozen=True)
class Case:
    """A module: how it is made (given types and random keys), what it takes, how it is called."""

    make: Callable[..., nnx.Module]
    inputs: tuple[Any, ...]
    call: Callable[..., Any] = lambda module, *inputs: module(*inputs)


def bags(rngs, names=("a", "b"), dim=DIM, prefix="", weighted=False):
    return jaxrec.EmbeddingBagCollection(
        [jaxrec.EmbeddingBagConfig(prefix + name, ROWS, dim, (name,)) for name in names],
        optimizer=jaxrec.optim.sgd(1.0),
        is_weighted=weighted,
        rngs=rngs,
    )


def items(rngs):
    table = jaxrec.EmbeddingConfig("item", ROWS, DIM, ("history", "target"))
    return jaxrec.EmbeddingCollection([table], optimizer=jaxrec.optim.sgd(1.0), rngs=rngs)


def history_model(kind, **options):
    """A model of a target and a history of at most four of its items, with a profile."""
    rngs = options["rngs"]
    return kind(
        items(rngs),
        {"history": "target"},
        profile=bags(rngs, ("a",)),
        max_length=4,
        hidden_dim=5,
        top_layer_sizes=(5, 1),
        **options,
    )


def over_history(module, features):
    return module(None, features)


def over_column(module, column):
    """A block that takes states and lengths, as a function of columns."""
    return dataclasses.replace(column, values=module(column.values, column.lengths))


def sequence_outputs(module, features):
    out = module(features)
    return {"states": out["history"], "target": nn.last_states(out["target"])}


def ranker(rngs, **types):
    tables = [
        jaxrec.EmbeddingConfig("item", ROWS, DIM, ("history", "b")),
        jaxrec.EmbeddingConfig("user", ROWS, DIM, ("target",)),
    ]
    return nn.HSTURanker(
        jaxrec.EmbeddingCollection(tables, optimizer=jaxrec.optim.sgd(1.0), rngs=rngs),
        nn.RankerFeatures(
            {"history": "b"},
            context={"target": 1},
            times=("time", "b_time"),
            actions=("action", "b_action"),
        ),
        [nn.TargetTask("click", bit=1), nn.TargetTask("like", bit=2)],
        dim=6,
        num_layers=1,  # `TransductionStack` has a case of its own, with two
        num_heads=2,
        max_length=10,
        action_bits=(1, 2),
        num_positions=8,
        num_times=4,
        token_hidden_dim=5,
        item_hidden_dim=5,
        task_hidden_sizes=(5,),
        dropout_rate=0.1,
        rngs=rngs,
        **types,
    )


def ranker_outputs(module, features):
    """Logits of a ranker whose times and actions follow from its ids."""
    columns = features.to_dict()
    for key, prefix in (("history", ""), ("b", "b_")):
        column = columns[key]
        columns[f"{prefix}time"] = dataclasses.replace(column, values=column.values * 60)
        columns[f"{prefix}action"] = dataclasses.replace(column, values=column.values & 3)
    logits = module(jaxrec.KeyedJaggedArray.from_dict(columns))
    return jaxrec.JaggedArray(logits, columns["b"].lengths)


def with_times(module, column):
    """A module that takes states, lengths and times, as a function of columns."""
    # A row's last element may read an absolute time, so times do not depend on where in the batch,
    # or on which device, a row lies.
    times = positions_in_rows(column) * 7
    return dataclasses.replace(column, values=module(column.values, column.lengths, times))


CLICKS = {"num_dense": 3, "bottom_layer_sizes": (5, DIM), "top_layer_sizes": (5, 1)}
DLRM_INPUTS = (Dense((3,)), Bags(("a", "b")))
HISTORY = (Bags(("history", "target")),)
HISTORY_AND_PROFILE = (Bags(("history", "target", "a")),)
VECTORS = (Dense((DIM,)), Dense((3, DIM)))

CASES = {
    nn.ActionEncoder: Case(
        lambda **t: nn.ActionEncoder((1, 2), 3, **t),
        (Dense((4,)),),
        # Actions follow from the input, which is not differentiated.
        lambda module, x: module((x > 0).astype(jnp.int32) + 2),
    ),
    nn.BERT4Rec: Case(
        lambda **t: nn.BERT4Rec(items(t["rngs"]), max_length=6, num_blocks=1, **t),
        HISTORY,
        sequence_outputs,
    ),
    nn.BERT4RecBlock: Case(lambda **t: nn.BERT4RecBlock(DIM, 2, **t), (Column(DIM),), over_column),
    nn.ContextTokens: Case(
        lambda **t: nn.ContextTokens(DIM, 6, {"user": 2}, **t),
        (Column(DIM),),
        lambda module, column: jaxrec.JaggedArray(
            module({"user": column}, column.lengths), jnp.full_like(column.lengths, 2)
        ),
    ),
    nn.BilinearFusion: Case(
        lambda **t: nn.BilinearFusion(6, 4, num_heads=2, **t), (Dense((6,)), Dense((4,)))
    ),
    nn.CrossNet: Case(lambda **t: nn.CrossNet(6, 2, **t), (Dense((6,)),)),
    nn.DCNv2: Case(
        lambda **t: nn.DCNv2(
            bags(t["rngs"]),
            num_dense=3,
            cross_layers=2,
            low_rank=2,
            num_experts=2,
            deep_layer_sizes=(5,),
            structure="parallel",
            **t,
        ),
        DLRM_INPUTS,
    ),
    nn.DIN: Case(
        lambda **t: nn.DIN(
            items(t["rngs"]),
            {"history": "target"},
            profile=bags(t["rngs"], ("a",)),
            attention_layer_sizes=(5, 1),
            top_layer_sizes=(5, 1),
            **t,
        ),
        HISTORY_AND_PROFILE,
        over_history,
    ),
    nn.DLRM: Case(lambda **t: nn.DLRM(bags(t["rngs"]), **CLICKS, **t), DLRM_INPUTS),
    nn.DLRM_DCN: Case(
        lambda **t: nn.DLRM_DCN(
            bags(t["rngs"]), dcn_num_layers=2, dcn_low_rank_dim=2, **CLICKS, **t
        ),
        DLRM_INPUTS,
    ),
    nn.DLRM_Projection: Case(
        lambda **t: nn.DLRM_Projection(
            bags(t["rngs"]),
            interaction_branch1_layer_sizes=(5, 2 * DIM),
            interaction_branch2_layer_sizes=(5, 3 * DIM),
            **CLICKS,
            **t,
        ),
        DLRM_INPUTS,
    ),
    nn.DeepFM: Case(
        lambda **t: nn.DeepFM(
            bags(t["rngs"]),
            bags(t["rngs"], dim=1, prefix="w_"),
            num_dense=3,
            deep_layer_sizes=(5, 1),
            dropout_rate=0.5,
            **t,
        ),
        DLRM_INPUTS,
    ),
    nn.Dice: Case(lambda **t: nn.Dice(6, **t), (Dense((6,)),)),
    nn.DisaggregatedMultiTower: Case(
        lambda **t: nn.DisaggregatedMultiTower(
            bags(t["rngs"]),
            [((name,), nn.MLP(DIM, (3,), **t)) for name in ("a", "b")],
            nn.CrossNet(8, 1, **t),
            dense=nn.Perceptron(3, 2, **t),
        ),
        DLRM_INPUTS,
    ),
    nn.DotInteraction: Case(lambda **t: nn.DotInteraction(), VECTORS),
    nn.EmbeddingTower: Case(
        lambda **t: nn.EmbeddingTower(bags(t["rngs"]), nn.MLP(2 * DIM, (3,), **t)),
        (Bags(("a", "b")),),
    ),
    nn.EmbeddingTowerCollection: Case(
        lambda **t: nn.EmbeddingTowerCollection(
            nn.EmbeddingTower(bags(t["rngs"], (name,)), nn.MLP(DIM, (3,), **t))
            for name in ("a", "b")
        ),
        (Bags(("a", "b")),),
    ),
    nn.EventPositions: Case(
        lambda **t: nn.EventPositions(6, DIM, num_times=4, **t), (Column(DIM),), with_times
    ),
    nn.EventTokens: Case(
        lambda **t: nn.EventTokens(DIM, 6, hidden_dim=5, additional_dim=2, **t),
        (Dense((DIM,)), Dense((2,))),
    ),
    nn.ExtractionLayer: Case(
        lambda **t: nn.ExtractionLayer(
            6,
            num_tasks=2,
            task_experts=2,
            shared_experts=1,
            expert_layer_sizes=(4,),
            gate_shared=True,
            **t,
        ),
        (Dense((6,)), Dense((6,)), Dense((6,))),
        lambda module, *inputs: module(inputs),
    ),
    nn.FMInteractionArch: Case(lambda **t: nn.FMInteractionArch(4 * DIM, 3, **t), VECTORS),
    nn.FactorizationMachine: Case(
        lambda **t: nn.FactorizationMachine(),
        VECTORS,
        lambda module, *inputs: module(inputs),
    ),
    nn.FeatureProcessedEmbeddingBagCollection: Case(
        lambda **t: nn.FeatureProcessedEmbeddingBagCollection(
            bags(t["rngs"], weighted=True), nn.PositionWeightedModuleCollection({"a": 6})
        ),
        (Bags(("a", "b")),),
        lambda module, features: module(features).values,
    ),
    nn.FinalMLP: Case(
        lambda **t: nn.FinalMLP(
            bags(t["rngs"]),
            num_dense=3,
            contexts=(("a",), ()),
            gate_hidden_size=5,
            first_layer_sizes=(5, 4),
            second_layer_sizes=(6,),
            num_heads=2,
            **t,
        ),
        DLRM_INPUTS,
    ),
    nn.GDCN: Case(
        lambda **t: nn.GDCN(
            bags(t["rngs"]), num_dense=3, cross_layers=2, deep_layer_sizes=(5,), **t
        ),
        DLRM_INPUTS,
    ),
    nn.GateNU: Case(lambda **t: nn.GateNU(6, 5, 3, **t), (Dense((6,)),)),
    nn.GatedCrossNet: Case(lambda **t: nn.GatedCrossNet(6, 2, **t), (Dense((6,)),)),
    nn.GatedNorm: Case(
        lambda **t: nn.GatedNorm(2, 3, norm="group", concat=("gate", "attended"), **t),
        (Dense((6,)), Dense((6,))),
    ),
    nn.Gate: Case(lambda **t: nn.Gate(6, 3, **t), (Dense((6,)), Dense((3, 4)))),
    nn.HSTU: Case(
        lambda **t: nn.HSTU(items(t["rngs"]), max_length=6, num_blocks=1, num_heads=2, **t),
        HISTORY,
        sequence_outputs,
    ),
    nn.HSTUBlock: Case(
        lambda **t: nn.HSTUBlock(DIM, 2, max_length=6, time_buckets=8, **t),
        (Column(DIM),),
        with_times,
    ),
    nn.HSTURanker: Case(ranker, (Bags(("history", "b", "target")),), ranker_outputs),
    nn.InteractionDCNArch: Case(
        lambda **t: nn.InteractionDCNArch(3, DIM, num_layers=2, low_rank=2, **t), VECTORS
    ),
    nn.InteractionProjectionArch: Case(
        lambda **t: nn.InteractionProjectionArch(
            3, DIM, branch1_layer_sizes=(2 * DIM,), branch2_layer_sizes=(3 * DIM,), **t
        ),
        VECTORS,
    ),
    nn.JaggedSelfAttention: Case(
        lambda **t: nn.JaggedSelfAttention(DIM, 2, causal=True, block_size=8, **t),
        (Column(DIM),),
        over_column,
    ),
    nn.LONGER: Case(
        lambda **t: history_model(
            nn.LONGER, merge=2, dim=6, num_layers=2, num_heads=2, num_queries=1, **t
        ),
        HISTORY_AND_PROFILE,
        over_history,
    ),
    nn.LinearPart: Case(
        lambda **t: nn.LinearPart(bags(t["rngs"], dim=1), num_dense=3, **t), DLRM_INPUTS
    ),
    nn.LowRankCrossNet: Case(lambda **t: nn.LowRankCrossNet(6, 2, 2, **t), (Dense((6,)),)),
    nn.LowRankMixtureCrossNet: Case(
        lambda **t: nn.LowRankMixtureCrossNet(6, 2, 3, 2, **t), (Dense((6,)),)
    ),
    nn.MLP: Case(lambda **t: nn.MLP(6, (5, 3), activation="swish_layernorm", **t), (Dense((6,)),)),
    nn.MMoE: Case(
        lambda **t: nn.MMoE(
            6, num_tasks=2, num_experts=3, expert_layer_sizes=(4,), tower_layer_sizes=(3, 1), **t
        ),
        (Dense((6,)),),
    ),
    nn.MaskBlock: Case(
        lambda **t: nn.MaskBlock(6, 4, 3, mask_hidden_size=5, **t), (Dense((6,)), Dense((4,)))
    ),
    nn.MaskNet: Case(
        lambda **t: nn.MaskNet(
            bags(t["rngs"]),
            num_dense=3,
            bottom_layer_sizes=(DIM,),
            block_sizes=(5, 6),
            mask_hidden_size=7,
            **t,
        ),
        DLRM_INPUTS,
    ),
    nn.OneTrans: Case(
        lambda **t: history_model(nn.OneTrans, num_tokens=2, dim=6, num_layers=2, num_heads=2, **t),
        HISTORY_AND_PROFILE,
        over_history,
    ),
    nn.PEPNet: Case(
        lambda **t: nn.PEPNet(
            bags(t["rngs"]),
            num_dense=3,
            domain=("b",),
            prior=("a",),
            num_tasks=2,
            hidden_sizes=(5, 4),
            domain_hidden_size=6,
            **t,
        ),
        DLRM_INPUTS,
    ),
    nn.PLE: Case(
        lambda **t: nn.PLE(
            6,
            num_tasks=2,
            task_experts=2,
            shared_experts=1,
            expert_layer_sizes=(4,),
            tower_layer_sizes=(3, 1),
            **t,
        ),
        (Dense((6,)),),
    ),
    nn.Perceptron: Case(lambda **t: nn.Perceptron(6, 3, **t), (Dense((6,)),)),
    nn.PositionEmbedding: Case(lambda **t: nn.PositionEmbedding(6, DIM, **t), (Column(DIM),)),
    nn.PositionWeightedModule: Case(
        lambda **t: nn.PositionWeightedModule(6),
        (Bags(("a",)),),
        lambda module, features: module(features["a"]),
    ),
    nn.PositionWeightedModuleCollection: Case(
        lambda **t: nn.PositionWeightedModuleCollection({"a": 6}), (Bags(("a", "b")),)
    ),
    nn.PrunedEmbeddings: Case(
        lambda **t: nn.PrunedEmbeddings(bags(t["rngs"]), {"a": 2 * ROWS}),
        (Bags(("a", "b")),),
        lambda module, features: module(features).values,
    ),
    nn.RankMixer: Case(
        lambda **t: nn.RankMixer(
            bags(t["rngs"]),
            num_dense=3,
            num_layers=2,
            num_tokens=2,
            dim=6,
            hidden_dim=5,
            top_layer_sizes=(4, 1),
            **t,
        ),
        DLRM_INPUTS,
    ),
    nn.RankMixerBlock: Case(
        lambda **t: nn.RankMixerBlock(3, 6, hidden_dim=5, **t), (Dense((3, 6)),)
    ),
    nn.SASRec: Case(
        lambda **t: nn.SASRec(items(t["rngs"]), max_length=6, num_blocks=1, **t),
        HISTORY,
        sequence_outputs,
    ),
    nn.SASRecBlock: Case(lambda **t: nn.SASRecBlock(DIM, 2, **t), (Column(DIM),), over_column),
    nn.SemanticIdDecoder: Case(
        lambda **t: nn.SemanticIdDecoder(
            # Each of 40 items has codes of its own: 4 * 5 * 2.
            nn.semantic_ids.SemanticIds(
                np.arange(ROWS), np.stack(np.unravel_index(range(ROWS), (4, 5, 2)), 1), (4, 5, 2)
            ),
            dim=DIM,
            num_layers=1,
            num_encoder_layers=1,
            num_heads=2,
            max_length=6,
            **t,
        ),
        (Bags(("history",)),),
    ),
    nn.SimpleDeepFMNN: Case(
        lambda **t: nn.SimpleDeepFMNN(
            bags(t["rngs"]), num_dense=3, hidden_layer_size=5, deep_fm_dimension=3, **t
        ),
        DLRM_INPUTS,
    ),
    nn.SwishLayerNorm: Case(lambda **t: nn.SwishLayerNorm((2, 3), **t), (Dense((2, 3)),)),
    nn.TargetAttention: Case(
        lambda **t: nn.TargetAttention(DIM, layer_sizes=(5, 1), **t),
        (Column(DIM), Dense((DIM,))),
        lambda module, history, target: module(
            history, target.reshape(*history.lengths.shape, DIM)
        ).reshape(-1, DIM),
    ),
    nn.TargetNorm: Case(lambda **t: nn.TargetNorm(6, "l2", **t), (Dense((6,)),)),
    nn.TargetTasks: Case(
        lambda **t: nn.TargetTasks(
            [nn.TargetTask("click", bit=1), nn.TargetTask("seconds")], 6, hidden_sizes=(5,), **t
        ),
        (Dense((6,)), Dense((6,))),
    ),
    nn.TransAct: Case(
        lambda **t: history_model(nn.TransAct, num_newest=2, num_heads=2, cross_layers=1, **t),
        HISTORY_AND_PROFILE,
        over_history,
    ),
    nn.TransductionStack: Case(
        lambda **t: nn.TransductionStack(
            DIM, 2, 2, truncation=(1, 3), max_length=6, block_size=8, **t
        ),
        (Column(DIM),),
        lambda module, column: jaxrec.JaggedArray(*module(column.values, column.lengths)),
    ),
    nn.TransductionUnit: Case(
        lambda **t: nn.TransductionUnit(DIM, 2, max_length=6, block_size=8, **t),
        (Column(DIM),),
        over_column,
    ),
    nn.TwoTower: Case(
        lambda **t: nn.TwoTower(
            *(
                nn.EmbeddingTower(bags(t["rngs"], (name,)), nn.MLP(DIM, (3,), **t))
                for name in ("a", "b")
            )
        ),
        (Bags(("a", "b")),),
    ),
    nn.VectorCrossNet: Case(lambda **t: nn.VectorCrossNet(6, 2, **t), (Dense((6,)),)),
    nn.WideDeep: Case(
        lambda **t: nn.WideDeep(
            bags(t["rngs"], dim=1, prefix="w_"),
            bags(t["rngs"]),
            num_dense=3,
            deep_layer_sizes=(5, 1),
            **t,
        ),
        DLRM_INPUTS,
    ),
    nn.Wukong: Case(
        lambda **t: nn.Wukong(
            bags(t["rngs"]),
            num_dense=3,
            bottom_layer_sizes=(5, 2 * DIM),
            num_layers=2,
            num_fm=2,
            num_linear=1,
            rank=2,
            fm_hidden_sizes=(5,),
            top_layer_sizes=(5, 1),
            **t,
        ),
        DLRM_INPUTS,
    ),
    nn.WukongLayer: Case(
        lambda **t: nn.WukongLayer(3, DIM, num_fm=2, num_linear=1, rank=2, **t), (Dense((3, DIM)),)
    ),
}

# The weights of ids that a lookup takes are float32; a collection says itself what type it gives; a
# function without parameters has the type of its input.
FLOAT32_WEIGHTS = {
    nn.FeatureProcessedEmbeddingBagCollection,
    nn.PositionWeightedModule,
    nn.PositionWeightedModuleCollection,
}
KEEPS_FLOAT32 = {
    nn.DotInteraction,
    nn.FactorizationMachine,
    nn.PrunedEmbeddings,
    nn.SemanticIdDecoder,  # log-likelihoods
} | FLOAT32_WEIGHTS

# Modules that stop gradients, which are not the differences of their values.
STOPS_GRADIENTS = {nn.PEPNet}
