"""Quantizers, unique ids, and beams over the items that exist, against plain NumPy."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.nn.semantic_ids import RQVAE, ItemTrie, ResidualKMeans, SemanticIds, beam_search
from jaxrec.nn.semantic_ids.clustering import balance, cluster_step, nearest
from tests.fuzz import max_examples

pytestmark = pytest.mark.usefixtures("compiled_fast")


@pytest.fixture(scope="module")
def vectors():
    """Vectors around 8 points, which 8 codes of a first level should find."""
    rng = np.random.default_rng(0)
    points = 20 * np.eye(8)
    of_points = np.repeat(np.arange(8), [4, 8, 12, 16, 24, 32, 40, 64])
    return (points[of_points] + rng.standard_normal((200, 8))).astype(np.float32), of_points


# -- quantizers ------------------------------------------------------------------------------------


def test_kmeans_finds_clusters_and_codes_are_nearest_centers(vectors):
    array, of_points = vectors
    quantizer = ResidualKMeans(2, 8, num_steps=10).fit(array)
    codes = quantizer.encode(array)
    # Each point of the data has a code of its own.
    pairs = {*zip(of_points.tolist(), codes[:, 0].tolist(), strict=True)}
    assert len(pairs) == 8
    left = array.astype(np.float64)
    for level in range(2):
        book = quantizer.codebooks[level].astype(np.float64)
        distances = np.square(left[:, None] - book).sum(-1)
        assert (codes[:, level] == distances.argmin(1)).all()
        # Lloyd's steps have converged on the first level: centers are means.
        if level == 0:
            means = [left[codes[:, 0] == code].mean(0) for code in range(8)]
            np.testing.assert_allclose(book, means, rtol=1e-5, atol=1e-5)
        left -= book[codes[:, level]]
    np.testing.assert_allclose(quantizer.decode(codes), array - left, rtol=1e-4, atol=1e-4)


def test_kmeans_is_the_same_by_seed_and_over_devices(vectors):
    array, _ = vectors
    one = ResidualKMeans(1, 8, batch_size=100, num_steps=4, seed=3).fit(array)
    again = ResidualKMeans(1, 8, batch_size=100, num_steps=4, seed=3).fit(array)
    np.testing.assert_array_equal(one.codebooks, again.codebooks)
    mesh = jax.make_mesh((8,), ("data",))  # 100 vectors do not divide among 8 devices
    many = ResidualKMeans(1, 8, batch_size=100, num_steps=4, seed=3, mesh=mesh).fit(array)
    np.testing.assert_allclose(many.codebooks, one.codebooks, rtol=1e-4, atol=1e-5)


def test_a_step_is_a_mean_weighed_by_counts_and_fills_empty_clusters():
    vectors = jnp.array([[0.0], [2.0], [100.0], [7.0]])
    weights = jnp.array([1.0, 1.0, 1.0, 0.0])  # the last one is padding
    centers, counts = jnp.array([[1.0], [300.0], [400.0]]), jnp.array([2.0, 0.0, 0.0])
    moved, counts = cluster_step(vectors, weights, centers, counts, jnp.zeros(3))
    # (2 * 1 + 0 + 2 + 100) / 5, and the two farthest vectors.
    np.testing.assert_allclose(moved[:, 0], [104 / 5, 100.0, 0.0], rtol=1e-6)
    assert counts.tolist() == [5.0, 0.0, 0.0]


def test_balanced_codes_are_used_equally(vectors):
    array, _ = vectors
    centers = jnp.asarray(array[::25])
    plain = np.bincount(nearest(jnp.asarray(array), centers, jnp.zeros(8)), minlength=8)
    prices = balance(jnp.asarray(array), centers, jnp.zeros(8), num_steps=200)
    counts = np.bincount(nearest(jnp.asarray(array), centers, prices), minlength=8)
    assert plain.max() > 40
    assert counts.min() >= 24
    assert counts.max() <= 26
    quantizer = ResidualKMeans(1, 8, balanced=True, num_steps=3).fit(array)
    fitted = np.bincount(quantizer.encode(array)[:, 0], minlength=8)
    assert fitted.min() >= 23
    assert fitted.max() <= 27


def test_rqvae_learns_and_revives_dead_codes(vectors):
    array, _ = vectors
    options = {"code_dim": 4, "hidden_sizes": (16,), "batch_size": 64, "num_steps": 150}
    quantizer = RQVAE(2, 16, revive_after=10, learning_rate=5e-3, **options).fit(array)
    codes = quantizer.encode(array)
    error = np.square(quantizer.decode(codes) - array).mean() / array.var(axis=0).mean()
    assert error < 0.2
    assert quantizer.losses[-10:].mean() < 0.5 * quantizer.losses[:3].mean()
    assert quantizer.revived > 0
    assert len(np.unique(codes[:, 0])) >= 8
    again = RQVAE(2, 16, revive_after=10, learning_rate=5e-3, **options).fit(array)
    np.testing.assert_array_equal(codes, again.encode(array))


def test_rqvae_loss_is_its_formula(vectors):
    array = jnp.asarray(vectors[0][:16])
    quantizer = RQVAE(2, 16, code_dim=3, hidden_sizes=(5,), num_steps=1).fit(vectors[0])
    network = quantizer._network
    hidden = np.asarray(network.encoder(array), np.float64)
    codes = np.asarray(network.quantize(network.encoder(array))[0])
    books, total, left = quantizer.codebooks.astype(np.float64), 0.0, hidden
    for level in range(2):
        center = books[level][codes[:, level]]
        total += 1.25 * np.square(left - center).sum(1)
        left = left - center
    read = network.decoder(jnp.asarray(hidden - left, jnp.float32))
    total += np.square(np.asarray(read, np.float64) - np.asarray(array)).sum(1)
    np.testing.assert_allclose(network.loss(array, 0.25)[0], total.mean(), rtol=1e-5)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: ResidualKMeans(1, 500).fit(x), "200 vectors cannot fill codebooks of 500"),
        (lambda x: RQVAE(1, 500).fit(x), "200 vectors cannot fill codebooks of 500"),
        (lambda x: ResidualKMeans(1, 4).fit(x[0]), "must have the shape"),
        (lambda x: ResidualKMeans(1, 4).fit(x.astype(int)), "must be floating-point"),
        (lambda x: ResidualKMeans(1, 4).fit(np.where(x == x[7, 0], np.nan, x)), "row 7"),
        (lambda x: ResidualKMeans(1, 4).encode(x), "call fit"),
        (lambda x: ResidualKMeans(0, 4), "num_levels is 1 or more"),
        (lambda x: ResidualKMeans(1, 4, batch_size=3), "batch_size=3"),
        (lambda x: RQVAE(1, 4, commitment=-1.0), "commitment is 0 or more"),
        (lambda x: RQVAE(1, 4).decode([[0]]), "call fit"),
    ],
)
def test_quantizers_say_what_is_wrong(vectors, make, message):
    with pytest.raises(ValueError, match=message):
        make(vectors[0])


# -- ids -------------------------------------------------------------------------------------------


def test_collisions_are_resolved_reported_and_appended_to(tmp_path):
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 3, (40, 2))
    ids = SemanticIds.of(codes, sizes=(3, 3), items=[f"i{n}" for n in range(40)], last_size=20)
    assert len(np.unique(ids.codes, axis=0)) == 40
    seen = {}
    for row in ids.codes.tolist():  # last codes count from 0 in the order of items
        assert row[2] == seen.get((row[0], row[1]), 0)
        seen[row[0], row[1]] = row[2] + 1
    report = ids.report()
    assert report.collisions == 40 - len(seen)
    assert report.largest_collision == max(seen.values())
    assert report.distinct_share == len(seen) / 40
    shares = np.bincount(codes[:, 0]) / 40
    np.testing.assert_allclose(report.entropy[0], -(shares * np.log2(shares)).sum())
    assert report.used == (1.0, 1.0)
    assert "40 items" in str(report)
    more = ids.append(codes[:3], items=["new", "newer", "newest"])
    np.testing.assert_array_equal(more.codes[:40], ids.codes)
    assert len(np.unique(more.codes, axis=0)) == 43
    assert more.rows(["newer", "i7"]).tolist() == [41, 7]
    more.write(tmp_path / "ids.parquet")
    read = SemanticIds.read(tmp_path / "ids.parquet")
    np.testing.assert_array_equal(read.items, more.items)
    np.testing.assert_array_equal(read.codes, more.codes)
    assert read.sizes == (3, 3, 20)
    assert pq.read_table(tmp_path / "ids.parquet")["codes"][0].as_py() == more.codes[0].tolist()


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SemanticIds.of([[0]] * 3, sizes=(2,), last_size=2), r"3 items have the codes \[0"),
        (lambda: SemanticIds.of([[2]], sizes=(2,)), r"row 0, level 0: code 2 is outside of \[0, 2"),
        (lambda: SemanticIds.of([[0], [1]], sizes=(2,), items=[5, 5]), "item .*5.* occurs 2 times"),
        (lambda: SemanticIds.of([[0], [1]], sizes=(2,), items=[5]), "2 rows of codes"),
        (lambda: SemanticIds.of([[0]], sizes=(2,), items=[0.5]), "integers or strings"),
        (lambda: SemanticIds.of([[0.0]], sizes=(2,)), "codes must be integers"),
        (lambda: SemanticIds.of([0], sizes=(2,)), "must have the shape"),
        (lambda: SemanticIds(np.arange(2), np.zeros((2, 1), np.int32), (2,)), "several items"),
        (lambda: SemanticIds.of([[0]], sizes=(2,)).append([[1]], items=["a"]), "give one type"),
        (
            lambda: ItemTrie.of(SemanticIds.of([[0], [1]], sizes=(2,)), capacity=1),
            "do not fit a capacity of 1",
        ),
        (
            lambda: ItemTrie.of(SemanticIds.of([[0], [1]], sizes=(2,)), widths=(1, 1)),
            "level 0: 2 codes follow",
        ),
        (
            lambda: ItemTrie.of(SemanticIds.of([[0], [1]], sizes=(2,)), widths=(2,)),
            "widths has 1 numbers; give one for each of the 2 levels",
        ),
        (
            lambda: SemanticIds.of([[0]], sizes=(2,), items=np.array([2**63], np.uint64)),
            "item 9223372036854775808 is too large",
        ),
        (lambda: SemanticIds.of([[0]], sizes=(2,)).rows([2**63]), "is too large"),
    ],
)
def test_ids_say_what_is_wrong(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_unknown_items_and_files_are_refused(tmp_path):
    ids = SemanticIds.of([[0], [1]], sizes=(2,))
    with pytest.raises(KeyError, match="item 7 has no semantic id"):
        ids.rows([0, 7])
    large = SemanticIds.of([[0]], sizes=(2,), items=[2**60])
    assert large.rows(np.array([2**60], np.uint64)).tolist() == [0]
    with pytest.raises(KeyError, match="item 1152921504606846977 has no"):
        large.rows(np.array([2**60 + 1], np.uint64))
    pq.write_table(pa.table({"item": [1]}), tmp_path / "other.parquet")
    with pytest.raises(ValueError, match="is not a file of"):
        SemanticIds.read(tmp_path / "other.parquet")


# -- beams -----------------------------------------------------------------------------------------

SIZES, ROWS = (3, 4, 3), 2


def search_plainly(codes, scores, row, beam_size, k, diversity, excluded):
    """The beam search of one user in plain Python: items and scores, the best first."""
    allowed = [item for item in range(len(codes)) if item not in excluded]
    beams = [((), 0.0)]
    for level in range(3):
        grown = []
        for prefix, score in beams:
            children = sorted({int(codes[i][level]) for i in allowed
                               if tuple(codes[i][:level]) == prefix})  # fmt: skip
            of_children = [
                (score + float(scores[row, level, sum(prefix), c]), (*prefix, c)) for c in children
            ]
            of_children.sort(key=lambda x: -x[0])
            grown += [(x[0] - diversity * rank, x) for rank, x in enumerate(of_children)]
        grown.sort(key=lambda x: -x[0])
        beams = [(x[1], x[0]) for _, x in grown[: beam_size if level < 2 else k]]
    beams.sort(key=lambda x: -x[1])
    items = {tuple(row): item for item, row in enumerate(codes.tolist())}
    return [items[prefix] for prefix, _ in beams], [score for _, score in beams]


@pytest.fixture(scope="module")
def search():
    """A compiled search whose log-probabilities depend on the sum of the codes before."""

    def run(trie, scores, excluded, beam_size, k, diversity):
        def step(level, codes, total):
            total = total + (codes if level else 0)
            rows = jnp.arange(ROWS)[:, None]
            return scores[rows, level, total][..., : SIZES[level]], total

        return beam_search(
            trie, step, jnp.zeros((ROWS, 1), jnp.int32), rows=ROWS, k=k, beam_size=beam_size,
            diversity=diversity, excluded=excluded,
        )  # fmt: skip

    return jax.jit(run, static_argnames=("beam_size", "k", "diversity"))


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("beam_size", "k", "diversity"), [(36, 36, 0.0), (4, 3, 0.0), (4, 4, 0.7)],
    ids=["all", "beam", "diverse"],
)  # fmt: skip
def test_beams_are_those_of_a_plain_search(search, beam_size, k, diversity):
    every = np.array([*itertools.product(*map(range, SIZES))])

    @given(st.integers(0, 2**31), st.integers(1, 36), st.integers(0, 6))
    @settings(max_examples=max_examples(15), deadline=None)
    def check(seed, count, num_excluded):
        rng = np.random.default_rng(seed)
        codes = rng.permutation(every)[:count].astype(np.int32)
        ids = SemanticIds(np.arange(count), codes, SIZES)
        trie = ItemTrie.of(ids, capacity=36, widths=SIZES)
        scores = rng.standard_normal((ROWS, 3, 8, 4)).astype(np.float32)
        # Some are no items: those of -1, of rows that are free, and past the capacity.
        ends = [40, count, count, count, 40, count]
        excluded = rng.integers(-1, ends, (ROWS, 6)).astype(np.int32)
        excluded[:, num_excluded:] = -1
        found = search(trie, scores, excluded, beam_size, k, diversity)
        for row in range(ROWS):
            gone = {*excluded[row].tolist()}
            items, of_items = search_plainly(codes, scores, row, beam_size, k, diversity, gone)
            got = np.asarray(found.items[row])
            assert got[: len(items)].tolist() == items
            assert (got[len(items) :] == -1).all()
            np.testing.assert_allclose(
                found.scores[row][: len(items)], of_items, rtol=1e-5, atol=1e-5
            )
            assert np.isneginf(found.scores[row][len(items) :]).all()
            if beam_size == 36:  # the exact best of all items, without a search
                totals = [
                    sum(scores[row, x, codes[i, :x].sum(), codes[i, x]] for x in range(3))
                    for i in range(count)
                ]
                rest = [i for i in np.argsort(totals)[::-1].tolist() if i not in gone]
                assert items == rest

    check()


def test_searches_refuse_numbers_and_show_scores_that_are_not_finite(search):
    trie = ItemTrie.of(SemanticIds(np.arange(2), np.array([[0, 0, 0], [2, 1, 1]]), SIZES),
                       capacity=36, widths=SIZES)  # fmt: skip
    scores, none = np.full((ROWS, 3, 8, 4), np.nan, np.float32), np.full((ROWS, 6), -1, np.int32)
    found = search(trie, scores, none, 4, 3, 0.0)
    assert (np.asarray(found.items) == -1).all()
    assert np.isnan(found.scores[:, 0]).all()
    with pytest.raises(ValueError, match="k must be from 1 to beam_size=4, got 5"):
        search(trie, scores, none, 4, 5, 0.0)
    with pytest.raises(ValueError, match="diversity is 0 or more"):
        search(trie, scores, none, 4, 3, -1.0)
