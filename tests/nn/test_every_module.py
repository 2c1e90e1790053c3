"""What holds for every public module, whatever it computes.

It works under jit, in bfloat16, over eight devices, with empty bags and with a batch of one, and
its gradients are those of finite differences.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import jaxrec
from jaxrec import nn

BATCH, DEVICES, ROWS, DIM = 16, 8, 40, 4
ONE = {"target"}  # features with exactly one id a sample


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
        [
            jaxrec.EmbeddingBagConfig(prefix + name, ROWS, dim, (name,), initializer=_spread)
            for name in names
        ],
        optimizer=jaxrec.optim.sgd(1.0),
        is_weighted=weighted,
        rngs=rngs,
    )


def items(rngs):
    table = jaxrec.EmbeddingConfig("item", ROWS, DIM, ("history", "target"), initializer=_spread)
    return jaxrec.EmbeddingCollection([table], optimizer=jaxrec.optim.sgd(1.0), rngs=rngs)


def _spread(key, shape, dtype):
    return jax.random.normal(key, shape, dtype)


def over_column(module, column):
    """A block that takes states and lengths, as a function of columns."""
    return dataclasses.replace(column, values=module(column.values, column.lengths))


def sequence_outputs(module, features):
    out = module(features)
    return {"states": out["history"], "target": nn.last_states(out["target"])}


CLICKS = {"num_dense": 3, "bottom_layer_sizes": (5, DIM), "top_layer_sizes": (5, 1)}
DLRM_INPUTS = (Dense((3,)), Bags(("a", "b")))
WIDE_INPUTS = (Bags(("a", "b")), Dense((3,)))
HISTORY = (Bags(("history", "target")),)
VECTORS = (Dense((DIM,)), Dense((3, DIM)))

CASES = {
    nn.BERT4Rec: Case(
        lambda **t: nn.BERT4Rec(items(t["rngs"]), max_length=6, num_blocks=1, **t),
        HISTORY,
        sequence_outputs,
    ),
    nn.BERT4RecBlock: Case(lambda **t: nn.BERT4RecBlock(DIM, 2, **t), (Column(DIM),), over_column),
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
        WIDE_INPUTS,
    ),
    nn.DIN: Case(
        lambda **t: nn.DIN(
            items(t["rngs"]),
            {"history": "target"},
            profile=bags(t["rngs"], ("a",)),
            attention_layer_sizes=(5,),
            layer_sizes=(5,),
            **t,
        ),
        (Bags(("history", "target", "a")),),
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
            hidden_layer_sizes=(5,),
            dropout_rate=0.5,
            **t,
        ),
        WIDE_INPUTS,
    ),
    nn.Dice: Case(lambda **t: nn.Dice(6, **t), (Dense((6,)),)),
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
    nn.Gate: Case(lambda **t: nn.Gate(6, 3, **t), (Dense((6,)), Dense((3, 4)))),
    nn.HSTU: Case(
        lambda **t: nn.HSTU(items(t["rngs"]), max_length=6, num_blocks=1, num_heads=2, **t),
        HISTORY,
        sequence_outputs,
    ),
    nn.HSTUBlock: Case(
        lambda **t: nn.HSTUBlock(DIM, 2, max_length=6, time_buckets=8, **t),
        (Column(DIM),),
        lambda module, column: dataclasses.replace(
            column,
            values=module(
                column.values,
                column.lengths,
                jnp.broadcast_to(
                    jnp.arange(column.values.shape[-2], dtype=jnp.int32) * 7,
                    column.values.shape[:-1],
                ),
            ),
        ),
    ),
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
    nn.LinearPart: Case(
        lambda **t: nn.LinearPart(bags(t["rngs"], dim=1), num_dense=3, **t), WIDE_INPUTS
    ),
    nn.LowRankCrossNet: Case(lambda **t: nn.LowRankCrossNet(6, 2, 2, **t), (Dense((6,)),)),
    nn.LowRankMixtureCrossNet: Case(
        lambda **t: nn.LowRankMixtureCrossNet(6, 2, 3, 2, **t), (Dense((6,)),)
    ),
    nn.MLP: Case(lambda **t: nn.MLP(6, (5, 3), activation="swish_layernorm", **t), (Dense((6,)),)),
    nn.MMoE: Case(
        lambda **t: nn.MMoE(
            6, num_tasks=2, num_experts=3, expert_layer_sizes=(4,), tower_layer_sizes=(3,), **t
        ),
        (Dense((6,)),),
    ),
    nn.PLE: Case(
        lambda **t: nn.PLE(
            6,
            num_tasks=2,
            task_experts=2,
            shared_experts=1,
            expert_layer_sizes=(4,),
            tower_layer_sizes=(3,),
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
    nn.SASRec: Case(
        lambda **t: nn.SASRec(items(t["rngs"]), max_length=6, num_blocks=1, **t),
        HISTORY,
        sequence_outputs,
    ),
    nn.SASRecBlock: Case(lambda **t: nn.SASRecBlock(DIM, 2, **t), (Column(DIM),), over_column),
    nn.SimpleDeepFMNN: Case(
        lambda **t: nn.SimpleDeepFMNN(
            bags(t["rngs"]), num_dense=3, hidden_layer_size=5, deep_fm_dimension=3, **t
        ),
        DLRM_INPUTS,
    ),
    nn.SwishLayerNorm: Case(lambda **t: nn.SwishLayerNorm((2, 3), **t), (Dense((2, 3)),)),
    nn.TargetAttention: Case(
        lambda **t: nn.TargetAttention(DIM, layer_sizes=(5,), **t),
        (Column(DIM), Dense((DIM,))),
        lambda module, history, target: module(
            history, target.reshape(*history.lengths.shape, DIM)
        ).reshape(-1, DIM),
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
            hidden_layer_sizes=(5,),
            **t,
        ),
        WIDE_INPUTS,
    ),
}

# The weights of ids that a lookup takes are float32, and a function without parameters has the type
# of its input.
FLOAT32_WEIGHTS = {
    nn.FeatureProcessedEmbeddingBagCollection,
    nn.PositionWeightedModule,
    nn.PositionWeightedModuleCollection,
}
KEEPS_FLOAT32 = {nn.DotInteraction, nn.FactorizationMachine} | FLOAT32_WEIGHTS


@pytest.fixture(scope="module", autouse=True)
def compiled_fast():
    """Each case compiles several programs and runs them once or twice."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


