"""Functions of ragged arrays against values recorded from FBGEMM."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec import ragged
from jaxrec.ragged import fbgemm
from tests import golden
from tests.ragged.test_golden import SPARE, names_starting, padded

pytestmark = [pytest.mark.every_case, pytest.mark.jax_version]


# How each case's function is called; see `call`.
JAGGED_FUNCTIONS = {
    "jagged_to_padded_dense_exact": "padded_dense",
    "jagged_to_padded_dense_longer": "padded_dense",
    "jagged_to_padded_dense_truncating": "padded_dense",
    "jagged_2d_to_dense_exact": "padded_dense",
    "jagged_2d_to_dense_longer": "padded_dense",
    "jagged_2d_to_dense_truncating": "padded_dense",
    "jagged_1d_to_dense": "padded_dense",
    "jagged_to_padded_dense_2_levels": "two_levels",
    "dense_to_jagged": "dense_to_jagged",
    "dense_to_jagged_short_dense": "dense_to_jagged",
    "jagged_dense_elementwise_add": "jagged_dense_elementwise_add",
    "jagged_dense_elementwise_add_jagged_output": "jagged_dense_elementwise_add_jagged_output",
    "jagged_dense_dense_elementwise_add_jagged_output": "add_two",
    "jagged_dense_elementwise_mul": "jagged_dense_elementwise_mul",
    "jagged_softmax": "softmax",
    "jagged_jagged_bmm": "jagged_jagged_bmm",
    "jagged_dense_bmm": "jagged_dense_bmm",
    "batched_dense_vec_jagged_2d_mul": "vectors",
    "jagged_index_select": "index_select",
    "segment_sum_csr": "segment_sum",
}


def call(kind: str, arrays, meta, inputs):
    """Applies a function to its differentiable inputs, a tuple in the order of `DIFFERENTIABLE`."""
    offsets = arrays.get("offsets", arrays.get("x_offsets", arrays.get("a_offsets")))
    if kind == "padded_dense":
        length = meta["max_length"]
        return fbgemm.jagged_to_padded_dense(*inputs, offsets, length, meta.get("padding_value", 0))
    if kind == "two_levels":
        levels = [arrays["offsets_0"], arrays["offsets_1"]]
        return fbgemm.jagged_to_padded_dense(*inputs, levels, arrays["out"].shape[1:3])
    if kind == "dense_to_jagged":
        return fbgemm.dense_to_jagged(*inputs, offsets, int(offsets[-1]) + SPARE)
    if kind == "add_two":
        return fbgemm.jagged_dense_dense_elementwise_add_jagged_output(
            inputs[0], offsets, *inputs[1:]
        )
    if kind.startswith("jagged_dense_elementwise"):
        return getattr(fbgemm, kind)(inputs[0], offsets, inputs[1])
    if kind == "softmax":
        return fbgemm.jagged_softmax(*inputs, offsets)
    if kind == "jagged_jagged_bmm":
        return fbgemm.jagged_jagged_bmm(*inputs, offsets, meta["max_L"])
    if kind == "jagged_dense_bmm":
        return fbgemm.jagged_dense_bmm(inputs[0], offsets, inputs[1], meta["max_L"])
    if kind == "vectors":
        return fbgemm.batched_dense_vec_jagged_2d_mul(*inputs, offsets)
    if kind == "index_select":
        capacity = len(arrays["out_values"]) + SPARE
        rows = (*inputs, arrays["lengths"])
        return fbgemm.jagged_index_select(*rows, arrays["indices"], capacity)[0]
    assert kind == "segment_sum"
    return fbgemm.segment_sum_csr(*inputs, arrays["csr_seg"], int(arrays["batch_size"]))


@pytest.mark.parametrize("name", JAGGED_FUNCTIONS)
def test_jagged_function(name):
    """Values and gradients, with NaN in the padding of every jagged input."""
    arrays, case = golden.load("kjt", name), dict(golden.cases("kjt"))[name]
    differentiable = [
        key for key in case["inputs"] if key in ("dense", "v", "y", "y_0", "y_1") or "values" in key
    ]
    inputs = tuple(
        padded(arrays[key]) if "values" in key else jnp.asarray(arrays[key])
        for key in differentiable
    )
    expected = arrays.get("out", arrays.get("out_values"))

    def apply(*inputs):
        out = call(JAGGED_FUNCTIONS[name], arrays, case["meta"], inputs)
        if out.shape != expected.shape:
            assert out.shape == (len(expected) + SPARE, *expected.shape[1:])
        return out

    if "grad_out" not in arrays:
        check_padded(jax.jit(apply)(*inputs), expected, case["tolerance"])
        return

    @jax.jit
    def value_and_gradients(*inputs):
        out, pull_back = jax.vjp(apply, *inputs)
        spare = jnp.ones((len(out) - len(expected), *out.shape[1:]))
        # What reaches the padding from behind must not leave it either.
        return out, pull_back(jnp.concatenate([arrays["grad_out"], spare]))

    out, gradients = value_and_gradients(*inputs)
    check_padded(out, expected, case["tolerance"])
    for key, gradient in zip(differentiable, gradients, strict=True):
        check_padded(gradient, arrays[f"grad_{key}"], case["tolerance"])


def check_padded(out, expected, tolerance) -> None:
    """As expected, and zeros behind it."""
    out = np.asarray(out)
    np.testing.assert_allclose(out[: len(expected)], expected, **tolerance)
    np.testing.assert_array_equal(out[len(expected) :], 0)


def test_lengths_of_jagged_index_select():
    arrays = golden.load("kjt", "jagged_index_select")
    rows = arrays["values"], arrays["lengths"]
    _, lengths = fbgemm.jagged_index_select(*rows, arrays["indices"])
    np.testing.assert_array_equal(lengths, arrays["out_lengths"])


def test_cumsum():
    arrays = golden.load("kjt", "cumsum")
    for xp in (np, jnp):
        x = xp.asarray(arrays["x"])
        np.testing.assert_array_equal(ragged.complete_cumsum(x), arrays["complete"])
        np.testing.assert_array_equal(ragged.inclusive_cumsum(x), arrays["inclusive"])
        np.testing.assert_array_equal(ragged.exclusive_cumsum(x), arrays["exclusive"])


def test_cumsum_2d():
    arrays = golden.load("kjt", "cumsum_2d")
    np.testing.assert_array_equal(ragged.complete_cumsum(arrays["x"]), arrays["complete"])


def test_invert_permute():
    arrays = golden.load("kjt", "invert_permute")
    np.testing.assert_array_equal(fbgemm.invert_permute(arrays["permute"]), arrays["out"])


@pytest.mark.parametrize("name", [n for n in names_starting("permute_") if "sparse" in n])
def test_permute_sparse_data(name):
    arrays = golden.load("kjt", name)
    count = len(arrays["out_values"])
    permute = jax.jit(fbgemm.permute_sparse_data, static_argnums=4)
    lengths, values, weights = permute(
        arrays["permute"], arrays["lengths"], arrays["values"], arrays["weights"], count + SPARE
    )
    np.testing.assert_array_equal(lengths, arrays["out_lengths"])
    np.testing.assert_array_equal(values, np.pad(arrays["out_values"], (0, SPARE)))
    np.testing.assert_array_equal(weights, np.pad(arrays["out_weights"], (0, SPARE)))


def test_expand_into_jagged_permute():
    arrays = golden.load("kjt", "expand_into_jagged_permute")
    count = len(arrays["out"])
    expanded = fbgemm.expand_into_jagged_permute(
        arrays["permute"], arrays["input_offsets"], arrays["output_offsets"], count + SPARE
    )
    np.testing.assert_array_equal(expanded[:count], arrays["out"])
    np.testing.assert_array_equal(expanded[count:], arrays["input_offsets"][-1])


def test_offsets_range():
    arrays = golden.load("kjt", "offsets_range")
    count = int(arrays["range_size"])
    offsets = np.append(arrays["offsets"], count)
    positions = ragged.offsets_range(offsets, count + SPARE)
    np.testing.assert_array_equal(positions, np.pad(arrays["out"], (0, SPARE)))


def test_lengths_range():
    arrays = golden.load("kjt", "lengths_range")
    positions = ragged.lengths_range(arrays["lengths"], len(arrays["out"]) + SPARE)
    np.testing.assert_array_equal(positions, np.pad(arrays["out"], (0, SPARE)))


@pytest.mark.parametrize("name", names_starting("block_bucketize"))
def test_block_bucketize(name):
    arrays = golden.load("kjt", name)
    keeps_ids = dict(golden.cases("kjt"))[name]["meta"].get("keep_orig_idx", False)
    ids, num_buckets = np.pad(arrays["indices"], (0, SPARE)), int(arrays["my_size"])
    strides = arrays.get("batch_size_per_feature")
    strides = None if strides is None else strides.tolist()
    if "pos_0" in arrays:
        boundaries = np.stack([arrays["pos_0"], arrays["pos_1"]])
        deal = functools.partial(fbgemm.boundary_bucketize_sparse_features, strides=strides)
        dealt = jax.jit(deal)(arrays["lengths"], ids, boundaries)
    else:
        deal = functools.partial(
            fbgemm.block_bucketize_sparse_features, num_buckets=num_buckets, strides=strides
        )
        dealt = jax.jit(deal)(arrays["lengths"], ids, arrays["block_sizes"])
    dealt = jax.device_get(dealt)
    assert_bucketized(dealt, arrays, ids[dealt.permute] if keeps_ids else dealt.ids)


def test_bucketize_sparse_features():
    arrays = golden.load("kjt", "bucketize_sparse_features")
    ids = np.pad(arrays["indices"], (0, SPARE))
    dealt = fbgemm.bucketize_sparse_features(arrays["lengths"], ids, 3)
    assert_bucketized(dealt, arrays, dealt.ids)


def assert_bucketized(dealt: fbgemm.Bucketized, arrays, ids) -> None:
    count = len(arrays["indices"])
    np.testing.assert_array_equal(dealt.lengths, arrays["out_lengths"])
    np.testing.assert_array_equal(ids[:count], arrays["out_indices"])
    np.testing.assert_array_equal(dealt.ids[count:], 0)
    permute = np.asarray(dealt.permute[:count])
    if "out_weights" in arrays:
        np.testing.assert_array_equal(arrays["weights"][permute], arrays["out_weights"])
    if "out_pos" in arrays:
        positions = ragged.lengths_range(arrays["lengths"], count)
        np.testing.assert_array_equal(positions[permute], arrays["out_pos"])
    if "out_unbucketize_permute" in arrays:
        np.testing.assert_array_equal(
            dealt.unbucketize_permute[:count], arrays["out_unbucketize_permute"]
        )


def test_every_case_is_tested():
    tested = {
        *names_starting("from_", "split", "concat", "to_", "keyed_", "cumsum", "permute_"),
        *names_starting("block_bucketize", "bounds_check"),
        *JAGGED_FUNCTIONS,
        *("invert_permute", "expand_into_jagged_permute", "offsets_range", "lengths_range"),
        "bucketize_sparse_features",
    }
    assert tested == set(golden.names("kjt"))
    assert len(tested) == 82
