"""The backbones of click models and of histories are their papers' formulas in float64."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from jaxrec import nn
from jaxrec.nn.onetrans import OneTransBlock
from jaxrec.nn.token_attention import TokenBlock
from tests.nn import backbone_oracle as oracle
from tests.nn.cases import CASES, bags, items
from tests.nn.steps import draw, forward, make, on_device, step

pytestmark = [pytest.mark.usefixtures("compiled_fast"), pytest.mark.every_case]

EVERY = pytest.mark.parametrize("kind", oracle.FORMULAS, ids=lambda kind: kind.__name__)


def drawn(kind):
    """A model in float64 with drawn values, and a batch with empty and with long histories."""
    module = make(kind, dtype=jnp.float64, param_dtype=jnp.float64)
    samples = draw(CASES[kind], np.float64)
    if kind in oracle.HISTORY_MODELS:
        samples[0]["history"][0] = list(range(7))  # more than a model reads
    return module, samples


def formula(kind, module, samples, stopped=None):
    if kind is nn.PEPNet:
        return oracle.pepnet(module, *samples, stopped)[0]
    return oracle.FORMULAS[kind](module, *samples)


@EVERY
def test_values(kind):
    with jax.enable_x64(True):
        module, samples = drawn(kind)
        found, _ = forward(kind)(module, on_device(samples))
        expected = formula(kind, module, samples)
    # Embeddings are float32, and sums of them.
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


@EVERY
@pytest.mark.slow
def test_gradients(kind):
    """Those of parameters and dense inputs, along a random direction, are the formula's."""
    rng = np.random.default_rng(2)
    with jax.enable_x64(True):
        module, samples = drawn(kind)
        stopped = oracle.pepnet(module, *samples)[1] if kind is nn.PEPNet else None
        parameters = jax.tree.map(np.array, nnx.state(module, nnx.Param))
        direction = jax.tree.map(lambda x: rng.standard_normal(x.shape), parameters)
        of_dense = [rng.standard_normal(x.shape) for x in samples if isinstance(x, np.ndarray)]

        def total(amount):
            """The formula's value, of parameters and inputs that moved."""
            moved = jax.tree.map(lambda x, d: jnp.asarray(x + amount * d), parameters, direction)
            nnx.update(module, moved)
            inputs = [x + amount * d for x, d in zip(samples, of_dense, strict=False)]
            inputs += samples[len(inputs) :]
            return np.sin(formula(kind, module, inputs, stopped)).sum()

        difference = (total(1e-7) - total(-1e-7)) / 2e-7
        nnx.update(module, jax.tree.map(jnp.asarray, parameters))
        _, _, of_parameters, of_inputs = step(kind)(module, on_device(samples))
    pairs = zip(
        jax.tree.leaves((of_parameters, of_inputs)),
        jax.tree.leaves((nnx.to_pure_dict(direction), of_dense)),
        strict=True,
    )
    expected = sum(np.vdot(one, other) for one, other in pairs)
    np.testing.assert_allclose(difference, expected, rtol=1e-4, atol=1e-4)