EVERY = pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)


def test_every_public_module_has_a_case():
    public = {
        value
        for name, value in vars(nn).items()
        if inspect.isclass(value) and issubclass(value, nnx.Module) and not name.startswith("_")
    }
    assert set(CASES) == public


def draw(case, dtype=np.float32, batch=BATCH):
    """Inputs, in which some bags are empty; sample by sample, then packed."""
    rng = np.random.default_rng(0)
    samples = []
    lengths = rng.permutation(np.arange(batch) % 5)  # 0 to 4, each as often
    for kind in case.inputs:
        match kind:
            case Dense(shape):
                samples.append(rng.standard_normal((batch, *shape)).astype(dtype))
            case Bags(keys):
                samples.append(
                    {
                        key: [
                            rng.integers(0, ROWS, 1 if key in ONE else length).tolist()
                            for length in (lengths if key in ("a", "history") else lengths[::-1])
                        ]
                        for key in keys
                    }
                )
            case Column(dim):
                samples.append(
                    [rng.standard_normal((length, dim)).astype(dtype) for length in lengths]
                )
    return samples


def select(sample, rows):
    if isinstance(sample, dict):
        return {key: sample[key][rows] for key in sample}
    return sample[rows]


def pack(sample, capacity=48):
    """A drawn input as a module takes it."""
    if isinstance(sample, dict):
        return jaxrec.KeyedJaggedArray.from_lists(
            sample, capacities=dict.fromkeys(sample, capacity)
        )
    if isinstance(sample, list):
        flat = np.concatenate([np.zeros((0, *sample[0].shape[1:]), sample[0].dtype), *sample])
        lengths = np.array([len(row) for row in sample], np.int32)
        return jaxrec.JaggedArray(np.pad(flat, [(0, capacity - len(flat)), (0, 0)]), lengths)
    return sample


def on_mesh(sample, mesh):
    """The same on a mesh: dense arrays cut, ragged ones with an axis over the devices."""
    if isinstance(sample, list):
        size = len(sample) // DEVICES
        parts = [pack(sample[i * size : (i + 1) * size], 16) for i in range(DEVICES)]
        return jaxrec.mesh.shard_batch(jax.tree.map(lambda *xs: np.stack(xs), *parts), mesh)
    return jaxrec.mesh.shard_batch(pack(sample), mesh)


