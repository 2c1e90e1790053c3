from __future__ import annotations

import collections
import dataclasses
import itertools

import numpy as np
import pytest

from jaxrec.data import GeneratedEvents
from jaxrec.data.generated_events import CHUNK_USERS, _catalogue
from jaxrec.metrics import auc

LOG = GeneratedEvents(num_users=10 * CHUNK_USERS, seed=3)


@pytest.fixture(scope="module")
def requests():
    return LOG.requests(0, 3 * CHUNK_USERS)


def histories(requests):
    """The events of each row, as lists of dictionaries."""
    events = {field.name: getattr(requests.history, field.name) for field in FIELDS}
    start = 0
    for length in requests.lengths.tolist():
        yield [
            {name: column[i].item() for name, column in events.items()}
            for i in range(start, start + length)
        ]
        start += length


FIELDS = dataclasses.fields(LOG.requests(0, 1).history)


def played(hits, events):
    """Probability of a play where ``hits`` of ``events`` equally likely cases are hits."""
    return 0.9 * hits / events + 0.1 * (1 - hits / events)


def test_probabilities_are_those_of_the_rule_written_out(requests):
    genre = _catalogue(LOG.seed, LOG.num_items).genres.tolist()
    rows = requests[:300]
    for row, events in enumerate(histories(rows)):
        newest = max(events, key=lambda event: event["times"])
        for place in range(4):
            candidate = genre[rows.candidates.items[4 * row + place]]
            now = rows.candidates.times[4 * row + place]
            is_session = now - newest["times"] < 1800

            def is_wanted(event, is_session, candidate=candidate):
                return candidate == (genre[event["items"]] + (1 if is_session else 0)) % 4

            hits = sum(is_wanted(event, is_session) for event in events)
            cases = sum(is_wanted(newest, each) for each in (True, False))
            assert rows.probabilities[row, place] == (0.9 if is_wanted(newest, is_session) else 0.1)
            assert rows.order_blind[row, place] == pytest.approx(played(hits, len(events)))
            assert rows.time_blind[row, place] == pytest.approx(played(cases, 2))


@pytest.mark.parametrize("kind", ["probabilities", "order_blind", "time_blind"])
def test_each_probability_is_the_share_of_plays(requests, kind):
    known, labels = getattr(requests, kind).ravel(), requests.labels.ravel()
    for value in np.unique(known.round(6)):
        ours = labels[known.round(6) == value]
        if len(ours) > 200:
            assert abs(ours.mean() - value) < 5 * np.sqrt(value * (1 - value) / len(ours))


def test_best_aucs_are_those_of_many_users(requests):
    labels = requests.labels.ravel()
    for scores, expected in (
        (requests.probabilities, LOG.best_auc),
        (requests.order_blind, LOG.order_blind_auc),
        (requests.time_blind, LOG.time_blind_auc),
    ):
        assert auc(scores.ravel(), labels) == pytest.approx(expected, abs=0.012)
    assert LOG.order_blind_auc < LOG.time_blind_auc - 0.05 < LOG.best_auc - 0.1


