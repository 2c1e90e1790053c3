"""Row optimizers in NumPy float64, from the formulas of their docstrings."""

from __future__ import annotations

import numpy as np

from jaxrec import optim

State = dict[str, np.ndarray]


def updated(
    optimizer: optim.RowOptimizer, rows: np.ndarray, gradients: np.ndarray, state: State, step: int
) -> tuple[np.ndarray, State]:
    """The rows and their state after one step; each row has its summed gradient."""
    rate = optimizer.learning_rate
    rate = float(rate(step)) if callable(rate) else rate
    rows, state = _RULES[type(optimizer)](optimizer, rate, rows, gradients, state, step)
    if optimizer.max_norm is not None:
        rows = rows * (optimizer.max_norm / np.maximum(_norms(rows), optimizer.max_norm))
    return rows, state


def _sgd(o, rate, w, g, state, step):
    return w - rate * g, {}


def _momentum_sgd(o, rate, w, g, state, step):
    m = o.momentum * state["momentum"] + g
    return w - rate * (g + o.momentum * m if o.nesterov else m), {"momentum": m}


def _adagrad(o, rate, w, g, state, step):
    v = state["accumulator"] + g**2
    return w - rate * g / (np.sqrt(v) + o.eps), {"accumulator": v}


def _rowwise_adagrad(o, rate, w, g, state, step):
    if o.weight_decay_mode == "l2":
        g = g + o.weight_decay * w
    v = state["accumulator"] + (g**2).mean(axis=1)
    if o.weight_decay_mode == "decoupled":
        w = (1 - rate * o.weight_decay) * w
    return w - (rate / (np.sqrt(v) + o.eps))[:, None] * g, {"accumulator": v}


def _counted(o, w, g, state, step):
    """Counter, gap, accumulator and gradient of an update of the optimizers that count."""
    gap = np.where(state["last_step"] == 0, 1, step + 1 - state["last_step"])
    kept = 1 if o.halflife is None else 0 if o.halflife == 0 else 0.5 ** (gap / o.halflife)
    if o.weight_decay_mode == "l2":
        g = g + o.weight_decay * w
    new = {
        "accumulator": state["accumulator"] + (g**2).mean(axis=1),
        "count": 1 + kept * state["count"],
        "last_step": np.full(len(w), step + 1.0),
    }
    return gap, g, new


def _rowwise_adagrad_with_counter(o, rate, w, g, state, step):
    gap, _, new = _counted(o, w, g, state, step)
    c, root = new["count"], np.sqrt(new["accumulator"]) + o.eps
    plain = rate / root
    adjusted = {
        "equal": plain,
        "tail_increase": plain * np.clip((o.max_counter / (c + 1)) ** o.adjustment, 1, 10),
        "tail_decrease": plain * np.clip(((c + 1) / o.max_counter) ** o.adjustment, 0.1, 1),
        "counter_sgd": rate / (np.sqrt(o.adjustment * c) + o.eps),
        "sqrt_counter": plain * np.sqrt(c),
        "capped_counter": np.minimum(rate * c, o.adjustment) / root,
    }[o.learning_rate_mode]
    threshold = o.tail_threshold
    if o.tail_threshold_is_ratio:
        threshold = np.floor(threshold * o.max_counter)
    rates = np.where(c > threshold, adjusted, plain)
    shrinkage = np.ones(len(w))
    if o.weight_decay_mode == "l2":
        shrinkage = 1 - o.halflife / c * o.weight_decay * plain
    if o.weight_decay_mode == "decoupled":
        shrinkage = 1 - o.halflife / c * o.weight_decay * rate
    if o.weight_decay_mode == "adagradw":
        gap = np.minimum(gap, step + 1 - o.adjust_after)
        shrinkage = (1 - o.weight_decay * rate) ** gap
        rates = rates * (1 - o.weight_decay * rate) ** (gap - 1)
    if step + 1 <= o.adjust_after:
        shrinkage, rates = np.ones(len(w)), plain
    return shrinkage[:, None] * w - rates[:, None] * g, new


def _rowwise_adagrad_cowclip(o, rate, w, g, state, step):
    _, decayed, new = _counted(o, w, g, state, step)
    rates = rate / (np.sqrt(new["accumulator"]) + o.eps)
    bound = new["count"] * np.maximum(o.clip_ratio * _norms(w)[:, 0], o.clip_minimum)
    norms = _norms(decayed)[:, 0]
    rates = rates * np.where(norms > bound, bound / np.where(norms > 0, norms, 1), 1)
    shrinkage = {
        "none": np.ones(len(w)),
        "l2": 1 - o.weight_decay * rates,
        "decoupled": np.full(len(w), 1 - o.weight_decay * rate),
    }[o.weight_decay_mode]
    return shrinkage[:, None] * w - rates[:, None] * g, new


