"""The definitions in NumPy float64, one sample, pair and session at a time."""

from __future__ import annotations

import numpy as np

from jaxrec import metrics


def nan_ratio(a, b):
    return a / b if b > 0 else np.nan


def loss(p, y):
    p = np.clip(p, 1e-12, 1 - 1e-12)
    return -(y * np.log(p) + (1 - y) * np.log(1 - p))


def norm(y, w):
    mean = (w * y).sum() / w.sum()
    return nan_ratio((w * loss(np.full_like(y, mean), y)).sum(), 1) if 0 < mean < 1 else np.nan


def ne(p, y, w):
    return (w * loss(p, y)).sum() / norm(y, w)


def recalibrated(p, c):
    return p / (p + (1 - p) / c)


def pair_share(p, y, w):
    right = total = 0.0
    for i in range(len(p)):
        for j in range(i):
            if y[i] != y[j]:
                agree = (p[i] - p[j]) * (y[i] - y[j])
                right += w[i] * w[j] * (1.0 if agree > 0 else 0.5 if agree == 0 else 0.0)
                total += w[i] * w[j]
    return right, total


def by_session(p, y, w, s):
    return [(p[s == k], y[s == k], w[s == k]) for k in np.unique(s)]


def dcg(order_by, gain, k):
    """Equal scores: the mean over all orders of them, which is their mean gain at each rank."""
    value = 0.0
    ranks = np.argsort(-order_by, kind="stable")
    for rank, i in enumerate(ranks, start=1):
        if k is None or rank <= k:
            value += gain[order_by == order_by[i]].mean() / np.log2(rank + 1)
    return value


def ndcg(p, y, w, s, k=None, exponential=False):
    total = weight = 0.0
    for ps, ys, ws in by_session(p, y, w, s):
        gain = 2**ys - 1 if exponential else ys
        ideal = dcg(gain, gain, k)
        if ideal > 0:
            total += ws.max() * dcg(ps, gain, k) / ideal
            weight += ws.max()
    return total, weight


def gauc(p, y, w, s, weighted=False):
    total = size = count = 0.0
    for ps, ys, ws in by_session(p, y, w, s):
        # A label between 0 and 1 is that share of a positive sample, and a negative one besides.
        both = np.repeat([1.0, 0.0], len(ps)), np.concatenate([ws * ys, ws * (1 - ys)])
        right, pairs = pair_share(np.tile(ps, 2), *both)
        if pairs > 0:
            each = ws.sum() if weighted else 1.0
            total, size, count = total + each * right / pairs, size + each, count + 1
    return total, size, count


def session_pairs(p, y, w, s, weighted=True):
    right = total = 0.0
    for i in range(len(p)):
        for j in range(i):
            if s[i] == s[j] and y[i] != y[j]:
                pair = w[i] + w[j] if weighted else 1.0
                agree = (p[i] - p[j]) * (y[i] - y[j])
                right += pair * (1.0 if agree > 0 else 0.5 if agree == 0 else 0.0)
                total += pair
    return right, total


def on_top(x, s, top):
    return np.array([(x[s == s[i]] > x[i]).sum() < top for i in range(len(x))], float)


def session_counts(p, y, w, s, top):
    taken = on_top(p, s, top)
    return (w * taken * y).sum(), (w * taken).sum(), (w * y).sum()


def hindsight(p, y, w, target):
    for index, threshold in enumerate(np.linspace(0, 1, 1000, dtype=np.float32)):
        taken = p >= threshold
        found = (w * y)[taken].sum()
        if found / max(w[taken].sum(), 1e-30) >= target:
            return index, found / w[taken].sum(), found / (w * y).sum()
    return np.nan, np.nan, np.nan


def whole(function):
    """A definition over all samples together."""

    def of_batches(batches):
        return function(*(np.concatenate(column) for column in zip(*batches, strict=True)))

    return of_batches


def per_batch(function):
    """A definition whose sums are taken batch by batch; the first is divided by the second."""

    def of_batches(batches):
        return nan_ratio(*np.sum([function(*batch)[:2] for batch in batches], axis=0))

    return of_batches


