"""Every value that TorchRec reported after each batch of the recorded cases."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxrec import metrics
from jaxrec.metrics import sessions_of
from tests import golden

pytestmark = [pytest.mark.every_case, pytest.mark.jax_version]

NE = metrics.NormalizedEntropy

# What makes our metric the case's; ``{"tasks": 1}`` options are one metric a task.
METRICS = {
    "ne": (NE, {}),
    "ne_window_partial": (NE, {}),
    "ne_default_weights": (NE, {}),
    "ne_logloss": (NE, {}),
    "ne_zero_weights": (NE, {}),
    "ne_zero_weights_allow_missing": (NE, {"undefined": 1e-12}),
    "ne_zero_weights_validate": (NE, {"undefined": 0.0, "skip_empty": True}),
    "ne_extreme_predictions": (NE, {}),
    "ne_positive": (metrics.PositiveNormalizedEntropy, {}),
    "recalibrated_ne": (metrics.RecalibratedNormalizedEntropy, {"coefficient": 0.3}),
    "recalibrated_calibration": (metrics.RecalibratedCalibration, {"coefficient": 0.3}),
    "unweighted_ne": (metrics.UnweightedNormalizedEntropy, {}),
    "cali_free_ne": (metrics.CalibrationFreeNormalizedEntropy, {}),
    "serving_ne": (metrics.ServingNormalizedEntropy, {}),
    "calibration": (metrics.Calibration, {}),
    "calibration_zero_weights": (metrics.Calibration, {}),
    "serving_calibration": (metrics.ServingCalibration, {}),
    "ctr": (metrics.ClickThroughRate, {}),
    "average": (metrics.Average, {}),
    "mse": (metrics.MeanSquaredError, {}),
    "mae": (metrics.MeanAbsoluteError, {}),
    "nmse": (metrics.NormalizedMeanSquaredError, {}),
    "accuracy": (metrics.Accuracy, {}),
    "precision": (metrics.Precision, {}),
    "recall": (metrics.Recall, {}),
    "accuracy_threshold03": (metrics.Accuracy, {"threshold": 0.3}),
    "precision_threshold03": (metrics.Precision, {"threshold": 0.3}),
    "recall_threshold03": (metrics.Recall, {"threshold": 0.3}),
    "multiclass_recall": (metrics.MulticlassRecall, {"num_classes": 5}),
    "xauc": (metrics.XAUC, {}),
    "xauc_ties": (metrics.XAUC, {}),
    # TorchRec counts each update as one sample of this window, so that it held all batches.
    "weighted_avg": (metrics.WeightedAverage, {"window": 768}),
    "sum_weights": (metrics.SumOfWeights, {}),
    "num_positive_samples": (metrics.NumPositives, {}),
    "weighted_sum_predictions": (metrics.WeightedSumOfPredictions, {}),
    "auc": (metrics.AUC, {}),
    "auc_window_partial": (metrics.AUC, {}),
    "auc_single_class": (metrics.AUC, {}),
    "auc_apply_bin": (metrics.AUC, {"label_threshold": 0.039}),
    "auc_grouped": (metrics.AUC, {"groups": "grouping_keys"}),
    "auprc": (metrics.AUPRC, {}),
    "auprc_ties": (metrics.AUPRC, {}),
    "auprc_grouped": (metrics.AUPRC, {"groups": "grouping_keys"}),
    "rauc": (metrics.RAUC, {}),
    "rauc_ties": (metrics.RAUC, {}),
    "rauc_grouped": (metrics.RAUC, {"groups": "grouping_keys"}),
    "ndcg": (metrics.NDCG, {"decreasing": True}),
    "ndcg_exponential": (metrics.NDCG, {"decreasing": True, "exponential_gain": True}),
    "ndcg_increasing": (metrics.NDCG, {}),
    "ndcg_at_3": (metrics.NDCG, {"decreasing": True, "k": 3}),
    "ndcg_no_single": (metrics.NDCG, {"decreasing": True, "drop_single": True}),
    "ndcg_scale_by_weights": (metrics.NDCG, {"decreasing": True, "scale_by_weights": True}),
    "segmented_ne": (
        metrics.SegmentedNormalizedEntropy,
        {"num_groups": 4, "groups": "grouping_keys"},
    ),
    "hindsight_target_pr": (metrics.HindsightTargetPR, {"target_precision": 0.5}),
    "gauc": (metrics.GroupedAUC, {}),
}
# Their tasks differ in what they rank: one metric a task.
SESSION_METRICS = {
    "recall_session": metrics.SessionRecall,
    "precision_session": metrics.SessionPrecision,
}
SESSION_OPTIONS = ({"top": 2}, {"top": 3, "rank_labels": True})

# Reported without a copy: the arrays hold the value after the last batch in every row.
BY_REFERENCE = (
    "sum_weights",
    "num_positive_samples",
    "weighted_sum_predictions",
    "gauc_num_samples",
)

CASES = {name: case for name, case in golden.cases("metrics") if name not in SESSION_METRICS}


def reported(metric, arrays):
    """The values after each update, by name ``[batches, tasks, ...]``."""
    inputs = {name: arrays[name] for name in metric.required if name in arrays}
    if "num_candidates" in arrays:
        batch = arrays["labels"].shape[-1]
        inputs["session"] = np.stack([sessions_of(x, batch) for x in arrays["num_candidates"]])
    elif "session_id" in arrays:
        inputs["session"] = arrays["session_id"]
    update = jax.jit(metric.update)
    state, rows = metric.init(), []
    for i in range(len(arrays["labels"])):
        weights = arrays["weights"][i] if "weights" in arrays else None
        extra = {name: x[i].astype(np.int32) for name, x in inputs.items()}
        state = update(state, arrays["predictions"][i], arrays["labels"][i], weights, **extra)
        values = metric.compute(state)
        if isinstance(metric, metrics.AUPRC):
            values["weight"] = metric.weight(state)
        rows.append(values)
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def flattened(values):
    """Values of several numbers under names with numbers, beside those without."""
    numbered = {
        f"{name}_{i}": x[..., i] for name, x in values.items() if x.ndim == 3 for i in range(4)
    }
    return values | numbered


@pytest.mark.parametrize(("name", "case"), CASES.items(), ids=CASES)
def test_golden(name, case):
    arrays = golden.load("metrics", name)
    kind, options = METRICS[name]
    options = {"tasks": 2, "window": case["meta"]["window_size"], "compat": "torchrec", **options}
    got = flattened(reported(kind(**options), arrays))
    if name == "ne_logloss":
        got |= reported(metrics.LogLoss(**options), arrays)
    if "lifetime_auprc" in case["outputs"]:
        got["lifetime_auprc"] = running_mean(got["window_auprc"], got["weight"])
    for output in case["outputs"]:
        expected = arrays[output]
        if name.startswith("ne_zero_weights"):
            expected = without_residues(expected, output, case, arrays["weights"])
        actual = got[output]
        if output.endswith(BY_REFERENCE):
            assert (expected == expected[-1]).all()
            actual, expected = actual[-1], expected[-1]
        np.testing.assert_allclose(actual, expected, **case["tolerance"], err_msg=output)


def running_mean(values, weights):
    """TorchRec's lifetime AUPRC: of the values computed so far, by the weight of their windows."""
    metric = metrics.WeightedAverage(tasks=2, window=None)
    state, means = metric.init(), []
    for value, weight in zip(values, weights, strict=True):
        state = metric.update(state, value[:, None], np.zeros((2, 1)), weight[:, None])
        means.append(metric.compute(state)["lifetime_weighted_avg"])
    return np.stack(means)