def products(jaxpr):
    """FLOPs of the matrix products of a traced function, a multiplication and an addition each."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            sizes = equation.invars[0].aval.shape
            out = equation.outvars[0].aval.shape
            total += 2 * int(np.prod([sizes[axis] for axis in contracted]) * np.prod(out))
        total += sum(products(inner) for inner in jaxprs_in_params(equation.params))
    return total


def layers(*sizes):
    """Parameters of dense layers, and the products of a sample."""
    pairs = list(itertools.pairwise(sizes))
    return sum((a + 1) * b for a, b in pairs), sum(a * b for a, b in pairs)


# For each part: how it is made, the shapes of its inputs, and the docstring's numbers of parameters
# and of FLOPs per sample.
n, d, h, o, k, l, t = 5, 6, 7, 4, 2, 4, 3  # noqa: E741 - the letters of the docstrings
MLP_PARAMETERS, MLP_PRODUCTS = layers(n * k, h, 3 * d)
SIZES = {
    "WukongLayer": (
        lambda r: nn.WukongLayer(n, d, num_fm=3, num_linear=1, rank=k, hidden_sizes=(h,), rngs=r),
        [(n, d)],
        n * (k + 1 + o) + 2 * n * k + 2 * d + MLP_PARAMETERS,
        2 * n * d * (2 * k + 1 + o) + 2 * MLP_PRODUCTS,
    ),
    "RankMixerBlock": (
        lambda r: nn.RankMixerBlock(t, d, hidden_dim=h, rngs=r),
        [(t, d)],
        t * (2 * d * h + h + d) + 4 * d,
        4 * t * d * h,
    ),
    "MaskBlock": (
        lambda r: nn.MaskBlock(n, d, o, mask_hidden_size=h, rngs=r),
        [(n,), (d,)],
        (n + 1) * h + (h + 1) * d + d * o + 2 * o,
        2 * (n * h + h * d + d * o),
    ),
    "BilinearFusion": (
        lambda r: nn.BilinearFusion(d, o, num_heads=2, rngs=r),
        [(d,), (o,)],
        d + o + 1 + d * o // 2,
        2 * (d + o + d * o // 2 + o),
    ),
    "GatedCrossNet": (
        lambda r: nn.GatedCrossNet(n, 1, rngs=r), [(n,)], 2 * n * n + n, 4 * n * n
    ),
    "GateNU": (
        lambda r: nn.GateNU(n, h, o, rngs=r),
        [(n,)],
        (n + 1) * h + (h + 1) * o,
        2 * h * (n + o),
    ),
    "TransAct, LONGER": (
        lambda r: TokenBlock(
            d, 2, h, norm="pre", dtype=None, param_dtype=jnp.float32, rngs=r
        ),
        [(k, d), (l, d), (k, l)],
        4 * d * d + 2 * d * h + 9 * d + h,
        2 * (k * (2 * d * d + 2 * d * h) + l * (2 * d * d + 2 * k * d)),
    ),
    **{
        f"OneTrans, {'last block' if k == t else 'block'}": (
            lambda r, k=k: OneTransBlock(
                d, t, 2, h, asks=k > t, dtype=None, param_dtype=jnp.float32, rngs=r
            ),
            [(l + t, d), k, (k, l + t)],
            (t + 1) * (4 * d * d + 2 * d * h + h + 5 * d) + 2 * d
            - (0 if k > t else 2 * d * d + 2 * d * h + h + 3 * d),
            2 * (2 * (l + t) * d * d + k * (2 * d * d + 2 * d * h) + 2 * (l + t) * k * d),
        )
        for k in (t + 1, t)
    },
}  # fmt: skip


@pytest.mark.parametrize(("make", "inputs", "parameters", "flops"), SIZES.values(), ids=SIZES)
def test_docstrings_count_parameters_and_flops(make, inputs, parameters, flops):
    module = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    assert sum(x.size for x in jax.tree.leaves(nnx.state(module, nnx.Param))) == parameters
    graph, state = nnx.split(module)
    arrays = {i: jnp.ones((1, *x)) for i, x in enumerate(inputs) if isinstance(x, tuple)}
    if len(inputs) == 3:
        arrays[2] = arrays[2] > 0  # a mask

    def run(state, arrays):
        return nnx.merge(graph, state)(*(arrays.get(i, x) for i, x in enumerate(inputs)))

    assert products(jax.make_jaxpr(run)(state, arrays).jaxpr) == flops


TABLE = {"num_dense": 2, "bottom_layer_sizes": (3,), "top_layer_sizes": (1,)}
LAYERS = {"num_layers": 1, "num_fm": 1, "num_linear": 1, "rank": 1}
HISTORY = {"max_length": 4, "top_layer_sizes": (5, 1)}
WRONG = {
    "wukong-bottom": (
        lambda r: nn.Wukong(bags(r), **LAYERS, **TABLE, rngs=r),
        "bottom_layer_sizes of Wukong ends with a multiple of the tables' width, 4",
    ),
    "wukong-layers": (
        lambda r: nn.Wukong(bags(r), **LAYERS | {"num_layers": 0}, top_layer_sizes=(1,), rngs=r),
        "num_layers is 1 or more, got 0",
    ),
    "wukong-rank": (
        lambda r: nn.Wukong(bags(r), **LAYERS | {"rank": 0}, top_layer_sizes=(1,), rngs=r),
        "num_linear=1, rank=0",
    ),
    "rankmixer-tokens": (
        lambda r: nn.RankMixerBlock(4, 6, hidden_dim=1, rngs=r),
        "num_tokens=4, dim=6",
    ),
    "rankmixer-layers": (
        lambda r: nn.RankMixer(
            bags(r), num_layers=0, num_tokens=2, dim=4, hidden_dim=1, top_layer_sizes=(1,), rngs=r
        ),
        "num_layers is 1 or more, got 0",
    ),
    "masknet-structure": (
        lambda r: nn.MaskNet(
            bags(r), block_sizes=(2,), mask_hidden_size=2, structure="both", rngs=r
        ),
        "structure is 'serial' or 'parallel', got 'both'",
    ),
    "masknet-blocks": (
        lambda r: nn.MaskNet(bags(r), block_sizes=(), mask_hidden_size=2, rngs=r),
        "block_sizes is empty",
    ),
    "gdcn-structure": (
        lambda r: nn.GDCN(
            bags(r), cross_layers=1, deep_layer_sizes=(2,), structure="both", rngs=r
        ),
        "structure is 'stacked' or 'parallel', got 'both'",
    ),
    "finalmlp-heads": (
        lambda r: nn.BilinearFusion(6, 4, num_heads=3, rngs=r),
        "num_heads=3 does not divide the columns of both vectors, 6 and 4",
    ),
    "finalmlp-contexts": (
        lambda r: nn.FinalMLP(
            bags(r), contexts=(("c",), ()), first_layer_sizes=(2,), second_layer_sizes=(2,), rngs=r
        ),
        r"contexts names features that tables read, \['a', 'b'\]; got \['c'\]",
    ),
    "finalmlp-gates": (
        lambda r: nn.FinalMLP(
            bags(r), contexts=(("a",),), first_layer_sizes=(2,), second_layer_sizes=(2,), rngs=r
        ),
        "contexts has features for 1 gates",
    ),
    "pepnet-tasks": (
        lambda r: nn.PEPNet(
            bags(r), num_tasks=0, hidden_sizes=(2,), domain_hidden_size=2, rngs=r
        ),
        "num_tasks=0",
    ),
    "pepnet-prior": (
        lambda r: nn.PEPNet(
            bags(r), prior=("c",), hidden_sizes=(2,), domain_hidden_size=2, rngs=r
        ),
        r"prior names features that tables read, \['a', 'b'\]; got \['c'\]",
    ),
    "transact-newest": (
        lambda r: nn.TransAct(items(r), {"history": "target"}, num_newest=5, **HISTORY, rngs=r),
        "num_newest=5, max_length=4",
    ),
    "transact-heads": (
        lambda r: nn.TransAct(
            items(r), {"history": "target"}, num_newest=1, num_heads=3, **HISTORY, rngs=r
        ),
        "num_heads=3 does not divide dim=8",
    ),
    "longer-merge": (
        lambda r: nn.LONGER(
            items(r), {"history": "target"}, merge=3, num_queries=1, **HISTORY, rngs=r
        ),
        "max_length=4 items do not divide into groups of merge=3",
    ),
    "longer-queries": (
        lambda r: nn.LONGER(
            items(r), {"history": "target"}, merge=2, num_queries=3, **HISTORY, rngs=r
        ),
        "the 2 merged tokens.* got num_queries=3",
    ),
    "onetrans-tokens": (
        lambda r: nn.OneTrans(items(r), {"history": "target"}, num_tokens=0, **HISTORY, rngs=r),
        "num_tokens=0",
    ),
    "onetrans-heads": (
        lambda r: nn.OneTrans(
            items(r), {"history": "target"}, dim=6, num_heads=4, **HISTORY, rngs=r
        ),
        "num_heads=4 does not divide dim=6",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "message"), WRONG.values(), ids=WRONG)
def test_what_sizes_must_be(make, message):
    with pytest.raises(ValueError, match=message):
        nnx.eval_shape(lambda: make(nnx.Rngs(0)))


def test_the_learned_vectors_of_gates_have_gradients_from_the_start():
    model = nn.FinalMLP(
        bags(nnx.Rngs(0)), first_layer_sizes=(2,), second_layer_sizes=(2,), rngs=nnx.Rngs(1)
    )
    for gate in model.gates:
        gradient = nnx.grad(lambda gate: gate(jnp.zeros((1, 1))).sum())(gate)
        assert np.abs(gradient["learned"][...]).max() > 0
