"""A generated log of listens, whose plays depend on the order and the times of what came before."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxrec.data.generated import power_law_ids
from jaxrec.ragged import KeyedJaggedArray

# Users made at once. It is part of what a seed means: another number gives another log.
CHUNK_USERS = 1 << 12

# Bits of an action, and the share of a track from which on it counts as played: Yambda's "Listen+"
# (Ploshkin et al. 2025, arXiv:2505.22238).
PLAYED, LIKED = 1, 2
PLAYED_PERCENT = 50

# Items have one of these genres, and a user wants one of them.
GENRES = 4

# Probability that a user plays a candidate of the wanted genre, and one of another genre.
HIT, MISS = 0.9, 0.1

# Seconds. A longer time without an event is a break: it ends a session. No gap lies between the
# longest within a session and the shortest break, so that a model may round times.
SESSION_GAP = (60, 1200)
BREAK_GAP = (3600, 86400)

# The wanted genre is this many genres after that of the newest event: in a session, after a break.
# And the share of each case.
STEPS = (1, 0)
STEP_SHARES = (0.5, 0.5)

# Shares of the history's listens that are played, and of played tracks that are liked. They depend
# on nothing.
PLAYED_SHARE, LIKED_SHARE = 0.7, 0.2

# Seconds of a track; seconds between the requests of one user and the next; Yambda's unit of time.
TRACK_SECONDS = (120, 360)
REQUEST_SECONDS = 10
TICK = 5


@dataclasses.dataclass(frozen=True, eq=False)
class Listens:
    """Listens in Yambda's columns, those of one user after those of another, oldest first.

    Attributes:
        items: ``[listens]`` int32.
        times: ``[listens]`` int32 seconds, multiples of 5.
        played_percent: ``[listens]`` uint16, the share of the track that was played, 0 to 100.
        track_seconds: ``[listens]`` int32, length of the track.
        liked: ``[listens]`` bool.
    """

    items: Int[np.ndarray, " listens"]
    times: Int[np.ndarray, " listens"]
    played_percent: Int[np.ndarray, " listens"]
    track_seconds: Int[np.ndarray, " listens"]
    liked: Bool[np.ndarray, " listens"]

    def __getitem__(self, listens: slice) -> Listens:
        return Listens(*(getattr(self, field.name)[listens] for field in dataclasses.fields(self)))

    @property
    def actions(self) -> Int[np.ndarray, " listens"]:
        """``[listens]`` int32: the bit 1 of a track that was played, the bit 2 of a liked one."""
        played = self.played_percent >= PLAYED_PERCENT
        return (played * PLAYED + self.liked * LIKED).astype(np.int32)


@dataclasses.dataclass(frozen=True, eq=False)
class Requests:
    """Users' histories, and the candidates that each got at the time of their request.

    Attributes:
        users: ``[rows]`` int64.
        lengths: ``[rows]`` int32, number of events of each history.
        history: The events of all histories, which the users chose themselves.
        candidates: The candidates of all requests, ``[rows * candidates]``.
        probabilities: ``[rows, candidates]`` float64, the true probability that a candidate is
            played.
        order_blind: ``[rows, candidates]`` float64, the probability from all but the order.
        time_blind: ``[rows, candidates]`` float64, the probability from all but the times.
    """

    users: Int[np.ndarray, " rows"]
    lengths: Int[np.ndarray, " rows"]
    history: Listens
    candidates: Listens
    probabilities: Float[np.ndarray, "rows candidates"]
    order_blind: Float[np.ndarray, "rows candidates"]
    time_blind: Float[np.ndarray, "rows candidates"]

    def __len__(self) -> int:
        return len(self.users)

    def __getitem__(self, rows: slice) -> Requests:
        start, stop, _ = rows.indices(len(self))
        ends = np.concatenate([[0], np.cumsum(self.lengths)])
        each = self.num_candidates
        return Requests(
            self.users[start:stop],
            self.lengths[start:stop],
            self.history[ends[start] : ends[stop]],
            self.candidates[start * each : stop * each],
            self.probabilities[start:stop],
            self.order_blind[start:stop],
            self.time_blind[start:stop],
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Requests]) -> Requests:
        """Concatenate the rows of several parts."""
        return _concatenate(cls, parts)

    @property
    def num_candidates(self) -> int:
        """Number of candidates of each request."""
        return self.probabilities.shape[1]

    @property
    def labels(self) -> Int[np.ndarray, "rows candidates"]:
        """``[rows, candidates]`` int32, 1 for a candidate that was played."""
        return (self.candidates.actions & PLAYED).reshape(self.probabilities.shape)

    @property
    def gaps(self) -> Int[np.ndarray, " rows"]:
        """``[rows]`` int32, seconds from each history's newest event to the request."""
        newest = self.history.times[np.cumsum(self.lengths) - 1]
        return self.candidates.times[:: self.num_candidates] - newest

    def batch(self, max_history: int) -> KeyedJaggedArray:
        """Pack the rows for `jaxrec.nn.HSTURanker`.

        Args:
            max_history: Length that all histories have space for. Equally many rows then have one
                shape.

        Returns:
            The features "history", "time" and "action" of events, "candidate", "now" and "label" of
            candidates. Actions and labels have the bits 1, played, and 2, liked.
        """
        events = {
            "history": self.history.items,
            "time": self.history.times,
            "action": self.history.actions,
        }
        candidates = {
            "candidate": self.candidates.items,
            "now": self.candidates.times,
            "label": self.candidates.actions,
        }
        each = np.full(len(self), self.num_candidates, np.int32)
        return KeyedJaggedArray.from_lengths(
            [*events, *candidates],
            np.concatenate([*events.values(), *candidates.values()]),
            np.concatenate([self.lengths] * 3 + [each] * 3),
            capacities=dict.fromkeys(events, len(self) * max_history)
            | dict.fromkeys(candidates, len(self) * self.num_candidates),
        )


