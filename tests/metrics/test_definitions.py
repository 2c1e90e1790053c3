from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec import metrics
from jaxrec.metrics.binned import Bins
from tests.metrics import batches as samples
from tests.metrics.oracle import DEFINITIONS, gauc

BATCHES, BATCH = 4, 40


# Of no samples they are 0; other metrics have no value.
TOTALS = ("sum_weights", "weighted_sum_predictions", "num_positive_samples", "uauc_num_users")


def extra(metric, sessions):
    return {name: sessions for name in metric.required}


@pytest.mark.parametrize("case", DEFINITIONS)
def test_lifetime_and_window(case):
    kind, arguments, like, expected = DEFINITIONS[case]
    columns = samples.make(like, BATCHES, BATCH)
    # Samples of weight 0 take no room: just enough for the last two batches of either task.
    last_two = int((columns[2][-2:] > 0).sum(axis=(0, 2)).max())
    metric = kind(tasks=2, window=last_two, **arguments)
    update, state = jax.jit(metric.update), metric.init()

    def updated(state, predictions, labels, weights, sessions):
        return update(state, predictions, labels, weights, **extra(metric, sessions))

    padding = updated(state, *(x[0] for x in columns[:2]), 0 * columns[2][0], columns[3][0])
    for empty in (state, padding):
        values = metric.compute(empty)
        for name in expected:
            for prefix in ("lifetime", "window"):
                nothing = 0.0 if name in TOTALS else np.nan
                np.testing.assert_array_equal(values[f"{prefix}_{name}"], [nothing, nothing])

    state = padding
    for batch in zip(*columns, strict=True):
        state = updated(state, *batch)
    values = metric.compute(state)
    arity = 4 if like == "sessions" else 3
    for name, definition in expected.items():
        for task in range(2):
            for prefix, start in (("lifetime", 0), ("window", 2)):
                real = samples.real(columns, task, start, BATCHES)
                wanted = definition([batch[:arity] for batch in real])
                got = values[f"{prefix}_{name}"][task]
                assert got == pytest.approx(wanted, rel=2e-5, nan_ok=True), (name, task, prefix)


def test_several_groups():
    columns = samples.make("sessions", 1, 200)
    predictions, labels, weights, _ = (x[0] for x in columns)
    groups = np.random.default_rng(1).integers(0, 3, (2, 200)).astype(np.int32)
    metric = metrics.SegmentedNormalizedEntropy(tasks=2, num_groups=4, window=None)
    state = jax.jit(metric.update)(metric.init(), predictions, labels, weights, groups=groups)
    got = metric.compute(state)["lifetime_segmented_ne"]
    assert got.shape == (2, 4)
    ne = DEFINITIONS["ne"][3]["ne"]
    for task in range(2):
        for group in range(3):
            kept = (groups[task] == group) & (weights[task] > 0)
            batch = tuple(x[task][kept].astype(np.float64) for x in (predictions, labels, weights))
            assert got[task, group] == pytest.approx(ne([batch]), rel=2e-5)
        assert np.isnan(got[task, 3])


@pytest.mark.parametrize("group", [-1, 4], ids=["below", "above"])
def test_groups_outside_are_reported(group):
    metric = metrics.SegmentedNormalizedEntropy(num_groups=4)
    p = jnp.full(3, 0.5)
    state = metric.update(metric.init(), p, p, groups=jnp.array([0, group, 3]))
    with pytest.raises(ValueError, match=r"1 samples have a number of 'groups' that is not in \[0"):
        metric.compute(state)
    # With weight 0 they are padding.
    state = metric.update(
        metric.init(), p, p, jnp.array([1.0, 0, 1]), groups=jnp.array([0, group, 3])
    )
    assert np.isfinite(metric.compute(state)["lifetime_segmented_ne"][0, [0, 3]]).all()


