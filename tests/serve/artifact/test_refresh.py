"""Exported models that take published versions over."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx

import jaxrec
from jaxrec.serve import by_norm, export, load, quantize
from jaxrec.serve.artifact.refresh import Refresher
from jaxrec.tier import ChangeTracker, VersionError, publish
from tests.serve.models import MODELS
from tests.serve.test_swap import BATCH, Ranker, predict

FORMS = {
    "float32": lambda model: model,
    "int8": quantize,
    "int4": lambda model: quantize(model, "int4"),
    "pruned": lambda model: quantize(model, prune={"item": by_norm(share=0.5)}),
}


def exported(model, path, **options):
    options = {"example": (BATCH,), "batch_sizes": (4,), "platforms": ("cpu",)} | options
    export(model, path, **options)
    return load(path)


@pytest.mark.jax_version
@pytest.mark.parametrize("form", FORMS)
def test_versions_of_rows_and_of_dense_variables(form, tmp_path):
    model, versions = Ranker(1), tmp_path / "versions"
    kept = FORMS[form](Ranker(0))
    served = exported(kept, tmp_path / "model")
    refresher = Refresher(served, versions)
    tracker = ChangeTracker(model, consumers=["publisher"])
    assert refresher.update() == 0
    for version, rows in enumerate([[], [1, 7], [3]], 1):
        for table in ("user", "item"):
            values = np.random.default_rng(version).standard_normal((len(rows), 8))
            model.embeddings.load_rows(table, rows, values.astype(np.float32))
            tracker.mark(table, rows)
        nnx.update(model.over, nnx.state(Ranker(version).over))
        publish(model, versions, tracker=tracker, full_every=10)
        assert (refresher.update(), refresher.version) == (1, version)
        assert served.variables.version == version
        expected = kept
        if form == "float32":
            expected = model
        else:
            jaxrec.serve.swap_tables(expected, model)
        np.testing.assert_allclose(
            served.predict(BATCH), predict(expected, BATCH), rtol=1e-5, atol=1e-5
        )
    late = load(tmp_path / "model")
    assert Refresher(late, versions).update() == 3
    np.testing.assert_array_equal(late.predict(BATCH), served.predict(BATCH))


@pytest.mark.parametrize("name", MODELS)
def test_models_of_the_examples(name, tmp_path):
    """Two towers are published, and one of them is exported."""
    case = MODELS[name]()
    batch = case.batch(9)
    served = exported(
        case.model, tmp_path / "model", function=case.function, example=case.batch(20)
    )
    before = served.predict(*batch)
    arrays = served.variables.arrays
    served.replace({name: jax.numpy.zeros_like(each) for name, each in arrays.items()}, 7)
    assert served.variables.version == 7
    publish(case.model, tmp_path / "versions")
    assert Refresher(served, tmp_path / "versions").update() == 1
    np.testing.assert_allclose(served.predict(*batch), before, rtol=1e-5, atol=1e-5)


def test_predictions_under_way_keep_their_version(tmp_path):
    served = exported(Ranker(0), tmp_path / "model")
    request = jaxrec.serve.artifact.requests.Request(served.manifest.batch, (BATCH,))
    old, before = served.variables, served.predict(BATCH)
    publish(Ranker(1), tmp_path / "versions")
    Refresher(served, tmp_path / "versions").update()
    np.testing.assert_array_equal(served.predict_request(request, old), before)
    assert (served.predict_request(request) != before).any()


def test_a_missing_delta_is_bridged_by_a_full_version(tmp_path):
    model, versions = Ranker(1), tmp_path / "versions"
    served = exported(Ranker(0), tmp_path / "model")
    refresher = Refresher(served, versions)
    tracker = ChangeTracker(model, consumers=["publisher"])
    publish(model, versions, tracker=tracker)
    refresher.update()
    for number in range(2):
        model.embeddings.load_rows("user", [number], np.full((1, 8), 5.0))
        tracker.mark("user", [number])
        publish(model, versions, tracker=tracker, full_every=10)
    (second,) = versions.glob("000000000002-*.json")
    second.unlink()
    before = served.predict(BATCH)
    with pytest.raises(VersionError, match="version 3 does not follow the version before"):
        refresher.update()
    assert (refresher.version, served.variables.version) == (1, 1)
    np.testing.assert_array_equal(served.predict(BATCH), before)
    publish(model, versions)
    assert refresher.update() == 1
    np.testing.assert_allclose(served.predict(BATCH), predict(model, BATCH), atol=1e-5)


class Other(nnx.Module):
    def __init__(self, rows: int = 40, names: tuple[str, ...] = ("user", "item"), width: int = 1):
        rngs = nnx.Rngs(0)
        tables = [
            jaxrec.EmbeddingBagConfig(name, rows if name == "user" else 30, 8) for name in names
        ]
        self.embeddings = jaxrec.EmbeddingBagCollection(tables, rngs=rngs)
        self.history = jaxrec.EmbeddingCollection(
            [jaxrec.EmbeddingConfig("seen", 20, 8)], rngs=rngs
        )
        self.over = nnx.Linear(24, width, rngs=rngs)


def with_nan() -> Ranker:
    model = Ranker(1)
    model.embeddings.load_rows("item", [3], np.full((1, 8), np.nan))
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Other(41), r"'embeddings/user' was published with the shape \[41, 8\], but"),
        (lambda: Other(names=("user",)), "version 1 has no table 'embeddings/item'"),
        (lambda: Other(width=2), r"'over/bias' was published as float32\[2\], but exported as"),
        (with_nan, "table 'item', given row 3, column 0 is nan"),
        (
            lambda: jaxrec.tier.make(Ranker, {"item": jaxrec.tier.Dynamic()}),
            "'embeddings/item' was published with an open vocabulary",
        ),
        (
            lambda: jaxrec.tier.make(Ranker, {"item": jaxrec.tier.Cached(8)}),
            "'embeddings/item' was published with a cache",
        ),
    ],
    ids=["rows", "table", "dense", "nan", "open", "cached"],
)
def test_versions_of_another_model_change_nothing(make, message, tmp_path):
    served = exported(quantize(Ranker(0)), tmp_path / "model")
    before = served.predict(BATCH)
    publish(make(), tmp_path / "versions")
    refresher = Refresher(served, tmp_path / "versions")
    with pytest.raises(ValueError, match=message):
        refresher.update()
    assert refresher.version == 0
    np.testing.assert_array_equal(served.predict(BATCH), before)


def test_replaced_variables_are_those_of_the_model(tmp_path):
    served = exported(Ranker(0), tmp_path / "model")
    with pytest.raises(ValueError, match="the model has no variable 'nothing'"):
        served.replace({"nothing": jax.numpy.zeros(1)}, 1)
    with pytest.raises(ValueError, match=r"'over/bias' is float32\[1\], got float32\[2\]"):
        served.replace({"over/bias": jax.numpy.zeros(2)}, 1)
    assert served.variables.version == 0
