"""Ragged batches and functions against values recorded from TorchRec and FBGEMM."""

from __future__ import annotations

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec import ragged
from jaxrec.ragged import JaggedArray, KeyedArray, KeyedJaggedArray, fbgemm
from tests import golden

pytestmark = [pytest.mark.every_case, pytest.mark.jax_version]

SPARE = 3  # positions of padding behind the values of flat jagged arrays, with NaN in them


def names_starting(*prefixes: str) -> list[str]:
    return [name for name in golden.names("kjt") if name.startswith(prefixes)]


def keyed(arrays, suffix: str = "", **options) -> KeyedJaggedArray:
    """The case's batch, on the device."""
    return jax.device_put(
        KeyedJaggedArray.from_lengths(
            arrays[f"keys{suffix}"].tolist(),
            arrays[f"values{suffix}"],
            arrays[f"lengths{suffix}"],
            arrays.get(f"weights{suffix}"),
            **options,
        )
    )


def unpadded(batch: KeyedJaggedArray, field: str = "values") -> np.ndarray:
    """Values or weights without the padding of each key: TorchRec's flat layout."""
    batch = jax.device_get(batch)
    columns = [batch._column(index) for index in range(len(batch.keys))]
    parts = [np.asarray(getattr(c, field))[: np.sum(c.lengths)] for c in columns]
    return np.concatenate([np.zeros(0, np.int32), *parts])


def assert_keyed(batch: KeyedJaggedArray, arrays, prefix: str = "out_") -> None:
    assert list(batch.keys) == arrays[f"{prefix}keys"].tolist()
    np.testing.assert_array_equal(unpadded(batch), arrays[f"{prefix}values"])
    np.testing.assert_array_equal(batch.lengths, arrays[f"{prefix}lengths"])
    np.testing.assert_array_equal(batch.length_per_key, arrays[f"{prefix}length_per_key"])
    np.testing.assert_array_equal(batch.offset_per_key, arrays[f"{prefix}offset_per_key"])
    # Of a batch without keys TorchRec's offsets are [0] after permute but [] after split.
    expected = arrays[f"{prefix}offsets"] if batch.keys else [0]
    np.testing.assert_array_equal(batch.offsets, expected)
    assert (batch.weights is None) == (f"{prefix}weights" not in arrays)
    if batch.weights is not None:
        np.testing.assert_array_equal(unpadded(batch, "weights"), arrays[f"{prefix}weights"])


@pytest.mark.parametrize("name", names_starting("from_lengths", "from_offsets"))
def test_construction(name):
    arrays = golden.load("kjt", name)
    build, layout = KeyedJaggedArray.from_lengths, "lengths"
    if "offsets" in arrays:
        build, layout = KeyedJaggedArray.from_offsets, "offsets"
    batch = build(
        keys=arrays["keys"].tolist(),
        values=arrays["values"],
        weights=arrays.get("weights"),
        **{layout: arrays[layout]},
    )
    assert_keyed(batch, arrays)
    assert batch.batch_size == arrays["out_stride"]


PERMUTES = [n for n in names_starting("permute_") if "sparse" not in n]


@pytest.mark.parametrize("name", PERMUTES)
def test_permute(name):
    arrays = golden.load("kjt", name)
    assert_keyed(keyed(arrays).permute(arrays["indices"].tolist()), arrays)


@pytest.mark.parametrize("name", names_starting("split"))
def test_split(name):
    arrays = golden.load("kjt", name)
    parts = keyed(arrays).split(arrays["segments"].tolist())
    assert len(parts) == len(arrays["segments"])
    for index, part in enumerate(parts):
        has_weights = f"out{index}_weights" in arrays
        assert has_weights == ("weights" in arrays)
        assert_keyed(part, arrays, f"out{index}_")


@pytest.mark.parametrize("name", names_starting("concat"))
def test_concat(name):
    arrays = golden.load("kjt", name)
    parts = [keyed(arrays, "_a"), keyed(arrays, "_b")]
    assert_keyed(KeyedJaggedArray.concat(parts), arrays)