def test_multiclass_recall():
    rng = np.random.default_rng(2)
    scores = rng.integers(0, 5, (1, 60, 4)).astype(np.float32)
    labels = rng.integers(0, 4, (1, 60)).astype(np.float32)
    weights = rng.random((1, 60)).astype(np.float32)
    metric = metrics.MulticlassRecall(num_classes=4, window=None)
    state = jax.jit(metric.update)(metric.init(), scores, labels, weights)
    got = metric.compute(state)["lifetime_multiclass_recall"][0]
    order = np.argsort(-scores[0], axis=1, kind="stable")
    for k in range(4):
        found = (order[:, : k + 1] == labels[0][:, None]).any(axis=1)
        assert got[k] == pytest.approx((weights[0] * found).sum() / weights.sum(), rel=1e-5)
    assert got[-1] == pytest.approx(1)
    theirs = metrics.MulticlassRecall(num_classes=4, window=None, compat="torchrec")
    stray = theirs.update(theirs.init(), scores, labels * 0 + 7, weights)
    assert theirs.compute(stray)["lifetime_multiclass_recall"].tolist() == [[0, 0, 0, 0]]


@pytest.mark.parametrize(
    "metric",
    [
        metrics.ServingNormalizedEntropy(tasks=2),
        metrics.ServingCalibration(tasks=2),
        metrics.ServingLoss(tasks=2, tensor="loss"),
    ],
    ids=lambda metric: type(metric).__name__,
)
def test_serving_metrics_count_samples(metric):
    columns = samples.make("clicks", 3, 20)
    update, state = jax.jit(metric.update), metric.init()
    for predictions, labels, weights, loss in zip(*columns, strict=True):
        state = update(state, predictions, labels, weights, **extra(metric, loss))
    expected = (columns[2] > 0).sum(axis=(0, 2))
    np.testing.assert_array_equal(metric.compute(state)["total_examples"], expected)


def test_multi_label_precision():
    rng = np.random.default_rng(3)
    taken, truth = rng.random((2, 2, 30, 3)) < 0.4
    taken[1, :, 2] = False
    weights = rng.integers(0, 3, (2, 30)).astype(np.float32)
    for compat, nothing in ((None, np.nan), ("torchrec", 0.0)):
        metric = metrics.MultiLabelPrecision(tasks=2, num_labels=3, compat=compat)
        codes = metrics.label_codes(taken), metrics.label_codes(truth)
        value = metric.compute(metric.update(metric.init(), *codes, weights))
        weighted = weights[..., None] * taken
        expected = (weighted * truth).sum(axis=1) / weighted.sum(axis=1).clip(1e-9)
        expected[1, 2] = nothing
        for prefix in ("lifetime", "window"):
            np.testing.assert_allclose(value[f"{prefix}_multi_label_precision"], expected)


def test_labels_are_coded_from_the_lowest_bit():
    codes = metrics.label_codes(np.eye(24, dtype=bool))
    np.testing.assert_array_equal(codes, 2 ** np.arange(24))
    with pytest.raises(ValueError, match="up to 24 labels, got 25"):
        metrics.label_codes(np.zeros((1, 25), bool))


def test_session_pairs_without_weights_and_their_number():
    p, y, w, s = (x[0] for x in samples.make("sessions", 1, 40))
    metric = metrics.SessionPairwiseAUC(tasks=2, coverage=True, labels_are_ranks=True)
    values = metric.compute(jax.jit(metric.update)(metric.init(), p, y, w, session=s))
    straight = metrics.SessionPairwiseAUC(tasks=2)
    opposite = straight.compute(jax.jit(straight.update)(straight.init(), p, y, w, session=s))
    name = "lifetime_session_pairwise_auc"
    np.testing.assert_allclose(values[name], 1 - opposite[name], rtol=1e-6)
    for task in range(2):
        i, j = np.triu_indices(40, 1)
        pair = (w[task][i] * w[task][j] > 0) & (s[task][i] == s[task][j])
        pair &= y[task][i] != y[task][j]
        assert values["lifetime_valid_pairs_per_batch"][task] == pair.sum()
        members = np.union1d(i[pair], j[pair])
        assert values["window_effective_training_examples_per_batch"][task] == len(members)
    alone = metrics.SessionPairwiseAUC(compat="torchrec", window=None)
    assert alone.compute(alone.init())[name] == 0.5


