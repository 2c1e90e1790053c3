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
    optim.adam: _adam,
    optim.partial_rowwise_adam: _partial_rowwise_adam,
    optim.lamb: _lamb,
    optim.partial_rowwise_lamb: _partial_rowwise_lamb,
    optim.lars_sgd: _lars_sgd,
    optim.rmsprop: _rmsprop,
    optim.rowwise_rmsprop: _rowwise_rmsprop,
    optim.ftrl: _ftrl,
}
