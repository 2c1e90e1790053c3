"""Ragged batches against values recorded from TorchRec and FBGEMM."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec import ragged
from jaxrec.ragged import JaggedArray, KeyedArray, KeyedJaggedArray
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