@pytest.mark.parametrize("name", names_starting("to_dict"))
def test_to_dict(name):
    arrays = golden.load("kjt", name)
    batch = keyed(arrays)
    assert list(batch.to_dict()) == list(batch.keys)
    for key, column in batch.to_dict().items():
        count = int(column.lengths.sum())
        np.testing.assert_array_equal(column.values[:count], arrays[f"{key}_values"])
        np.testing.assert_array_equal(column.lengths, arrays[f"{key}_lengths"])
        np.testing.assert_array_equal(column.offsets, arrays[f"{key}_offsets"])
        if column.weights is not None:
            np.testing.assert_array_equal(column.weights[:count], arrays[f"{key}_weights"])


def jagged(arrays) -> JaggedArray:
    values, weights = padded(arrays["values"]), arrays.get("weights")
    lengths = arrays["lengths"].astype(np.int32)
    return JaggedArray(values, jnp.array(lengths), None if weights is None else padded(weights))


def padded(values: np.ndarray) -> jax.Array:
    """The values with something unusable behind them."""
    fill = np.nan if values.dtype.kind == "f" else 77
    return jnp.asarray(
        np.pad(values, [(0, SPARE), *[(0, 0)] * (values.ndim - 1)], constant_values=fill)
    )


@pytest.mark.parametrize("name", names_starting("to_padded_dense"))
def test_to_padded_dense(name):
    arrays = golden.load("kjt", name)
    column = jagged(arrays)
    convert = column.to_padded_dense_weights if "weights" in arrays else column.to_padded_dense
    length = int(arrays["desired_length"])
    length, padding_value = None if length == -1 else length, arrays["padding_value"].item()
    dense = convert(length, padding_value)
    np.testing.assert_array_equal(dense, arrays["out"])


@pytest.mark.parametrize("name", names_starting("to_dense"))
def test_to_lists(name):
    arrays = golden.load("kjt", name)
    rows = jagged(arrays).to_lists()
    assert rows == [arrays[f"out{index}"].tolist() for index in range(len(arrays["lengths"]))]


def test_from_dense_lengths():
    arrays = golden.load("kjt", "from_dense_lengths")
    column = JaggedArray.from_dense(arrays["dense"], jnp.array(arrays["lengths"], jnp.int32))
    count = int(arrays["lengths"].sum())
    np.testing.assert_array_equal(column.values[:count], arrays["out_values"])
    np.testing.assert_array_equal(column.values[count:], 0)
    np.testing.assert_array_equal(column.lengths, arrays["out_lengths"])
    np.testing.assert_array_equal(column.offsets, arrays["out_offsets"])


def keyed_arrays(arrays) -> list[KeyedArray]:
    return [
        KeyedArray(
            jnp.asarray(arrays[f"values_{index}"]),
            tuple(arrays[f"keys_{index}"].tolist()),
            tuple(arrays[f"length_per_key_{index}"].tolist()),
        )
        for index in range(3)
    ]


@pytest.mark.parametrize("name", names_starting("keyed_tensor_regroup"))
def test_regroup(name):
    arrays = golden.load("kjt", name)
    groups = dict(golden.cases("kjt"))[name]["meta"]["groups"]
    regrouped = KeyedArray.regroup(keyed_arrays(arrays), groups)
    assert len(regrouped) == len(groups)
    for index, group in enumerate(regrouped):
        np.testing.assert_array_equal(group, arrays[f"out{index}"])


def test_keyed_array_getitem():
    arrays = golden.load("kjt", "keyed_tensor_getitem")
    blocks = {}
    for array in keyed_arrays(arrays):
        blocks |= array.to_dict()
        assert array.offset_per_key == (0, *np.cumsum(array.dims))
        for key in array.keys:
            np.testing.assert_array_equal(array[key], blocks[key])
    assert len(blocks) == 6
    for key, block in blocks.items():
        np.testing.assert_array_equal(block, arrays[f"out_{key}"])


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