def test_short_sessions_keep_their_digits():
    """Differences of sums over the whole batch would be off by thousandths of these areas."""
    rng = np.random.default_rng(4)
    p, w = rng.random((2, 4096)).astype(np.float32)
    y = (rng.random(4096) < 0.5).astype(np.float32)
    s = np.arange(4096, dtype=np.int32) // 8
    w[:2048] *= 1000
    metric = metrics.GroupedAUC(window=None)
    state = jax.jit(metric.update)(metric.init(), p, y, w, session=s)
    total, size, _ = gauc(*(x.astype(np.float64) for x in (p, y, w)), s)
    got = metric.compute(state)["lifetime_gauc"].item()
    assert got == pytest.approx(total / size, rel=1e-6)


def test_missing_labels_are_counted():
    labels = jnp.array([1.0, jnp.nan, jnp.nan, 0.0])
    weights = jnp.array([1.0, 2.0, 0.0, 1.0])
    for compat, expected in ((None, 1.0), ("torchrec", 2.0)):
        metric = metrics.NumMissingLabels(window=None, compat=compat)
        state = metric.update(metric.init(), labels * 0, labels, weights)
        assert metric.compute(state)["lifetime_num_missing_labels"] == expected


def test_ndcg_of_negative_tasks():
    p, y, s = jnp.array([[0.9, 0.2]] * 2), jnp.array([[0.0, 1.0]] * 2), jnp.zeros(2, jnp.int32)
    metric = metrics.NDCG(tasks=2, window=None, negative_tasks=(False, True))
    values = metric.compute(jax.jit(metric.update)(metric.init(), p, y, session=s))["lifetime_ndcg"]
    turned = metrics.NDCG(window=None)
    state = jax.jit(turned.update)(turned.init(), 1 - p[0], 1 - y[0], session=s)
    expected = turned.compute(state)
    assert values[1] == expected["lifetime_ndcg"][0]
    assert values[0] == pytest.approx(1 / np.log2(3))


def test_scalar_and_output():
    scalar = metrics.ScalarMetric(window=2)
    theirs = metrics.ScalarMetric(window=2, compat="torchrec")
    output = metrics.OutputMetric(outputs=("latest_imp",))
    states = [metric.init() for metric in (scalar, theirs, output)]
    assert np.isnan(output.compute(states[2])["output_latest_imp"]).all()
    for number in (1.0, 2.0, 6.0):
        x = jnp.full(1, number)
        states = [
            scalar.update(states[0], x, x),
            theirs.update(states[1], x, x),
            output.update(states[2], x, x, latest_imp=x + 1),
        ]
    assert scalar.compute(states[0]) == {"lifetime_scalar": 3.0, "window_scalar": 4.0}
    assert theirs.compute(states[1]) == {"lifetime_scalar": 6.0, "window_scalar": 4.0}
    assert output.compute(states[2]) == {"output_latest_imp": 7.0}
    x = jnp.full(1, 10.0)
    ahead = output.update(states[2], x, x, latest_imp=x)
    assert output.compute(output.merge(ahead, states[2])) == {"output_latest_imp": 10.0}
    assert output.compute(output.merge(states[2], ahead)) == {"output_latest_imp": 10.0}
    same = output.update(states[2], x, x, latest_imp=x * 2)
    assert output.compute(output.merge(same, ahead)) == {"output_latest_imp": 15.0}
    without = metrics.ScalarMetric(window=None, compat="torchrec")
    with pytest.raises(ValueError, match="give it a window"):
        without.compute(without.init())


def test_nan_predictions_show():
    """Divergence must not look like the lack of a value."""
    x = jnp.array([0.5, jnp.nan])
    for compat in (None, "torchrec"):
        for kind in (metrics.Calibration, metrics.NormalizedEntropy, metrics.BinnedAUC):
            if kind is metrics.BinnedAUC and compat:
                continue
            metric = kind(window=None, compat=compat, undefined=7.0)
            value = metric.compute(metric.update(metric.init(), x, jnp.array([0.0, 1.0])))
            assert all(np.isnan(v).all() for v in value.values()), kind
        area = metrics.AUC(window=4, compat=compat)
        state = area.update(area.init(), x, jnp.array([0.0, 1.0]))
        assert np.isnan(area.compute(state)["window_auc"])


