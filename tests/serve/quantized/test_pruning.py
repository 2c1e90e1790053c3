"""Rules of pruning: which rows remain, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from flax import nnx

import jaxrec
from jaxrec.embed import rows as row_access
from jaxrec.serve import by_frequency, by_norm, count_ids, quantize

ROWS = np.float32([[3, 4], [0, 1], [0, 0], [-6, 8], [1, 0]])  # norms 5, 1, 0, 10, 1


def make_model() -> jaxrec.EmbeddingBagCollection:
    config = jaxrec.EmbeddingBagConfig("user", *ROWS.shape, feature_names=("user", "friends"))
    model = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
    model.load_table("user", ROWS)
    return model


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        (by_norm(share=0.0), [0, 1, 2, 3, 4]),
        (by_norm(share=0.39), [0, 1, 3, 4]),
        (by_norm(share=0.4), [0, 1, 3]),  # of rows 1 and 4, which are equal, the later one goes
        (by_norm(share=1.0), []),
        (by_norm(threshold=0), [0, 1, 3, 4]),
        (by_norm(threshold=1), [0, 3]),
        (by_frequency([4, 0, 2, 2, 0], share=0.6), [0, 2]),
        (by_frequency([4, 0, 2, 2, 0], threshold=0), [0, 2, 3]),
    ],
    ids=[
        "none", "rounded_down", "ties", "all", "zero_rows", "small_rows", "rarest", "unused",
    ],
)  # fmt: skip
def test_rows_that_remain(rule, kept, monkeypatch):
    monkeypatch.setattr(row_access, "_PART_BYTES", 2 * 4 * 2)  # parts of two rows
    small = quantize(make_model(), "float32", prune={"user": rule})
    expected = np.zeros_like(ROWS)
    expected[kept] = ROWS[kept]
    np.testing.assert_array_equal(small.table("user"), expected)


def test_counts():
    batches = [
        (jaxrec.KeyedJaggedArray.from_lists({"user": [[1, 1], []], "friends": [[3], [1, 0]]}), 7),
        {"features": jaxrec.KeyedJaggedArray.from_lists({"user": [[4]], "other": [[9]]})},
    ]
    assert count_ids(make_model(), batches)["user"].tolist() == [1, 3, 0, 1, 1]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: by_norm(), ValueError, "got share=None and threshold=None"),
        (lambda: by_norm(share=0.1, threshold=1), ValueError, "share= or threshold="),
        (lambda: by_norm(share=30), ValueError, "share=30 is not between 0 and 1"),
        (lambda: by_norm(share=float("nan")), ValueError, "share=nan is not between 0 and 1"),
        (lambda: by_norm(threshold=-1), ValueError, "threshold=-1 is not 0 or more"),
        (lambda: by_frequency([[1]], share=0.5), ValueError, r"got an array of int64 .* \[1, 1\]"),
        (lambda: by_frequency([1, -1], share=0.5), ValueError, "numbers of 0 or more"),
        (lambda: by_frequency(["a"], share=0.5), ValueError, "numbers of 0 or more"),
        (
            lambda: quantize(make_model(), prune={"user": by_frequency([1, 2], share=0.5)}),
            ValueError,
            r"table 'user' has 5 rows, but by_frequency got counts of shape \[2\]",
        ),
        (
            lambda: quantize(make_model(), prune={"item": by_norm(share=0.5)}),
            KeyError,
            "prune has a rule for 'item', but no table is named so; there are 'user'",
        ),
        (
            lambda: count_ids(
                make_model(), [jaxrec.KeyedJaggedArray.from_lists({"user": [[5]]})]
            ),
            ValueError,
            "feature 'user' has ids from 5 to 5, but table 'user' has 5 rows",
        ),
    ],
    ids=[
        "neither", "both", "percent", "nan", "negative", "axes", "negative_counts", "no_numbers",
        "counts_of_other_rows", "table", "id",
    ],
)  # fmt: skip
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_row_with_a_nan_is_named():
    model = make_model()
    model.load_rows("user", [3], np.float32([[1, np.nan]]))
    with pytest.raises(ValueError, match="table 'user', row 3, column 1 is nan; int8 rows"):
        quantize(model, prune={"user": by_norm(share=0.4)})