def test_keyed_jagged_index_select():
    arrays = golden.load("kjt", "keyed_jagged_index_select_dim1")
    batch_size = int(arrays["batch_size"])
    lengths = arrays["lengths"].reshape(-1, batch_size).astype(np.int32)
    ends = arrays["offsets"][::batch_size]
    columns = {
        f"f{key}": JaggedArray(
            arrays["values"][ends[key] : ends[key + 1]],
            lengths[key],
            arrays["weights"][ends[key] : ends[key + 1]],
        )
        for key in range(len(lengths))
    }
    batch = KeyedJaggedArray.from_dict(columns)
    capacities = {"f0": 10, "f1": 10, "f2": 10}
    select = jax.jit(lambda b, i: ragged.keyed_jagged_index_select(b, i, capacities))
    selected = select(batch, arrays["indices"])
    np.testing.assert_array_equal(selected.lengths, arrays["out_lengths"])
    np.testing.assert_array_equal(unpadded(selected), arrays["out_values"])
    np.testing.assert_array_equal(unpadded(selected, "weights"), arrays["out_weights"])


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


@pytest.mark.parametrize(
    ("name", "mode"),
    [("bounds_check_indices_warning", "clamp"), ("bounds_check_indices_ignore", "ignore")],
)
def test_bounds_check(name, mode):
    arrays = golden.load("kjt", name)
    keys = ["f0", "f1"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batch = KeyedJaggedArray.from_offsets(
            keys,
            arrays["indices"],
            arrays["offsets"],
            bounds=dict(zip(keys, arrays["rows_per_table"].tolist(), strict=True)),
            bounds_mode=mode,
        )
    # FBGEMM leaves -1 alone, a pruned row of inference; here it is outside as any other.
    is_pruned = arrays["out_indices"] == -1
    assert is_pruned.any()
    expected = np.where(is_pruned, 0, arrays["out_indices"])
    np.testing.assert_array_equal(unpadded(batch), expected)
    np.testing.assert_array_equal(batch.offsets, arrays["out_offsets"])
    count = arrays["out_warning"][0] + is_pruned.sum()
    counts = [str(warning.message).split()[0] for warning in caught]
    assert counts == ([str(count)] if mode == "clamp" else [])


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


def variable_batch(name: str) -> tuple[dict, KeyedJaggedArray]:
    arrays = golden.load("vbe", name)
    return arrays, keyed(
        arrays,
        strides=arrays["stride_per_key_per_rank"].sum(axis=1).tolist(),
        inverse_indices=arrays.get("inverse_indices"),
    )


def test_variable_batch():
    arrays, batch = variable_batch("kjt_vbe")
    np.testing.assert_array_equal(batch.offsets, arrays["offsets"])
    np.testing.assert_array_equal(batch.length_per_key, arrays["length_per_key"])
    np.testing.assert_array_equal(batch.offset_per_key, arrays["offset_per_key"])
    assert batch.batch_size == arrays["stride"]
    assert list(batch.strides) == arrays["stride_per_key"].tolist()
    for key, column in batch.to_dict().items():
        np.testing.assert_array_equal(column.lengths, arrays[f"dict_{key}_lengths"])
        values = np.concatenate(column.to_lists())
        np.testing.assert_array_equal(values, arrays[f"dict_{key}_values"])

    permuted = batch.permute(arrays["permute"].tolist())
    assert list(permuted.keys) == arrays["perm_keys"].tolist()
    assert list(permuted.strides) == arrays["perm_stride_per_key"].tolist()
    np.testing.assert_array_equal(permuted.lengths, arrays["perm_lengths"])
    np.testing.assert_array_equal(unpadded(permuted), arrays["perm_values"])
    np.testing.assert_array_equal(unpadded(permuted, "weights"), arrays["perm_weights"])
    np.testing.assert_array_equal(
        permuted.inverse_indices, arrays["inverse_indices"][arrays["permute"]]
    )


def test_variable_batch_split():
    arrays, batch = variable_batch("kjt_vbe_split")
    for index, part in enumerate(batch.split([1, len(batch.keys) - 1])):
        assert list(part.keys) == arrays[f"out{index}_keys"].tolist()
        assert list(part.strides) == arrays[f"out{index}_stride_per_key"].tolist()
        np.testing.assert_array_equal(part.lengths, arrays[f"out{index}_lengths"])
        np.testing.assert_array_equal(unpadded(part), arrays[f"out{index}_values"])
