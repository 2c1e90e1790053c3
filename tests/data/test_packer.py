"""Batches of rows of ids whose shapes seldom change."""

from __future__ import annotations

import numpy as np
import pytest

from jaxrec.data import Packer, usual_capacity
from jaxrec.ragged import hash_ids


def test_capacities_only_grow():
    pack = Packer(("a", "b"), {"a": 20})
    first = pack(a=[[1], [2, 3]], b=np.array([[4, 5], [6, 7]]))
    assert first.capacity_per_key == {"a": 24, "b": 4}
    assert first["a"].to_lists() == [[1], [2, 3]]
    assert first["b"].to_lists() == [[4, 5], [6, 7]]
    second = pack(a=[list(range(30)), []])
    assert second.capacity_per_key == {"a": 32, "b": 8}
    assert second["b"].to_lists() == [[], []]
    assert pack(a=[[1]], b=[[2]]).capacity_per_key == {"a": 32, "b": 8}


def test_all_samples_in_order():
    pack = Packer(("a", "b"))
    rows, matrix = [[1], [], [2, 3], [4], [5]], np.arange(10).reshape(5, 2)
    found = list(pack.batches(2, a=rows, b=matrix))
    assert [x["a"].to_lists() for x, _ in found] == [[[1], []], [[2, 3], [4]], [[5], []]]
    assert [weights.tolist() for _, weights in found] == [[1, 1], [1, 1], [1, 0]]
    assert found[2].batch["b"].to_lists() == [[8, 9], []]
    assert {x.capacities for x, _ in found} == {(8, 4)}  # one shape, and no padding in the matrix
    assert list(pack.batches(2, a=[])) == []


def test_what_is_no_feature():
    with pytest.raises(ValueError, match=r"are \('a',\), got \['c'\]"):
        Packer(("a",))(c=[[1]])
    with pytest.raises(ValueError, match="different numbers of samples"):
        Packer(("a", "b"))(a=[[1]], b=[[1], [2]])


def test_usual_capacity_holds_nearly_every_batch():
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.zipf(1.8, 5000), 50)
    room = usual_capacity(lengths, 64)
    sums = [rng.choice(lengths, 64).sum() for _ in range(1000)]
    assert np.mean(np.array(sums) <= room) > 0.99
    assert room < 2 * 64 * lengths.mean()


def test_raw_ids():
    pack = Packer(("a", "b"), id_bits=64)
    batch = pack(a=[[2**60], [-7, 2**64 - 2]], b=[["x"], []])
    assert batch.values.dtype == np.int64
    assert batch["a"].to_lists() == [[2**60], [-7, -2]]
    assert batch["b"].to_lists()[0] == [int(hash_ids(["x"], None).view(np.int64)[0])]
    (padded,) = pack.batches(3, a=[[2**60]], b=[["x"]])
    assert padded.batch["a"].to_lists() == [[2**60], [], []]
    with pytest.raises(ValueError, match="does not fit int32"):
        Packer(("a",))(a=[[2**60]])