def without_residues(expected, output, case, weights):
    """NaN where TorchRec's window, emptied by subtraction, has a rounding error over nothing."""
    if not output.startswith("window") or "validate" in case["name"]:
        return expected
    batches = case["meta"]["window_batches"]
    empty = np.array(
        [
            weights[max(0, i + 1 - batches) : i + 1].sum(axis=(0, 2)) == 0
            for i in range(len(weights))
        ]
    )
    assert not np.isfinite(expected[empty & ~(expected == 1e-12)]).any()
    return np.where(empty & np.isinf(expected), np.nan, expected)


@pytest.mark.parametrize("name", SESSION_METRICS)
def test_golden_sessions(name):
    (case,) = [case for other, case in golden.cases("metrics") if other == name]
    arrays = golden.load("metrics", name)
    for task, options in enumerate(SESSION_OPTIONS):
        metric = SESSION_METRICS[name](window=320, compat="torchrec", **options)
        one = {key: x[:, [task]] for key, x in arrays.items() if key != "session" and x.ndim > 1}
        got = reported(metric, one | {"session": arrays["session"]})
        for output in case["outputs"]:
            np.testing.assert_allclose(
                got[output][:, 0], arrays[output][:, task], **case["tolerance"], err_msg=output
            )


def test_every_case_is_tested():
    assert set(METRICS) | set(SESSION_METRICS) == set(golden.names("metrics"))