def total(out):
    """A smooth number that every element of the output has part in, padding aside."""
    if isinstance(out, jaxrec.KeyedJaggedArray):
        return sum(total(out[key]) for key in out.keys)
    if isinstance(out, jaxrec.JaggedArray):
        values = out.values if out.weights is None else out.weights
        filled = np.arange(values.shape[out.lengths.ndim - 1])
        filled = filled.reshape((1,) * (out.lengths.ndim - 1) + filled.shape)
        used = filled < jnp.sum(out.lengths, axis=-1, keepdims=True)
        used = used.reshape(used.shape + (1,) * (values.ndim - used.ndim))
        return jnp.where(used, jnp.sin(values), 0).sum()
    if isinstance(out, jax.Array):
        return jnp.sin(out).sum()
    return sum(total(part) for part in (out.values() if isinstance(out, dict) else out))


def outputs(case, module, inputs):
    return nnx.jit(lambda module, inputs: case.call(module, *inputs))(module, inputs)


def step(case):
    """Compiled: value, gradients of parameters and of dense inputs; tables move by theirs."""

    def run(module, inputs):
        floats = [x for x in inputs if isinstance(x, jax.Array)]

        def loss(module, floats):
            given = iter(floats)
            filled = [next(given) if isinstance(x, jax.Array) else x for x in inputs]
            return total(case.call(module, *filled))

        value, gradients = jaxrec.value_and_grad(loss)(module, floats)
        of_inputs = jax.grad(lambda floats: loss(module, floats))(floats) if floats else []
        for path, collection in collections(module).items():
            collection.apply_gradients(gradients.tables[path], 0)
        return value, gradients.dense, of_inputs

    return nnx.jit(run)


def collections(module):
    return {
        "/".join(map(str, path)): node
        for path, node in nnx.iter_modules(module)
        if isinstance(node, jaxrec.EmbeddingBagCollection | jaxrec.EmbeddingCollection)
    }


def make(kind, **types):
    module = CASES[kind].make(rngs=nnx.Rngs(0), **types)
    module.eval()  # no dropout, and no batch's statistics
    return module


def tables_of(module, names=None):
    """The rows of each table, by its collection's path and its name; of those named, if any are."""
    found = collections(module)
    if names is None:
        names = [(path, table.name) for path, node in found.items() for table in node.configs]
    return {(path, name): np.array(found[path].table(name)) for path, name in names}


def load(module, tables):
    for (path, name), rows in tables.items():
        collections(module)[path].load_table(name, jnp.asarray(rows, jnp.float32))


def dot(xs, ys):
    leaves = zip(jax.tree.leaves(xs), jax.tree.leaves(ys), strict=True)
    return float(sum(jnp.vdot(x, y) for x, y in leaves))


@EVERY
def test_gradients_are_finite_differences(kind):
    """Along random directions, of parameters and inputs in float64 and of tables in float32."""
    case, rng = CASES[kind], np.random.default_rng(1)

    def like(tree):
        return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), tree)

    with jax.enable_x64(True):
        module = make(kind, dtype=jnp.float64, param_dtype=jnp.float64)
        inputs = [jax.tree.map(jnp.asarray, pack(sample)) for sample in draw(case, np.float64)]
        # Not the first values: biases of zero put what is empty on the kink of a ReLU.
        parameters = jax.tree.map(
            lambda x: x + 0.1 * rng.standard_normal(x.shape).astype(x.dtype),
            nnx.state(module, nnx.Param),
        )
        nnx.update(module, parameters)
        tables, run = tables_of(module), step(case)
        _, gradients, of_inputs = run(module, inputs)
        of_tables = {key: tables[key] - rows for key, rows in tables_of(module).items()}
        load(module, tables)
        assert any(np.abs(x).max() > 0 for x in jax.tree.leaves((gradients, of_inputs, of_tables)))

        direction = like(parameters)
        moves = [like(x) if isinstance(x, jax.Array) else None for x in inputs]

        def moved(amount):
            nnx.update(module, jax.tree.map(lambda x, d: x + amount * d, parameters, direction))
            shifted = [
                x if move is None else x + amount * move
                for x, move in zip(inputs, moves, strict=True)
            ]
            value = run(module, shifted)[0]
            load(module, tables)
            return value

        amount, tolerance = (1e-3, 2e-3) if kind in FLOAT32_WEIGHTS else (1e-5, 1e-5)
        difference = (moved(amount) - moved(-amount)) / (2 * amount)
        expected = dot(gradients, direction) + dot(of_inputs, [m for m in moves if m is not None])
        np.testing.assert_allclose(difference, expected, rtol=tolerance, atol=tolerance)

        if not tables:
            return
        nnx.update(module, parameters)
        # Short, for the third derivative of a layer norm over a few columns is large.
        shifts = {
            key: rng.standard_normal(rows.shape) / rows.size**0.5 for key, rows in tables.items()
        }

        def with_tables(amount):
            load(module, {key: rows + amount * shifts[key] for key, rows in tables.items()})
            return run(module, inputs)[0]

        difference = (with_tables(2e-3) - with_tables(-2e-3)) / 4e-3
        expected = sum((of_tables[key] * shifts[key]).sum() for key in tables)
        np.testing.assert_allclose(difference, expected, rtol=2e-3, atol=2e-3)