def _direction(o, w, g, state, step, squares):
    """Adam's and LAMB's direction, and the new state."""
    new = {
        "first_moment": o.b1 * state["first_moment"] + (1 - o.b1) * g,
        "second_moment": o.b2 * state["second_moment"] + (1 - o.b2) * squares,
    }
    count = np.float64(step + 1)
    if "count" in state:
        new["count"] = state["count"] + 1
        count = new["count"][:, None]
    second = new["second_moment"].reshape(len(w), -1)
    direction = new["first_moment"] / (1 - o.b1**count)
    direction = direction / (np.sqrt(second / (1 - o.b2**count)) + o.eps)
    return direction + o.weight_decay * w, new


def _adam(o, rate, w, g, state, step):
    direction, new = _direction(o, w, g, state, step, g**2)
    return w - rate * direction, new


def _partial_rowwise_adam(o, rate, w, g, state, step):
    direction, new = _direction(o, w, g, state, step, (g**2).mean(axis=1))
    return w - rate * direction, new


def _lamb(o, rate, w, g, state, step):
    direction, new = _direction(o, w, g, state, step, g**2)
    return w - rate * _ratio(_norms(w), _norms(direction)) * direction, new


def _partial_rowwise_lamb(o, rate, w, g, state, step):
    direction, new = _direction(o, w, g, state, step, (g**2).mean(axis=1))
    return w - rate * _ratio(_norms(w), _norms(direction)) * direction, new


def _lars_sgd(o, rate, w, g, state, step):
    ratio = _ratio(o.eta * _norms(w), _norms(g) + o.weight_decay * _norms(w))
    m = o.momentum * state["momentum"] + rate * ratio * (g + o.weight_decay * w)
    return w - m, {"momentum": m}


def _rmsprop(o, rate, w, g, state, step):
    v = o.decay * state["second_moment"] + (1 - o.decay) * g**2
    return w - rate * g / (np.sqrt(v) + o.eps), {"second_moment": v}


def _rowwise_rmsprop(o, rate, w, g, state, step):
    v = o.decay * state["second_moment"] + (1 - o.decay) * (g**2).mean(axis=1)
    new = {"second_moment": v}
    if "last_step" in state:
        gap = np.where(state["last_step"] == 0, 1, step + 1 - state["last_step"])
        shrinkage = 1 - np.clip(rate * o.ar_alpha * gap, 0, 1)
        w = np.maximum(o.min_shrinkage, shrinkage)[:, None] * w
        new["last_step"] = np.full(len(w), step + 1.0)
    return w - (rate / (np.sqrt(v) + o.eps))[:, None] * g, new


def _ftrl(o, rate, w, g, state, step):
    p = -o.learning_rate_power
    n = state["accumulator"] + g**2
    z = state["linear"] + g - (n**p - state["accumulator"] ** p) / rate * w
    curvature = (o.beta + n**p) / rate + o.l2
    new = -(z - np.sign(z) * o.l1) / np.where(curvature == 0, 1, curvature)
    new = np.where(np.abs(z) <= o.l1, 0, new)
    # As in Adagrad; and for p < 1/2 the limit for small gradients.
    new = np.where((curvature == 0) & (o.l1 == 0), w, new)
    return new, {"accumulator": n, "linear": z}


def _norms(rows):
    return np.sqrt((rows**2).sum(axis=1, keepdims=True))


def _ratio(numerator, denominator):
    defined = (numerator > 0) & (denominator > 0)
    return np.where(defined, numerator / np.where(defined, denominator, 1), 1)


_RULES = {
    optim.sgd: _sgd,
    optim.momentum_sgd: _momentum_sgd,
    optim.adagrad: _adagrad,
    optim.rowwise_adagrad: _rowwise_adagrad,
    optim.rowwise_adagrad_with_counter: _rowwise_adagrad_with_counter,
    optim.rowwise_adagrad_cowclip: _rowwise_adagrad_cowclip,
    optim.adam: _adam,
    optim.partial_rowwise_adam: _partial_rowwise_adam,
    optim.lamb: _lamb,
    optim.partial_rowwise_lamb: _partial_rowwise_lamb,
    optim.lars_sgd: _lars_sgd,
    optim.rmsprop: _rmsprop,
    optim.rowwise_rmsprop: _rowwise_rmsprop,
    optim.ftrl: _ftrl,
}
