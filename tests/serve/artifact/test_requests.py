"""Batches of a request, cut to the sizes of a model: every sample arrives, and errors name it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxrec
from jaxrec.serve.artifact.batch_spec import (
    ArrayInput,
    BatchSize,
    BatchSpec,
    Feature,
    RaggedInput,
    Structure,
)
from jaxrec.serve.artifact.inputs import batch_spec
from jaxrec.serve.artifact.requests import Request
from tests.fuzz import max_examples
from tests.serve.models import clicks, dlrm

PAIR = Structure("tuple", (), (Structure(), Structure()))


def make_spec(*sizes: tuple[int, int, int], weighted: bool = False, fixed: int | None = None):
    features = (Feature("user", 10), Feature("tags", 20, fixed))
    return BatchSpec(
        PAIR,
        (ArrayInput("batch[0]", "float32", (2,)), RaggedInput("batch[1]", features, weighted)),
        tuple(BatchSize(samples, ((user, tags),)) for samples, user, tags in sizes),
    )


SPEC = make_spec((1, 4, 8), (4, 8, 16), (16, 24, 48))


def make_batch(lengths: list[tuple[int, int]], weighted: bool = False, **options):
    rng = np.random.default_rng(len(lengths))
    lists = {
        "tags": [rng.integers(0, 20, tags).tolist() for _, tags in lengths],
        "ignored": [[7]] * len(lengths),
        "user": [rng.integers(0, 10, user).tolist() for user, _ in lengths],
    }
    weights = {key: [rng.random(len(bag)).tolist() for bag in bags] for key, bags in lists.items()}
    dense = rng.standard_normal((len(lengths), 2)).astype(np.float32)
    ids = jaxrec.KeyedJaggedArray.from_lists(
        lists, weights=weights if weighted else None, **options
    )
    return dense, ids


def read_back(spec: BatchSpec, batch) -> tuple[list[int], list, dict, dict]:
    """Return the sizes of the chunks, and the dense rows, ids and weights in them."""
    ragged = spec.inputs[1]
    sizes, dense = [], []
    ids = {key: [] for key in ragged.keys}
    weights = {key: [] for key in ragged.keys}
    for chunk in Request(spec, batch).chunks():
        count = chunk.stop - chunk.start
        shapes = [(array.shape, array.dtype) for array in chunk.arrays]
        assert shapes == [(each.shape, each.dtype) for each in spec.shapes(chunk.size)]
        sizes.append(chunk.size.samples)
        dense += chunk.arrays[0][:count].tolist()
        packed = jaxrec.KeyedJaggedArray(
            *chunk.arrays[1:],
            keys=ragged.keys,
            capacities=chunk.size.capacities[0],
            strides=(chunk.size.samples,) * 2,
        )
        for key in ragged.keys:
            bags = packed[key].to_lists()
            assert not any(bags[count:])
            ids[key] += bags[:count]
            if ragged.is_weighted:
                weights[key] += jaxrec.JaggedArray(
                    packed[key].weights, packed[key].lengths
                ).to_lists()[:count]
    return sizes, dense, ids, weights


@given(
    lengths=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 40)), min_size=1, max_size=60),
    weighted=st.booleans(),
)
@settings(max_examples=max_examples(60))
def test_every_sample_arrives(lengths, weighted):
    spec = make_spec((1, 4, 8), (4, 8, 16), (16, 24, 48), weighted=weighted)
    batch = make_batch(lengths, weighted)
    _, dense, ids, weights = read_back(spec, batch)
    assert dense == batch[0].tolist()
    for key in ("user", "tags"):
        assert ids[key] == batch[1][key].to_lists()
        if weighted:
            column = batch[1][key]
            expected = jaxrec.JaggedArray(column.weights, column.lengths).to_lists()
            np.testing.assert_array_equal(np.concatenate(weights[key]), np.concatenate(expected))


@pytest.mark.parametrize(
    ("samples", "sizes"),
    [
        (0, []),
        (1, [1]),
        (2, [4]),
        (4, [4]),
        (5, [4, 1]),
        (9, [16]),
        (23, [16, 4, 4]),
        (32, [16, 16]),
    ],
)
def test_chunks_are_at_least_half_full(samples, sizes):
    assert read_back(SPEC, make_batch([(1, 1)] * samples))[0] == sizes


def test_long_bags_make_smaller_chunks():
    sizes, *_ = read_back(SPEC, make_batch([(1, 30), (1, 30), (1, 1)]))
    assert sizes == [16, 16]
    sizes, *_ = read_back(SPEC, make_batch([(1, 1), (1, 48), (1, 8)]))
    assert sizes == [1, 16, 1]


@pytest.mark.parametrize("kind", [list, np.float64, np.int32])
def test_types_that_convert_without_loss(kind):
    _, ids = make_batch([(1, 1), (0, 2)])
    dense = [[1, 2], [3, 4]]
    given = dense if kind is list else np.array(dense, kind)
    assert read_back(SPEC, (given, ids))[1] == dense


def spoiled(name: str):
    dense, ids = make_batch([(1, 1), (2, 2), (0, 3)])
    lists = ids.to_lists()
    lists["user"][1] = [3, 10]
    from_lists = jaxrec.KeyedJaggedArray.from_lists
    return {
        "id too large": (dense, from_lists(lists)),
        "feature missing": (dense, ids.select(["user", "ignored"])),
        "other numbers of samples": (dense[:2], ids),
        "other columns": (dense[:, :1], ids),
        "complex": (dense.astype(complex), ids),
        "text": (np.array([["a", "b"]] * 3), ids),
        "ragged for dense": (ids, ids),
        "dense for ragged": (dense, dense),
        "weights": make_batch([(1, 1), (2, 2), (0, 3)], weighted=True),
        "raw ids": (dense, from_lists(lists, id_bits=64)),
        "too many ids": make_batch([(1, 1), (1, 49)]),
        "no batch axis": (np.float32(3), ids),
    }[name]


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("id too large", ValueError, r"feature 'user', sample 1: id 10 is outside \[0, 10\)"),
        ("feature missing", KeyError, "lacks feature 'tags'; it has 'user', 'ignored'"),
        ("other numbers of samples", ValueError, r"got 2 in batch\[0\], 3 in batch\[1\]"),
        ("other columns", ValueError, r"must have the shape \[samples, 2\], got \(3, 1\)"),
        ("complex", TypeError, "must be an array of float32, got complex128"),
        ("text", TypeError, "must be an array of float32, got <U1"),
        ("ragged for dense", TypeError, "of float32, got a KeyedJaggedArray"),
        ("dense for ragged", TypeError, "must be a KeyedJaggedArray, got ndarray"),
        ("weights", ValueError, "the model was exported for batches without them"),
        ("raw ids", TypeError, "has raw ids"),
        ("too many ids", ValueError, "feature 'tags', sample 1: 49 ids, and the model takes 48"),
        ("no batch axis", ValueError, r"must have the shape \[samples, 2\], got \(\)"),
    ],
)
def test_bad_requests(name, error, message, unchecked):
    with pytest.raises(error, match=message):
        list(Request(SPEC, spoiled(name)).chunks())


def test_ids_of_negative_numbers():
    values = np.array([3, -1, 0, 0, 0, 0, 0, 0], np.int32)
    ids = jaxrec.KeyedJaggedArray._of(
        np.concatenate([values, values * 0]), np.array([2, 0], np.int32), None, None,
        ("user", "tags"), (8, 8), (1, 1),
    )  # fmt: skip
    with pytest.raises(ValueError, match="feature 'user', sample 0: id -1 is outside"):
        list(Request(SPEC, (np.zeros((1, 2)), ids)).chunks())


def test_later_samples_are_named_by_their_number():
    dense, ids = make_batch([(1, 1)] * 40)
    lists = ids.to_lists()
    lists["tags"][37] = [20]
    with pytest.raises(ValueError, match="feature 'tags', sample 37: id 20"):
        list(Request(SPEC, (dense, jaxrec.KeyedJaggedArray.from_lists(lists))).chunks())


def test_weights_are_required_where_the_model_takes_them():
    spec = make_spec((4, 8, 16), weighted=True)
    with pytest.raises(ValueError, match="has no weights, and the model takes them"):
        Request(spec, make_batch([(1, 1)]))


def test_features_of_a_fixed_number_of_ids():
    spec = make_spec((2, 8, 6), fixed=3)
    assert read_back(spec, make_batch([(1, 3)] * 5))[0] == [2, 2, 2]
    with pytest.raises(ValueError, match=r"'tags', sample 1: 2 ids, but .* exported for 3 in each"):
        list(Request(spec, make_batch([(1, 3), (1, 2)])).chunks())


def test_integers_that_do_not_fit():
    spec = BatchSpec(
        Structure("tuple", (), (Structure(),)),
        (ArrayInput("batch[0]", "int32", ()),),
        (BatchSize(4, ()),),
    )
    assert next(Request(spec, ([1, 2],)).chunks()).arrays[0].tolist() == [1, 2, 0, 0]
    with pytest.raises(ValueError, match="has a number that does not fit int32"):
        Request(spec, (np.array([2**31]),))
    with pytest.raises(TypeError, match="must be an array of int32, got float64"):
        Request(spec, ([1.5],))


def test_joined_requests_are_one_request():
    """The samples of several requests, in order, make the chunks of one request of all of them."""
    spec = batch_spec_of(dlrm())
    requests = [Request(spec, clicks(samples)) for samples in (3, 1, 5)]
    joined = Request.joined(requests)
    assert joined.num_samples == 9
    joined.check()
    (chunk,) = joined.chunks()
    parts = [next(iter(request.chunks())) for request in requests]
    dense = [part.arrays[0][: part.stop] for part in parts]
    np.testing.assert_array_equal(chunk.arrays[0][:9], np.concatenate(dense))
    lengths = [part.arrays[2].reshape(3, -1)[:, : part.stop] for part in parts]
    np.testing.assert_array_equal(
        chunk.arrays[2].reshape(3, -1)[:, :9], np.concatenate(lengths, axis=1)
    )
    assert Request.joined(requests[:1]) is requests[0]


def test_a_checked_request_has_no_wrong_sample():
    dense, features = clicks(4)
    values = np.array(features.values)
    values[0] = 50
    wrong = jaxrec.KeyedJaggedArray(
        values, np.ones_like(features.lengths), keys=features.keys,
        capacities=features.capacities, strides=features.strides,
    )  # fmt: skip
    request = Request(batch_spec_of(dlrm()), (dense, wrong))
    with pytest.raises(ValueError, match="feature 'user', sample 0: id 50 is outside"):
        request.check()


def batch_spec_of(case):
    function = type(case.model).__call__
    return batch_spec(case.model, function, case.batch(20), None, (16,), None)