@dataclasses.dataclass(frozen=True)
class GeneratedEvents:
    """A random log of listens whose best rankings are known, with and without order and times.

    Each user has a history of ``n`` events ``(item, time)`` and makes one request, for which the
    log has candidates. An item has a hidden genre ``g``, one of `GENRES`. With the newest event
    ``(x, t)`` and the time of the request, ``now``, the user wants the genre ::

        w = (g(x) + s) mod GENRES,    s = 1 if now - t < 30 minutes, else 0

    A session goes on with the next genre; after a break it begins with the same one. A candidate of
    genre ``w`` is played with a probability of 0.9, another candidate with 0.1.

    Items follow one power law, and all draws are independent: items, gaps between events, whether
    the history's events were played, and candidates. Three results follow. In each, a model cannot
    have a higher AUC than the probability of a play given what the model knows: ranking by it has
    the most true positives at any rate of false ones (Neyman and Pearson 1933, "On the problem of
    the most efficient tests of statistical hypotheses").

    * **Best.** With all that is known before the request, the probability is 0.9 or 0.1.
      `best_auc` is its AUC.
    * **Order-blind.** Independent draws from one law are exchangeable: given the bag of a history's
      items, each of them is equally likely to be the newest. So a model of the bag ranks at best by
      ``0.1 + 0.8 m / n``, where ``m`` of the ``n`` items have the genre ``g(candidate) - s``. Plays
      tell it nothing more, and times without their items only ``s``. `order_blind_auc` is its AUC.
      It is below the best if histories have more than one event.
    * **Time-blind.** A model that knows the order of the items, but no times, ranks at best by
      ``0.1 + 0.8 p``, where ``p`` is the probability of a gap after which the user wants the
      candidate's genre: 0.5 or 0. `time_blind_auc` is its AUC.

    The three are expectations over all users, computed without drawing any.

    Attributes:
        num_users: Number of users. The first 1,000 users of a longer log are the same.
        seed: Seed of the users and of the hidden genres.
        num_items: Number of items.
        max_history: Length of the longest history. Lengths are uniform from half of it.
        num_candidates: Number of candidates of each user.

    Raises:
        ValueError: A number is too small, or ``num_users`` makes times exceed 32 bits.

    Example:
        >>> log = GeneratedEvents(num_users=100, seed=1)
        >>> requests = next(log.chunks(0, 100))
        >>> len(requests), requests.labels.shape, sorted(requests.batch(20).keys)
        (100, (100, 4), ['action', 'candidate', 'history', 'label', 'now', 'time'])
        >>> log.order_blind_auc < log.time_blind_auc < log.best_auc
        True
    """

    num_users: int
    seed: int = 0
    num_items: int = 100
    max_history: int = 20
    num_candidates: int = 4

    def __post_init__(self) -> None:
        least = {"num_users": 1, "seed": 0, "num_items": GENRES, "max_history": 1}
        for name, smallest in (least | {"num_candidates": 1}).items():
            if getattr(self, name) < smallest:
                raise ValueError(
                    f"generated events: {name} is {smallest} or more, got {getattr(self, name)}"
                )
        if self._first_request + self.num_users * REQUEST_SECONDS >= 2**31:
            raise ValueError(
                f"generated events: {self.num_users} users with up to {self.max_history} events "
                f"exceed 2**31 seconds; a user takes {REQUEST_SECONDS}, an event {BREAK_GAP[1]}"
            )

    @property
    def _first_request(self) -> int:
        # Late enough that no history begins before 0.
        return self.max_history * BREAK_GAP[1]

    def chunks(self, start: int, stop: int) -> Iterator[Requests]:
        """Yield the users ``[start, stop)`` in order, which is that of their requests' times.

        Raises:
            ValueError: The log does not have these users, or they are none.
        """
        if not 0 <= start < stop <= self.num_users:
            raise ValueError(
                f"the log has the users 0 to {self.num_users}; got start={start}, stop={stop}"
            )
        for index in range(start // CHUNK_USERS, -(-stop // CHUNK_USERS)):
            first = index * CHUNK_USERS
            yield _chunk(self, index)[max(start - first, 0) : min(stop - first, CHUNK_USERS)]

    def requests(self, start: int, stop: int) -> Requests:
        """Return the users ``[start, stop)`` at once, such as those of a batch.

        Raises:
            ValueError: As for `chunks`.
        """
        return Requests.concatenate(list(self.chunks(start, stop)))

    @property
    def best_auc(self) -> float:
        """AUC of the best model."""
        shares = _catalogue(self.seed, self.num_items).shares
        hit = float(shares @ _wanted_shares() @ shares)
        return _exact_auc(np.array([MISS, HIT]), np.array([1 - hit, hit]))

    @property
    def order_blind_auc(self) -> float:
        """AUC of the best model that knows all but the order of a history."""
        shares = _catalogue(self.seed, self.num_items).shares
        logs, others = np.log(shares)[:, None], np.log1p(-shares)[:, None]
        factorials = np.cumsum(np.log(np.maximum(np.arange(self.max_history + 1), 1)))
        scores, weights = [], []
        for length in self._lengths:
            counts = np.arange(length + 1)
            # [genres, counts]: the probability that this many events of a history have the genre.
            # The number of ways is kept as a logarithm, since a float cannot hold it.
            ways = factorials[length] - factorials[counts] - factorials[length - counts]
            of_counts = np.exp(ways + counts * logs + (length - counts) * others)
            scores.append(_probability(counts / length))
            weights.append(_wanted_shares() @ shares @ of_counts)
        return _exact_auc(np.concatenate(scores), np.concatenate(weights))

    @property
    def time_blind_auc(self) -> float:
        """AUC of the best model that knows all but the times."""
        shares = _catalogue(self.seed, self.num_items).shares
        return _exact_auc(_probability(_wanted_shares()).ravel(), np.outer(shares, shares).ravel())

    @property
    def _lengths(self) -> range:
        return range((self.max_history + 1) // 2, self.max_history + 1)


@dataclasses.dataclass(frozen=True, eq=False)
class _Catalogue:
    """Genre and length of each item, and the probability of each genre.

    ``genres`` and ``track_seconds`` are ``[items]``, ``shares`` is ``[genres]``.
    """

    genres: Int[np.ndarray, " items"]
    track_seconds: Int[np.ndarray, " items"]
    shares: Float[np.ndarray, " genres"]


@functools.lru_cache(maxsize=2)
def _chunk(log: GeneratedEvents, index: int) -> Requests:
    """Make the users of a chunk."""
    # A generator for each chunk: users at the end are made without those before them.
    rng = np.random.Generator(np.random.SFC64([log.seed, index]))
    catalogue = _catalogue(log.seed, log.num_items)
    users = index * CHUNK_USERS + np.arange(CHUNK_USERS, dtype=np.int64)
    now = (log._first_request + users * REQUEST_SECONDS).astype(np.int32)

    lengths = rng.integers(log._lengths.start, log._lengths.stop, CHUNK_USERS, np.int32)
    ends = np.cumsum(lengths)
    row = np.repeat(np.arange(CHUNK_USERS), lengths)
    gaps = _draw_gaps(rng, len(row))
    # From an event to the request its own gap passes, and those of the later events.
    passed = np.cumsum(gaps)
    times = now[row] - (passed[ends - 1][row] - passed + gaps)
    items = power_law_ids(rng, len(row), (log.num_items,))[:, 0]
    genres = catalogue.genres[items]

    shape = (CHUNK_USERS, log.num_candidates)
    candidates = power_law_ids(rng, math.prod(shape), (log.num_items,))[:, 0]
    wanted = catalogue.genres[candidates].reshape(shape)
    newest = genres[ends - 1][:, None]
    step = np.where(gaps[ends - 1] <= SESSION_GAP[1], *STEPS)[:, None]
    probabilities = _probability((newest + step) % GENRES == wanted)
    # Events that would make each candidate the wanted one if they were the newest.
    fits = genres[:, None] == ((wanted - step) % GENRES)[row]
    listens = functools.partial(_draw_listens, rng, catalogue)
    return Requests(
        users,
        lengths,
        listens(items, times, np.full(len(items), PLAYED_SHARE)),
        listens(candidates, np.repeat(now, log.num_candidates), probabilities.ravel()),
        probabilities,
        _probability(np.add.reduceat(fits, ends - lengths, dtype=np.int64) / lengths[:, None]),
        _probability(_wanted_shares()[newest, wanted]),
    )


def _draw_gaps(rng: np.random.Generator, count: int) -> Int[np.ndarray, " gaps"]:
    """Draw the seconds between events, within sessions and of breaks."""
    is_break = rng.random(count) < STEP_SHARES[1]
    least, most = np.where(is_break, *(np.array(x)[:, None] for x in (BREAK_GAP, SESSION_GAP)))
    seconds = np.exp(np.log(least) + rng.random(count) * np.log(most / least))
    return (seconds // TICK * TICK).astype(np.int32)


def _draw_listens(
    rng: np.random.Generator,
    catalogue: _Catalogue,
    items: Int[np.ndarray, " listens"],
    times: Int[np.ndarray, " listens"],
    probabilities: Float[np.ndarray, " listens"],
) -> Listens:
    """Draw how much of each track was played, and which tracks were liked."""
    played = rng.random(len(items)) < probabilities
    percent = rng.integers(0, PLAYED_PERCENT, len(items), np.uint16)
    # From 0 to 49, or from 51 to 100.
    percent = np.where(played, 100 - percent, percent).astype(np.uint16)
    liked = played & (rng.random(len(items)) < LIKED_SHARE)
    return Listens(items, times, percent, catalogue.track_seconds[items], liked)


@functools.lru_cache(maxsize=4)
def _catalogue(seed: int, num_items: int) -> _Catalogue:
    # Chunks use [seed, index]: no log has 2^62 chunks, so that this stream is apart from theirs.
    rng = np.random.Generator(np.random.SFC64([seed, 1 << 62]))
    # Each four items of about equal popularity have the four genres, in random order.
    blocks = np.tile(np.arange(GENRES, dtype=np.int32), (-(-num_items // GENRES), 1))
    genres = rng.permuted(blocks, axis=1).ravel()[:num_items]
    popularity = np.diff(np.log(np.arange(1, num_items + 2))) / np.log(num_items + 1)
    return _Catalogue(
        genres,
        rng.integers(*TRACK_SECONDS, num_items, np.int32, endpoint=True),
        np.bincount(genres, popularity, minlength=GENRES),
    )


def _wanted_shares() -> Float[np.ndarray, "genres genres"]:
    """Return the probability of each wanted genre, by the genre of the newest event."""
    shares = np.zeros((GENRES, GENRES))
    for step, share in zip(STEPS, STEP_SHARES, strict=True):
        shares += share * np.roll(np.eye(GENRES), step, axis=1)
    return shares


def _probability(is_wanted: np.ndarray) -> Float[np.ndarray, "..."]:
    """Return the probability that a candidate is played, from that of the wanted genre."""
    return MISS + (HIT - MISS) * is_wanted


def _exact_auc(
    probabilities: Float[np.ndarray, " kinds"], shares: Float[np.ndarray, " kinds"]
) -> float:
    """Return the AUC of ranking by the true probabilities, from the share of each among samples."""
    values, kind = np.unique(probabilities.round(12), return_inverse=True)
    shares = np.bincount(kind, shares)
    played, other = shares * values, shares * (1 - values)
    # The others of each probability: those below, and half of those beside.
    below = np.cumsum(other) - other / 2
    return float(played @ below / (played.sum() * other.sum()))


def _concatenate(kind: type, parts: Sequence[Any]) -> Any:
    """Concatenate each field of dataclasses of one kind."""
    if kind not in (Listens, Requests):
        return np.concatenate(parts)
    columns = {
        field.name: [getattr(part, field.name) for part in parts]
        for field in dataclasses.fields(kind)
    }
    return kind(**{name: _concatenate(type(each[0]), each) for name, each in columns.items()})
