"""Any step of the optimizer leaves finite numbers, or is skipped and changes nothing."""

from __future__ import annotations

import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxrec
from jaxrec import optim
from tests.fuzz import max_examples

pytestmark = pytest.mark.jax_version

ROWS, SAMPLES = 5, 4
OPTIMIZERS = {
    "rowwise_adagrad": optim.rowwise_adagrad(0.1, weight_decay=0.1, weight_decay_mode="l2"),
    "adam": optim.adam(0.1),
    "ftrl": optim.ftrl(0.1, l1=0.01),
    # LAMB lengthens a row by up to a tenth a step: some hundred steps would make it infinite.
    "ema of lamb": optim.ema(optimizer=optim.lamb(0.1, clip_norm=1.0, max_norm=1e6)),
}

# Factors whose square float32 holds, and those that no gradient survives.
FACTORS = st.one_of(
    st.floats(-(2.0**50), 2.0**50, width=32, allow_subnormal=False),
    st.sampled_from([0.0, np.nan, np.inf, -np.inf, 1e-45, 1e38]),
)
# Ids outside the table too; bags of any length, none included.
BAGS = st.lists(st.lists(st.integers(0, ROWS + 2), max_size=3), min_size=SAMPLES, max_size=SAMPLES)


class Ranker(nnx.Module):
    def __init__(self, optimizer):
        config = jaxrec.EmbeddingBagConfig("user", ROWS, 3, pooling="mean")
        self.embeddings = jaxrec.EmbeddingBagCollection(
            [config], optimizer=optimizer, rngs=nnx.Rngs(0)
        )
        self.over = nnx.Linear(3, 1, rngs=nnx.Rngs(1))

    def __call__(self, features):
        return self.over(self.embeddings(features).values)[:, 0]


@functools.cache
def session(name):
    model = Ranker(OPTIMIZERS[name])
    optimizer = jaxrec.Optimizer(model, optax.adam(0.1))

    @nnx.jit
    def step(model, optimizer, features, factors):
        loss_fn = lambda model: (factors * model(features)).sum()  # noqa: E731
        loss, gradients = jaxrec.value_and_grad(loss_fn)(model)
        gradients = gradients.clip(1e6)
        optimizer.update(model, gradients)
        return loss, gradients.norm()

    return model, optimizer, step


def numbers(*modules):
    """Every number of some modules, but the counts of skipped steps."""
    return {
        path: [np.array(x) for x in jax.tree.leaves(variable.get_value())]
        for path, variable in nnx.to_flat_state(nnx.state(modules))
        if not {"skipped", "skipped_in_a_row"} & set(path)
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
@settings(max_examples=max_examples(25), deadline=None)
@given(bags=BAGS, factors=st.lists(FACTORS, min_size=SAMPLES, max_size=SAMPLES))
def test_a_step_is_finite_or_changes_nothing(name, bags, factors):
    model, optimizer, step = session(name)
    before, skipped = numbers(model, optimizer), int(optimizer.skipped[...])
    features = jaxrec.KeyedJaggedArray.from_lists({"user": bags}, capacities={"user": 12})
    loss, norm = step(model, optimizer, features, np.array(factors, np.float32))
    after = numbers(model, optimizer)
    is_skipped = int(optimizer.skipped[...]) > skipped
    # A step is skipped, too, where only the gradient of an empty bag overflows.
    assert is_skipped or (np.isfinite(loss) and np.isfinite(norm))
    if any(row >= ROWS for bag in bags for row in bag):
        assert is_skipped
    for path, arrays in after.items():
        for array, old in zip(arrays, before[path], strict=True):
            if is_skipped:
                np.testing.assert_array_equal(array, old, err_msg=str(path))
            elif np.issubdtype(array.dtype, np.floating):
                assert np.isfinite(array).all(), path
    if not is_skipped:
        touched = {row for bag in bags for row in bag}
        kept = [row for row in range(ROWS) if row not in touched]
        path = next(path for path in after if "tables" in path)
        for array, old in zip(after[path], before[path], strict=True):
            np.testing.assert_array_equal(array[kept], old[kept])
