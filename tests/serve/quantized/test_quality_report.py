"""Quality reports: errors and scores against NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest
from flax import nnx

import jaxrec
from jaxrec.embed import rows as row_access
from jaxrec.metrics import auc
from jaxrec.serve import by_frequency, quality, quantize

PNG = b"\x89PNG"


class Ranker(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embeddings = jaxrec.EmbeddingBagCollection(
            [
                jaxrec.EmbeddingBagConfig("product", 300, 16, initializer="normal"),
                jaxrec.EmbeddingBagConfig("country", 7, 8, dtype="bfloat16"),
            ],
            rngs=rngs,
        )
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.over = nnx.Linear(24, 1, rngs=rngs)

    def __call__(self, features):
        return 9 * self.over(self.dropout(self.embeddings(features).values))[:, 0]


def make_batches(count: int = 3) -> list:
    rng = np.random.default_rng(0)
    ids = [{"product": rng.integers(300, size=(50, 4)), "country": rng.integers(7, size=(50, 1))}
           for _ in range(count)]  # fmt: skip
    labels = [rng.integers(2, size=50).astype(np.float32) for _ in range(count)]
    features = [jaxrec.KeyedJaggedArray.from_dense(each) for each in ids]
    return list(zip(features, labels, strict=True))


@pytest.fixture(scope="module")
def model() -> Ranker:
    return Ranker(nnx.Rngs(0))


PRUNE = {"product": by_frequency(np.arange(300), share=0.1)}


@pytest.mark.parametrize("prune", [None, PRUNE], ids=["whole", "pruned"])
def test_errors_of_rows(model, prune, monkeypatch):
    monkeypatch.setattr(row_access, "_PART_BYTES", 64 * 16 * 4)  # several parts
    small = quantize(model, "int4", per_table={"country": "int8"}, prune=prune)
    report = quality(model, small)
    assert [table.name for table in report.tables] == ["product", "country"]
    for table in report.tables:
        before, after = (
            np.asarray(each.embeddings.table(table.name), np.float64) for each in (model, small)
        )
        errors = after - before
        assert (table.rows, table.columns) == before.shape
        assert table.rms == pytest.approx(np.sqrt(np.mean(before**2)), rel=1e-6)
        assert table.rms_error == pytest.approx(np.sqrt(np.mean(errors**2)), rel=1e-5)
        assert table.largest_error == pytest.approx(np.abs(errors).max(), rel=1e-5)
        assert table.relative_rms_error == table.rms_error / table.rms
        assert table.bytes_after == small.embeddings.tables.get_value().num_bytes(table.name)
    product, country = report.tables
    assert (product.dtype, country.dtype) == ("int4", "int8")
    assert (product.bytes_before, country.bytes_before) == (300 * 16 * 4, 7 * 8 * 2)
    assert product.pruned_rows == (30 if prune else 0)
    assert report.bytes_before == 300 * 16 * 4 + 7 * 8 * 2
    assert report.bytes_after == product.bytes_after + country.bytes_after
    assert report.before is report.after is report.entropy_change is None
    assert "AUC" not in str(report)


def expected_scores(model: Ranker, weights: np.ndarray) -> tuple[float, float]:
    model = nnx.clone(model)
    model.eval()
    logits = np.concatenate([model(features) for features, _ in make_batches()]).astype(float)
    labels = np.concatenate([labels for _, labels in make_batches()]).astype(float)
    p = 1 / (1 + np.exp(-logits))
    entropy = -(weights * (labels * np.log(p) + (1 - labels) * np.log(1 - p))).sum()
    mean = (weights * labels).sum() / weights.sum()
    base = -weights.sum() * (mean * np.log(mean) + (1 - mean) * np.log(1 - mean))
    return entropy / base, auc(logits, labels, weights)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_scores(model, weighted):
    weights = np.arange(150) % 3 if weighted else np.ones(150)
    batches = [
        (*batch, part) for batch, part in zip(make_batches(), np.split(weights, 3), strict=True)
    ]
    options = {"predict": lambda model, batch: (model(batch[0]), *batch[1:])} if weighted else {}
    small = quantize(model, "int2")
    report = quality(model, small, batches if weighted else make_batches(), **options)
    for scores, each in ((report.before, model), (report.after, small)):
        entropy, area = expected_scores(each, weights.astype(float))
        assert scores.normalized_entropy == pytest.approx(entropy, rel=1e-5)
        assert scores.auc == pytest.approx(area, abs=1e-4)
        assert scores.samples == np.sum(weights > 0)
    expected = report.after.normalized_entropy / report.before.normalized_entropy - 1
    assert report.entropy_change == expected != 0
    assert f"{expected:+.4%}" in str(report)
    assert not model.dropout.deterministic


def test_text(model):
    text = str(quality(model, quantize(model, "int4"), make_batches(1)))
    head, product, country, total, empty, *scores = text.splitlines()
    assert head.split() == [
        "table",
        "dtype",
        "rows",
        "pruned",
        "before",
        "after",
        "rms",
        "error",
        "largest",
    ]
    assert product.split()[:8] == ["product", "int4", "300", "0", "19.20", "kB", "3.60", "kB"]
    assert country.split()[:8] == ["country", "int4", "7", "0", "112", "bytes", "56", "bytes"]
    assert total.split() == ["all", "307", "0", "19.31", "kB", "3.66", "kB", "0.189"]
    assert not empty
    assert scores[0].split() == ["50", "samples", "before", "after", "change"]
    assert {len(line) for line in (head, product, country)} == {len(head)}


@pytest.mark.parametrize("count", [2, 45])
def test_picture(tmp_path, count):
    tables = [jaxrec.EmbeddingBagConfig(f"t{i}", 5, 4) for i in range(count)]
    model = jaxrec.EmbeddingBagCollection(tables, rngs=nnx.Rngs(0))
    path = tmp_path / "quality.png"
    quality(model, quantize(model)).plot(path)
    assert path.read_bytes().startswith(PNG)


def test_a_table_of_zeros():
    model = jaxrec.EmbeddingBagCollection(
        [jaxrec.EmbeddingBagConfig("user", 5, 4)], rngs=nnx.Rngs(0)
    )
    model.load_table("user", np.zeros((5, 4)))
    (table,) = quality(model, quantize(model)).tables
    assert (table.relative_rms_error, table.relative_largest_error) == (0, 0)


def other_model() -> jaxrec.EmbeddingBagCollection:
    return jaxrec.EmbeddingBagCollection(
        [jaxrec.EmbeddingBagConfig("user", 5, 4)], rngs=nnx.Rngs(0)
    )


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda model, small: quality(model, model), TypeError, "'product', .* are not quantized"),
        (
            lambda model, small: quality(other_model(), small),
            ValueError,
            "the models have different tables: table '(user|c)",
        ),
        (
            lambda model, small: quality(model, small, []),
            ValueError,
            "hold no sample",
        ),
        (
            lambda model, small: quality(
                model,
                small,
                make_batches(1),
                predict=lambda model, batch: (model(batch[0]), batch[1], 0 * batch[1]),
            ),
            ValueError,
            "hold no sample",
        ),
        (
            lambda model, small: quality(
                model,
                small,
                [
                    (
                        jaxrec.KeyedJaggedArray.from_lists({"product": [[300]], "country": [[0]]}),
                        np.ones(1),
                    )
                ],
            ),
            ValueError,
            "a logit is NaN",
        ),
    ],
    ids=["not_quantized", "other_tables", "no_batches", "no_weights", "bad_id"],
)
def test_errors(model, call, error, message):
    with pytest.raises(error, match=message):
        call(model, quantize(model))