@EVERY
def test_sharded_over_eight_devices(kind):
    """Value, gradients and tables after a step are those of one device."""
    case = CASES[kind]
    alone = make(kind)
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    placements = {name: jaxrec.mesh.row_wise() for _, name in tables_of(alone)}
    plan = jaxrec.plan.ShardingPlan.from_dict(placements)
    sharded = jaxrec.shard(make(kind), plan, mesh)
    samples = draw(case)
    value, gradients, _ = step(case)(alone, [jax.tree.map(jnp.asarray, pack(s)) for s in samples])
    with jax.set_mesh(mesh):
        got = step(case)(sharded, [on_mesh(sample, mesh) for sample in samples])
    np.testing.assert_allclose(got[0], value, rtol=1e-5, atol=1e-5)
    for one, other in zip(jax.tree.leaves(got[1]), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    moved = tables_of(alone)
    for key, rows in tables_of(sharded, moved).items():
        np.testing.assert_allclose(rows, moved[key], rtol=1e-4, atol=1e-5)


@EVERY
def test_bfloat16_and_empty_bags(kind):
    """Computed in bfloat16 it is near float32; a batch of nothing but empty bags is finite."""
    case = CASES[kind]
    samples = draw(case)
    short = make(kind, dtype=jnp.bfloat16)
    inputs = [jax.tree.map(jnp.asarray, pack(sample)) for sample in samples]
    found, expected = outputs(case, short, inputs), outputs(case, make(kind), inputs)
    if kind not in KEEPS_FLOAT32:
        main = found["states"].values if isinstance(found, dict) else found
        for leaf in jax.tree.leaves(main):
            assert leaf.dtype in (jnp.bfloat16, jnp.int32)
    assert {x.dtype for x in jax.tree.leaves(nnx.state(short, nnx.Param))} <= {jnp.dtype("float32")}
    size = sum(np.size(leaf) for leaf in jax.tree.leaves(expected))
    assert abs(float(total(found)) - float(total(expected))) < 0.02 * size

    nothing = [
        {key: [[]] * BATCH for key in sample} if isinstance(sample, dict) else sample
        for sample in samples
    ]
    out = outputs(case, make(kind), [jax.tree.map(jnp.asarray, pack(s)) for s in nothing])
    assert np.isfinite(total(out))


def rows_of(out, row):
    """What an output says of one sample."""
    if isinstance(out, jaxrec.KeyedJaggedArray):
        return [rows_of(out[key], row) for key in out.keys]
    if isinstance(out, jaxrec.JaggedArray):
        start = int(np.sum(out.lengths[:row]))
        values = out.values if out.weights is None else out.weights
        return [values[start : start + int(out.lengths[row])]]
    if isinstance(out, jax.Array):
        return [out[row]]
    return [rows_of(part, row) for part in (out.values() if isinstance(out, dict) else out)]


@EVERY
def test_batch_of_one(kind):
    """A sample alone comes out as it does among others."""
    case, module, row = CASES[kind], make(kind), 3
    samples = draw(case)
    among = outputs(case, module, [jax.tree.map(jnp.asarray, pack(s)) for s in samples])
    alone = [pack(select(sample, slice(row, row + 1)), 8) for sample in samples]
    out = outputs(case, module, [jax.tree.map(jnp.asarray, sample) for sample in alone])
    got, expected = jax.tree.leaves(rows_of(out, 0)), jax.tree.leaves(rows_of(among, row))
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