def mse(p, y, w):
    return (w * (y - p) ** 2).sum() / w.sum()


def r_squared(p, y, w):
    mean = (w * y).sum() / w.sum()
    return 1 - (w * (y - p) ** 2).sum() / (w * (y - mean) ** 2).sum()


def q_norm(p, y, w):
    q = (w * p).sum() / w.sum()
    if not 0 < q < 1:
        return np.nan
    return (w * loss(np.full_like(y, q), y)).sum()


# Name: (metric, its options, what samples are like, {reported name: definition over batches}).
# The samples of a definition are those of weight other than 0: (p, y, w) or (p, y, w, s).
DEFINITIONS = {
    "ne": (metrics.NormalizedEntropy, {}, "clicks", {"ne": whole(ne)}),
    "logloss": (
        metrics.LogLoss,
        {},
        "clicks",
        {"logloss": whole(lambda p, y, w: (w * loss(p, y)).sum() / w.sum())},
    ),
    "unweighted_ne": (
        metrics.UnweightedNormalizedEntropy,
        {},
        "clicks",
        {"unweighted_ne": whole(lambda p, y, w: ne(p, y, np.ones_like(w)))},
    ),
    "ne_positive": (
        metrics.PositiveNormalizedEntropy,
        {},
        "clicks",
        {"ne_positive": whole(lambda p, y, w: (w * y * loss(p, 0 * y + 1)).sum() / norm(y, w))},
    ),
    "recalibrated_ne": (
        metrics.RecalibratedNormalizedEntropy,
        {"coefficient": 0.2},
        "clicks",
        {"ne": whole(lambda p, y, w: ne(recalibrated(p, 0.2), y, w))},
    ),
    "cali_free_ne": (
        metrics.CalibrationFreeNormalizedEntropy,
        {},
        "clicks",
        {"cali_free_ne": whole(lambda p, y, w: (w * loss(p, y)).sum() / q_norm(p, y, w))},
    ),
    "calibration": (
        metrics.Calibration,
        {},
        "clicks",
        {"calibration": whole(lambda p, y, w: (w * p).sum() / (w * y).sum())},
    ),
    "recalibrated_calibration": (
        metrics.RecalibratedCalibration,
        {"coefficient": 3.0},
        "clicks",
        {"calibration": whole(lambda p, y, w: (w * recalibrated(p, 3.0)).sum() / (w * y).sum())},
    ),
    "ctr": (
        metrics.ClickThroughRate,
        {},
        "clicks",
        {"ctr": whole(lambda p, y, w: (w * y).sum() / w.sum())},
    ),
    "average": (
        metrics.Average,
        {},
        "numbers",
        {
            "label_average": whole(lambda p, y, w: (w * y).sum() / w.sum()),
            "prediction_average": whole(lambda p, y, w: (w * p).sum() / w.sum()),
        },
    ),
    "weighted_avg": (
        metrics.WeightedAverage,
        {},
        "numbers",
        {"weighted_avg": whole(lambda p, y, w: (w * p).sum() / w.sum())},
    ),
    "tensor_weighted_avg": (
        metrics.TensorWeightedAverage,
        {"tensor": "session"},
        "sessions",
        {"weighted_avg": whole(lambda p, y, w, s: (w * s).sum() / w.sum())},
    ),
    "sum_weights": (
        metrics.SumOfWeights,
        {},
        "clicks",
        {"sum_weights": whole(lambda p, y, w: w.sum())},
    ),
    "weighted_sum_predictions": (
        metrics.WeightedSumOfPredictions,
        {},
        "clicks",
        {"weighted_sum_predictions": whole(lambda p, y, w: (w * p).sum())},
    ),
    "num_positive_samples": (
        metrics.NumPositives,
        {},
        "clicks",
        {"num_positive_samples": whole(lambda p, y, w: float((y > 0).sum()))},
    ),
    "mse": (
        metrics.MeanSquaredError,
        {},
        "numbers",
        {
            "mse": whole(mse),
            "rmse": whole(lambda p, y, w: np.sqrt(mse(p, y, w))),
            "r_squared": whole(r_squared),
        },
    ),
    "mae": (
        metrics.MeanAbsoluteError,
        {},
        "numbers",
        {"mae": whole(lambda p, y, w: (w * np.abs(y - p)).sum() / w.sum())},
    ),
    "nmse": (
        metrics.NormalizedMeanSquaredError,
        {"constant": 0.25},
        "numbers",
        {"nmse": whole(lambda p, y, w: (w * (y - p) ** 2).sum() / (w * (y - 0.25) ** 2).sum())},
    ),
    "accuracy": (
        metrics.Accuracy,
        {"threshold": 0.4},
        "clicks",
        {"accuracy": whole(lambda p, y, w: (w * ((p >= 0.4) == y)).sum() / w.sum())},
    ),
    "precision": (
        metrics.Precision,
        {},
        "clicks",
        {"precision": whole(lambda p, y, w: (w * y)[p >= 0.5].sum() / w[p >= 0.5].sum())},
    ),
    "recall": (
        metrics.Recall,
        {},
        "clicks",
        {"recall": whole(lambda p, y, w: (w * y)[p >= 0.5].sum() / (w * y).sum())},
    ),
    "hindsight_target_pr": (
        metrics.HindsightTargetPR,
        {"target_precision": 0.6},
        "clicks",
        {
            "hindsight_target_pr_threshold_index": whole(
                lambda p, y, w: hindsight(p, y, w, 0.6)[0]
            ),
            "hindsight_target_precision": whole(lambda p, y, w: hindsight(p, y, w, 0.6)[1]),
            "hindsight_target_recall": whole(lambda p, y, w: hindsight(p, y, w, 0.6)[2]),
        },
    ),
    "xauc": (metrics.XAUC, {}, "numbers", {"xauc": per_batch(pair_share)}),
    "ndcg": (metrics.NDCG, {}, "sessions", {"ndcg": per_batch(ndcg)}),
    "ndcg_at_2": (
        metrics.NDCG,
        {"k": 2, "exponential_gain": True},
        "sessions",
        {"ndcg": per_batch(lambda *batch: ndcg(*batch, k=2, exponential=True))},
    ),
    "gauc": (metrics.GroupedAUC, {}, "sessions", {"gauc": per_batch(gauc)}),
    "gauc_by_samples": (
        metrics.GroupedAUC,
        {"weighted_by": "samples"},
        "sessions",
        {"gauc": per_batch(lambda *batch: gauc(*batch, weighted=True))},
    ),
    "uauc": (
        metrics.UserAUC,
        {"users": "session"},
        "sessions",
        {
            "uauc": per_batch(gauc),
            "wuauc": per_batch(lambda *batch: gauc(*batch, weighted=True)),
            "uauc_num_users": lambda batches: sum(gauc(*batch)[2] for batch in batches),
        },
    ),
    "session_pairwise_auc": (
        metrics.SessionPairwiseAUC,
        {},
        "sessions",
        {"session_pairwise_auc": per_batch(session_pairs)},
    ),
    "session_pairwise_auc_unweighted": (
        metrics.SessionPairwiseAUC,
        {"weighted": False},
        "sessions",
        {"session_pairwise_auc": per_batch(lambda *batch: session_pairs(*batch, weighted=False))},
    ),
    "serving_loss": (
        metrics.ServingLoss,
        {"tensor": "session"},
        "sessions",
        {"serving_session": whole(lambda p, y, w, s: (w * s).sum() / w.sum())},
    ),
    "recall_session": (
        metrics.SessionRecall,
        {"top": 2},
        "sessions",
        {
            "recall_session_level": per_batch(
                lambda *batch: np.take(session_counts(*batch, top=2), [0, 2])
            )
        },
    ),
    "precision_session": (
        metrics.SessionPrecision,
        {"top": 2},
        "sessions",
        {
            "precision_session_level": per_batch(
                lambda *batch: np.take(session_counts(*batch, top=2), [0, 1])
            )
        },
    ),
}
