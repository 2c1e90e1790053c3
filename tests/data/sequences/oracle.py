"""Requests written out in plain Python, one event at a time."""

from __future__ import annotations


def requests_of_row(history, candidates, limits, times=None):
    """The requests of one row of lists, as pairs of lists of positions."""
    chosen = [
        at
        for at in range(len(candidates))
        if (times is None or in_window(limits, times[at])) and len(history) >= limits.min_history
    ]
    events = list(range(len(history)))[-limits.history :]
    return [(events, chunk) for chunk in cut(chosen, limits, times)]


def requests_of_user(times, is_candidate, is_history, limits):
    """The requests of one user's events, as pairs of lists of positions."""

    def before(at):
        return [n for n in range(at) if is_history[n] and times[n] < times[at]]

    chosen = [
        at
        for at in range(len(times))
        if is_candidate[at]
        and in_window(limits, times[at])
        and len(before(at)) >= limits.min_history
    ]
    return [(before(chunk[0])[-limits.history :], chunk) for chunk in cut(chosen, limits, times)]


def in_window(limits, time):
    start, stop = limits.window.start, limits.window.stop
    return (start is None or time >= start) and (stop is None or time < stop)


def cut(chosen, limits, times):
    pieces = []
    for at in chosen:
        span = None if limits.seconds is None else times[at] // limits.seconds
        if not pieces or len(pieces[-1][1]) == limits.candidates or pieces[-1][0] != span:
            pieces.append((span, []))
        pieces[-1][1].append(at)
    return [piece for _, piece in pieces]