@pytest.mark.parametrize("blind_to", ["nothing", "order", "times"])
@pytest.mark.parametrize("max_history", [2, 3, 4])
def test_best_aucs_by_enumeration(blind_to, max_history):
    """All users of a log of four items, one of each genre, grouped by what a model knows."""
    log = GeneratedEvents(num_users=1, seed=2, num_items=4, max_history=max_history)
    genre = _catalogue(log.seed, 4).genres.tolist()
    popularity = [np.log((item + 2) / (item + 1)) / np.log(5) for item in range(4)]
    groups = collections.defaultdict(lambda: [0.0, 0.0])  # share of users, and of plays
    lengths = range(-(-max_history // 2), max_history + 1)
    for length in lengths:
        for *items, candidate in itertools.product(range(4), repeat=length + 1):
            for is_session in (True, False):
                share = 0.5 / len(lengths) * np.prod([popularity[i] for i in (*items, candidate)])
                wanted = (genre[items[-1]] + is_session) % 4
                known = {
                    "nothing": (tuple(items), candidate, is_session),
                    "order": (tuple(sorted(items)), candidate, is_session),
                    "times": (tuple(items), candidate),
                }[blind_to]
                groups[known][0] += share
                groups[known][1] += share * (0.9 if genre[candidate] == wanted else 0.1)
    shares, plays = np.array(list(groups.values())).T
    assert shares.sum() == pytest.approx(1)
    best = auc((plays / shares).round(9), plays / shares, shares)
    name = {"nothing": "best_auc", "order": "order_blind_auc", "times": "time_blind_auc"}[blind_to]
    assert getattr(log, name) == pytest.approx(best, abs=1e-6)


def test_order_matters_more_in_longer_histories():
    aucs = [GeneratedEvents(1, max_history=most).order_blind_auc for most in (1, 8, 64, 1200)]
    assert aucs[0] == pytest.approx(GeneratedEvents(1).best_auc)
    assert aucs == sorted(aucs, reverse=True)
    # In the end a bag has the genres in the shares of all events, and tells only these.
    shares = _catalogue(0, 100).shares
    wanted = np.array([0.1 + 0.8 * shares[(c - step) % 4] for c in range(4) for step in (0, 1)])
    assert aucs[-1] == pytest.approx(auc(wanted, wanted, np.repeat(shares, 2)), abs=0.01)


def test_columns(requests):
    rows = requests[: CHUNK_USERS // 4]
    assert rows.lengths.min() == 10
    assert rows.lengths.max() == 20
    for row, events in enumerate(histories(rows)):
        now = rows.candidates.times[4 * row]
        times = [event["times"] for event in events] + [now]
        gaps = np.diff(times)
        assert ((gaps >= 60) & (gaps <= 1200) | (gaps >= 3600) & (gaps <= 86400)).all()
        assert rows.gaps[row] == gaps[-1]
        assert times[0] >= 0
        assert (rows.candidates.times[4 * row : 4 * row + 4] == now).all()
    for listens in (rows.history, rows.candidates):
        assert not (listens.times % 5).any()
        assert listens.played_percent.max() == 100
        np.testing.assert_array_equal(listens.actions & 1, listens.played_percent >= 50)
        np.testing.assert_array_equal(listens.actions >> 1, listens.liked)
        assert not listens.liked[listens.played_percent < 50].any()
        assert {*listens.items.tolist()} == {*range(100)}
        for item in (0, 99):
            assert len(np.unique(listens.track_seconds[listens.items == item])) == 1


def test_users_depend_on_seed_and_number_alone(requests):
    crossing = LOG.requests(CHUNK_USERS - 3, CHUNK_USERS + 5)
    assert crossing.users.tolist() == list(range(CHUNK_USERS - 3, CHUNK_USERS + 5))
    longer = GeneratedEvents(num_users=10**6, seed=3).requests(CHUNK_USERS - 3, CHUNK_USERS + 5)
    slices = requests[CHUNK_USERS - 3 : CHUNK_USERS + 5]
    other = GeneratedEvents(num_users=10**6, seed=4).requests(CHUNK_USERS - 3, CHUNK_USERS + 5)
    for rows in (longer, slices):
        np.testing.assert_array_equal(rows.history.items, crossing.history.items)
        np.testing.assert_array_equal(rows.history.times, crossing.history.times)
        np.testing.assert_array_equal(rows.candidates.items, crossing.candidates.items)
        np.testing.assert_array_equal(rows.labels, crossing.labels)
    assert not np.array_equal(other.candidates.items, crossing.candidates.items)
    assert not np.array_equal(other.history.items[:50], crossing.history.items[:50])


def test_batch_has_the_features_of_the_ranker(requests):
    rows = requests[5:8]
    batch = rows.batch(max_history=20)
    events = list(histories(rows))
    lists = batch.to_lists()
    assert lists["history"] == [[event["items"] for event in row] for row in events]
    assert lists["time"] == [[event["times"] for event in row] for row in events]
    assert lists["action"] == [
        [(event["played_percent"] >= 50) + 2 * event["liked"] for event in row] for row in events
    ]
    assert np.ravel(lists["candidate"]).tolist() == rows.candidates.items.tolist()
    assert np.ravel(lists["now"]).tolist() == rows.candidates.times.tolist()
    assert (np.ravel(lists["label"]) & 1).tolist() == rows.labels.ravel().tolist()
    assert batch.capacity_per_key["history"] == 60
    assert batch.capacity_per_key["label"] == 12


@pytest.mark.parametrize(("start", "stop"), [(-1, 5), (5, 5), (0, LOG.num_users + 1)])
def test_users_that_the_log_does_not_have(start, stop):
    with pytest.raises(ValueError, match=f"users 0 to 40960; got start={start}, stop={stop}"):
        LOG.requests(start, stop)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_users": 0}, "num_users is 1 or more, got 0"),
        ({"num_users": 5, "seed": -1}, "seed is 0 or more"),
        ({"num_users": 5, "num_items": 3}, "num_items is 4 or more"),
        ({"num_users": 5, "max_history": 0}, "max_history is 1 or more"),
        ({"num_users": 5, "num_candidates": 0}, "num_candidates is 1 or more"),
        ({"num_users": 2**28}, "exceed 2\\*\\*31 seconds"),
    ],
    ids=["users", "seed", "items", "history", "candidates", "times"],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        GeneratedEvents(**options)
