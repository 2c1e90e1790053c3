"""Types of layers; products: the numbers of NumPy, and the form in which gradients are computed."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrec.nn import MLP, LowRankCrossNet, MMoE, Perceptron
from jaxrec.nn.arithmetic import dot_general, promote

pytestmark = pytest.mark.jax_version

SIZES = [(6, 4), (4, 6), (5, 5), (7, 1), (1, 3)]


def multiply(x, kernel):
    return dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())))


def normal(*shape):
    rng = np.random.default_rng(sum(shape))
    return jnp.array(rng.standard_normal(shape, np.float32))


@pytest.mark.parametrize("batch", [(3,), (2, 3)])
@pytest.mark.parametrize(("columns", "out"), SIZES)
def test_products_and_gradients_are_those_of_numpy(columns, out, batch):
    x, kernel, cotangent = normal(*batch, columns), normal(columns, out), normal(*batch, out)
    product, vjp = jax.vjp(multiply, x, kernel)
    np.testing.assert_allclose(product, x @ kernel, rtol=1e-5, atol=1e-5)
    of_x, of_kernel = vjp(cotangent)
    np.testing.assert_allclose(of_x, cotangent @ kernel.T, rtol=1e-5, atol=1e-5)
    expected = x.reshape(-1, columns).T @ cotangent.reshape(-1, out)
    np.testing.assert_allclose(of_kernel, expected, rtol=1e-5, atol=1e-5)


def test_tangents_and_gradients_of_each_sample():
    x, kernel, tangent = normal(3, 6), normal(6, 4), normal(4, 6).T
    _, found = jax.jvp(lambda kernel: multiply(x, kernel), (kernel,), (tangent,))
    np.testing.assert_allclose(found, x @ tangent, rtol=1e-5, atol=1e-5)
    each = jax.vmap(jax.grad(lambda kernel, x: multiply(x, kernel).sum()), (None, 0))
    expected = np.broadcast_to(x[:, :, None], (3, 6, 4))
    np.testing.assert_allclose(each(kernel, x[:, None]), expected, rtol=1e-6)
    of_many = jax.vmap(jax.grad(lambda kernel: (multiply(x, kernel) ** 2).sum()))
    np.testing.assert_allclose(of_many(kernel[None])[0], 2 * x.T @ (x @ kernel), rtol=1e-4)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a form for CPUs")
@pytest.mark.parametrize(("columns", "out", "computed"), [(64, 32, "32,64"), (32, 64, "32,64")])
def test_the_wider_matrix_of_a_weight_gradient_is_on_the_right(columns, out, computed):
    gradient = jax.jit(jax.grad(lambda kernel, x: (multiply(x, kernel) ** 2).sum()))
    program = gradient.lower(normal(columns, out), normal(256, columns)).compile().as_text()
    products = re.findall(r"f32\[(\d+,\d+)\]\S* dot\(", program)
    assert sorted(products) == sorted([f"256,{out}", computed])


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a form for CPUs")
@pytest.mark.parametrize(
    ("make", "count"),
    [
        (lambda rngs: MLP(8, (4, 8, 2, 1), rngs=rngs), 2),
        (lambda rngs: Perceptron(8, 4, rngs=rngs), 1),
        (lambda rngs: LowRankCrossNet(8, 3, 2, rngs=rngs), 3),
        (
            lambda rngs: MMoE(
                8, num_tasks=1, num_experts=2, expert_layer_sizes=(4,), tower_layer_sizes=(1,),
                rngs=rngs,
            ),
            3,
        ),
    ],
    ids=["MLP", "Perceptron", "LowRankCrossNet", "MMoE"],
)  # fmt: skip
def test_layers_that_narrow_use_the_form(make, count):
    graph, state = nnx.split(make(nnx.Rngs(0)))

    def loss(state, x):
        return sum(leaf.sum() for leaf in jax.tree.leaves(nnx.merge(graph, state)(x)))

    x = jnp.ones((5, 8))
    assert jax.jit(jax.grad(loss)).lower(state, x).as_text().count("optimization_barrier") == count
    assert "optimization_barrier" not in jax.jit(loss).lower(state, x).as_text()


@pytest.mark.parametrize(
    ("dtype", "types", "expected"),
    [
        (None, ("bfloat16", "float32"), "float32"),
        (None, ("bfloat16", "float16"), "float32"),
        (None, ("bfloat16", "bfloat16"), "bfloat16"),
        ("bfloat16", ("float32", "float16"), "bfloat16"),
    ],
)
def test_types(dtype, types, expected):
    arrays = promote(dtype, *(jnp.ones(2, each) for each in types))
    assert [array.dtype for array in arrays] == [jnp.dtype(expected)] * 2


def test_values_stay():
    short, integers = promote("float32", np.float16([0.5, -2]), np.arange(2))
    np.testing.assert_array_equal(short, [0.5, -2])
    np.testing.assert_array_equal(integers, [0, 1])
