"""Input that no metric can take: an error that names it, or NaN where values are not known."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec import metrics
from jaxrec.metrics import auc, average_precision, rank_metrics, regression_auc
from jaxrec.metrics.binned import Bins
from tests.metrics.oracle import DEFINITIONS

P, Y = np.array([0.25, 0.75, 0.5], np.float32), np.array([0.0, 1.0, 1.0], np.float32)
SESSION = np.zeros(3, np.int32)
NAN = float("nan")

# One of each metric, and more where options matter; no definition where other tests have it.
METRICS = {
    case: kind(max_batches=2, **options) for case, (kind, options, _, _) in DEFINITIONS.items()
} | {
    "serving_ne": metrics.ServingNormalizedEntropy(),
    "segmented_ne": metrics.SegmentedNormalizedEntropy(num_groups=1),
    "serving_calibration": metrics.ServingCalibration(),
    "num_missing_labels": metrics.NumMissingLabels(),
    "multiclass_recall": metrics.MulticlassRecall(num_classes=2),
    "multi_label_precision": metrics.MultiLabelPrecision(num_labels=2),
    "coverage": metrics.SessionPairwiseAUC(coverage=True),
    "auc": metrics.AUC(window=8, groups="groups"),
    "auprc": metrics.AUPRC(window=8, groups="groups"),
    "rauc": metrics.RAUC(window=8, groups="groups"),
    "binned_auc": metrics.BinnedAUC(bins=Bins(count=8), groups="groups"),
    "binned_auprc": metrics.BinnedAUPRC(bins=Bins(count=8), groups="groups"),
    "binned_rauc": metrics.BinnedRAUC(bins=Bins(count=8), label_bins=Bins(count=8)),
    "scalar": metrics.ScalarMetric(),
    "output": metrics.OutputMetric(outputs=("x",)),
}
COUNTS = ("total_examples",)


@functools.cache
def compiled(name):
    """The compiled update, from no samples on."""
    metric = METRICS[name]
    return functools.partial(jax.jit(metric.update), metric.init())


def inputs(metric, count):
    return {name: np.zeros(count, np.int32) for name in metric.required}


def shaped(metric, predictions):
    """The predictions, of each class alike where there are classes."""
    shape = predictions.shape + metric.trailing
    return np.broadcast_to(predictions.reshape(-1, *(1 for _ in metric.trailing)), shape)


def evaluated(name, *batch):
    metric = METRICS[name]
    state = compiled(name)(*batch, **inputs(metric, len(batch[1])))
    return {key: x for key, x in metric.compute(state).items() if key not in COUNTS}


def test_every_metric_is_here():
    bases = {metrics.Metric, metrics.SumMetric, metrics.SampleMetric}
    public = {x for x in vars(metrics).values() if isinstance(x, type)}
    assert {x for x in public if issubclass(x, metrics.Metric)} - bases == {
        type(metric) for metric in METRICS.values()
    }


def outside(domain, x, real):
    """Whether a sample that counts is outside, and whether one is NaN."""
    if domain is None:
        return False, False
    inside = [domain.low <= v <= domain.high and not (domain.whole and v % 1) for v in x]
    return (real & ~np.array(inside) & ~np.isnan(x)).any(), (real & np.isnan(x)).any()


NUMBERS = st.sampled_from([0.0, 0.25, 0.5, 1.0] * 4 + [2.0, -1.0, 7.5, NAN])
WEIGHTS = st.sampled_from([0.0, 1.0, 2.0, 0.5] * 4 + [-1.0, NAN, float("inf")])


@pytest.mark.parametrize("name", METRICS)
@settings(max_examples=15)
@given(samples=st.lists(st.tuples(NUMBERS, NUMBERS, WEIGHTS), min_size=4, max_size=4))
def test_right_or_an_error(name, samples):
    """A number outside of its domain is an error, and NaN in the compiled step."""
    metric = METRICS[name]
    p, y, w = np.array(samples, np.float32).T
    real = w != 0
    wrong, missing = np.any(
        [outside(x, v, real) for x, v in zip(metric.domains, (p, y), strict=True)], axis=0
    )
    bad_weight = not (np.isfinite(w) & (w >= 0)).all()
    values = evaluated(name, shaped(metric, p), y, w)
    if wrong or missing or bad_weight:
        broken = [np.isnan(x).all() for x in values.values()]
        assert all(broken) or isinstance(metric, metrics.OutputMetric)
    if wrong or bad_weight:
        message = f"{type(metric).__name__}: (predictions|labels|weights) must be "
        with pytest.raises(ValueError, match=message):
            metric.batch(shaped(metric, p), y, w, inputs(metric, 4))
    elif not missing and name in DEFINITIONS:
        *_, like, definitions = DEFINITIONS[name]
        columns = [x[real].astype(np.float64) for x in (p, y, w)]
        if like == "sessions":
            columns.append(np.zeros(real.sum(), np.int32))
        for key, definition in definitions.items():
            with np.errstate(all="ignore"):
                expected = float(definition([tuple(columns)]))
            expected = expected if np.isfinite(expected) else NAN
            for prefix in ("lifetime", "window"):
                got = values[f"{prefix}_{key}"].item()
                assert got == pytest.approx(expected, rel=1e-5, abs=1e-6, nan_ok=True), key


@pytest.mark.parametrize("name", METRICS)
def test_padding_may_hold_anything(name):
    metric, weights = METRICS[name], np.array([1, 2, 1, 0], np.float32)
    values = []
    for bad_prediction, bad_label in ((0.0, 0.0), (99.0, -3.0), (NAN, NAN)):
        p, y = np.append(Y, bad_prediction), np.append(Y, bad_label)
        values.append(evaluated(name, shaped(metric, p), y, weights))
        metric.batch(shaped(metric, p), y, weights, inputs(metric, 4))
    jax.tree.map(np.testing.assert_array_equal, values, [values[0]] * 3)


@pytest.mark.parametrize("name", METRICS)
def test_no_samples(name):
    metric = METRICS[name]
    nothing = np.zeros(0, np.float32)
    state = metric.init()
    after = metric.update(state, shaped(metric, nothing), nothing, **inputs(metric, 0))
    jax.tree.map(np.testing.assert_array_equal, after, state)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", METRICS)
def test_shapes_and_types(name):
    metric, who = METRICS[name], type(METRICS[name]).__name__
    p, more = shaped(metric, Y), inputs(metric, 3)
    start = metric.init()
    wrong = {
        "labels of": (p[:2], Y, None),
        "predictions of": (p[..., None], Y, None),
        r"weights must be \(1, 3\) or \(3,\), got \(2,\)": (p, Y, np.ones(2)),
        "predictions must be real numbers, got an array of <U": (p.astype(str), Y, None),
        "labels must be real numbers, got an array of object": (p, np.array([None] * 3), None),
        "labels must be real numbers, got an array of complex": (p, Y.astype(complex), None),
        "weights is a masked array": (p, Y, np.ma.masked_array(Y, Y > 0)),
    }
    for message, batch in wrong.items():
        with pytest.raises((TypeError, ValueError), match=f"{who}.*{message}"):
            metric.update(start, *batch, **more)
    for key in metric.whole:
        with pytest.raises(TypeError, match=f"{who}: {key} must be integers, got .* float32"):
            metric.update(start, p, Y, **{key: Y})


MESSAGES = {
    "logits": (
        metrics.NormalizedEntropy(tasks=2),
        (np.array([P, P + 3]), np.array([Y, Y])),
        r"predictions must be between 0 and 1, got 3.25 at \[1, 0\] \(3 of 6 are not\); turn "
        "logits into probabilities by jax.nn.sigmoid",
    ),
    "labels": (
        metrics.AUC(),
        (P, 2 * Y - 1),
        "AUC: labels must be between 0 and 1, got -1.0 at .* turn labels of -1 and 1 into 0 and 1",
    ),
    "soft": (metrics.Accuracy(), (P, P), "Accuracy: labels must be 0 or 1, got 0.25"),
    "gain": (metrics.NDCG(), (P, Y - 1), "NDCG: labels must be 0 or above, got -1.0"),
    "class": (
        metrics.MulticlassRecall(num_classes=2),
        (np.ones((3, 2), np.float32), Y * 2),
        "labels must be whole numbers between 0 and 1|labels must be 0 or 1, got 2.0",
    ),
    "code": (metrics.MultiLabelPrecision(num_labels=2), (Y * 4, Y), "got 4.0 .* by label_codes"),
}


@pytest.mark.parametrize(("metric", "batch", "message"), MESSAGES.values(), ids=MESSAGES)
def test_messages(metric, batch, message):
    more = inputs(metric, 3)
    with pytest.raises(ValueError, match=message):
        metric.update(metric.init(), *batch, **more)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("area", [auc, average_precision, regression_auc])
def test_areas(area):
    name = area.__name__
    for arrays, message in (
        ((P, Y[:2]), rf"{name} takes arrays of one length, .* scores of \(3,\), labels of \(2,\)"),
        ((P, Y, Y[:1]), r"weights of \(1,\)"),
        ((P[None], Y[None]), r"scores of \(1, 3\)"),
        ((P, Y, -Y), f"{name}: weights must be between 0 and .*, got -1.0"),
        ((P, Y, Y * NAN), f"{name}: weights must be between 0 and .*, got nan"),
        ((P, Y * NAN), f"{name}: labels must be .*, got nan"),
        ((P * NAN, Y), f"{name}: 3 of 3 scores are NaN"),
    ):
        with pytest.raises(ValueError, match=message):
            area(*arrays)
    with pytest.raises(TypeError, match=f"{name}: scores must be real numbers, got .* <U1"):
        area(np.array(["a"] * 3), Y)
    assert area(P.tolist(), Y.tolist()) == area(jnp.asarray(P, jnp.bfloat16), jnp.asarray(Y))
    if area is not regression_auc:
        with pytest.raises(ValueError, match=r"got -1.0 at \[0\] .* labels > 0"):
            area(P, 2 * Y - 1)
    assert regression_auc(P, 2 * Y - 1) == regression_auc(P, Y)


@pytest.mark.usefixtures("unchecked")
def test_rank_metrics():
    with pytest.raises(ValueError, match=r"rank_metrics takes scores of .* got \(3,\) and k=10"):
        rank_metrics(P)
    with pytest.raises(TypeError, match="rank_metrics: scores must be real numbers"):
        rank_metrics(np.array([["a", "b"]]))