def test_saturated_probabilities():
    """In float32 a probability may be exactly 0 or 1; the loss is bounded as in float64."""
    p, y = jnp.array([0.0, 1.0, 1.0, 0.0]), jnp.array([0.0, 1.0, 0.0, 1.0])
    metric = metrics.LogLoss(window=None)
    value = metric.compute(metric.update(metric.init(), p, y))["lifetime_logloss"]
    assert value == pytest.approx(-np.log(1e-12) / 2, rel=1e-6)


WRONG = {
    "tasks": (lambda: metrics.Calibration(tasks=0), "tasks=0 must be 1 or more"),
    "compat": (lambda: metrics.Calibration(compat="fbgemm"), "must be None or 'torchrec'"),
    "window": (lambda: metrics.Calibration(window=0), "window=0 and max_batches"),
    "max_batches": (lambda: metrics.Calibration(max_batches=0), "max_batches=0 must be 1"),
    "coefficient": (
        lambda: metrics.RecalibratedCalibration(coefficient=0.0),
        "coefficient=0.0 must be above 0",
    ),
    "num_groups": (lambda: metrics.SegmentedNormalizedEntropy(num_groups=0), "num_groups=0"),
    "num_classes": (lambda: metrics.MulticlassRecall(num_classes=0), "num_classes=0"),
    "target": (lambda: metrics.HindsightTargetPR(target_precision=0.0), "must be in"),
    "top": (lambda: metrics.SessionRecall(top=0), "top=0 must be 1 or more"),
    "labels": (lambda: metrics.MultiLabelPrecision(num_labels=25), "must be from 1 to 24"),
    "user_compat": (lambda: metrics.UserAUC(compat="torchrec"), "take GroupedAUC"),
    "k": (lambda: metrics.NDCG(k=0), "k=0 must be 1 or more"),
    "negative_tasks": (lambda: metrics.NDCG(negative_tasks=(True, True)), "an entry for each task"),
    "sample_window": (lambda: metrics.AUC(window=0), "window=0 must be 1 or more"),
    "bins": (lambda: Bins(low=1.0, high=1.0), "must be 1 or more and low"),
    "spacing": (lambda: Bins(spacing="log"), "must be 'logit' or 'linear'"),
    "binned_groups": (lambda: metrics.BinnedAUC(num_groups=2), "groups must name them"),
    "binned_compat": (lambda: metrics.BinnedRAUC(compat="torchrec"), "take RAUC"),
}


@pytest.mark.every_case
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("make", "message"), WRONG.values(), ids=WRONG)
def test_wrong_options(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.usefixtures("unchecked")
def test_wrong_batches():
    metric = metrics.NDCG(tasks=2)
    good, sessions = jnp.zeros((2, 3)), jnp.zeros(3, jnp.int32)
    for arrays, message in (
        ((jnp.zeros((3, 2)), jnp.zeros((3, 2))), r"takes labels of \[2, batch\] and predictions"),
        ((good, jnp.zeros((2, 4))), r"got \(2, 4\) and \(2, 3\)"),
        ((good, good, jnp.zeros(2)), r"weights must be \(2, 3\) or \(3,\), got \(2,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            metric.update(metric.init(), *arrays, session=sessions)
    with pytest.raises(ValueError, match="NDCG needs 'session'"):
        metric.update(metric.init(), good, good)
    with pytest.raises(ValueError, match="4294967296, which does not fit 32 bits"):
        metric.update(metric.init(), good, good, session=np.array([0, 1, 2**32]))
    classes = metrics.MulticlassRecall(num_classes=3)
    with pytest.raises(ValueError, match=r"predictions of \[1, batch, 3\]"):
        classes.update(classes.init(), jnp.zeros((1, 5, 2)), jnp.zeros((1, 5)))
