"""The sentence on where the values of training and of held-out rows part."""

from __future__ import annotations

import math

import pytest

from jaxrec.train.models.labels import ClickTask
from jaxrec.train.overfitting import describe_overfitting

NE, HELD = "normalized_entropy", "held_out_normalized_entropy"


def curves(training, held_out):
    """Values every 10 steps."""
    history = {10 * (i + 1): {NE: value, "auc": 0.7} for i, value in enumerate(training)}
    for i, value in enumerate(held_out):
        history[10 * (i + 1)][HELD] = value
    return history


def sentence(training, held_out, last=None, epochs=3):
    last = held_out[-1] if last is None else last
    history = curves(training, held_out)
    results = {"auc": 0.7, NE: last}
    return describe_overfitting(history, ClickTask.measures, results, step=40, epochs=epochs)


def test_the_step_where_curves_part_is_named():
    text = sentence([0.90, 0.80, 0.70, 0.60], [0.91, 0.85, 0.87, 0.95])
    assert text == (
        "overfitting after step 20: by step 40 the NE of held-out rows rose from 0.8500 to 0.9500, "
        "and that of training rows fell from 0.8000 to 0.6000"
    )


def test_a_difference_at_the_end_is_reported_without_evaluations_before():
    text = sentence([0.90, 0.70], [], last=0.80)
    assert text.startswith(
        "NE is 0.7000 on the training rows of the last steps and 0.8000 on held-out"
    )


@pytest.mark.parametrize(
    ("training", "held_out", "epochs"),
    [
        pytest.param([0.9, 0.8], [0.91, 0.82], 2, id="both fall"),
        pytest.param([0.9, 0.8, 0.79], [0.91, 0.820, 0.821], 2, id="noise"),
        pytest.param([0.8, 0.9], [0.82, 0.92], 2, id="both rise"),
        pytest.param([0.9, 0.7], [0.8, 0.9], 1, id="one epoch"),
        pytest.param([math.nan, 0.8], [math.nan, 0.82], 2, id="values that are no numbers"),
    ],
)
def test_other_curves_say_nothing(training, held_out, epochs):
    assert sentence(training, held_out, epochs=epochs) is None


def test_models_without_a_common_value_say_nothing():
    assert (
        describe_overfitting(curves([0.9], [0.9]), (), {"ndcg@10": 0.1}, step=1, epochs=5) is None
    )
