"""A debugging check that all processes make the same calls in the same order.

If processes call different programs, or one program with batches of different shapes, they wait in
different collectives, and the job hangs without an error. With the environment variable `SWITCH`
set, processes compare each call before they make it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from jaxrec.mesh.processes import NoteBoard, who_has
from jaxrec.mesh.store import mesh_stores
from jaxrec.ragged import KeyedJaggedArray

SWITCH = "JAXREC_CHECK_CALLS"
"""Environment variable: seconds that a process waits until the others make the same call."""

# Seconds between two looks at the notes of the others.
_POLL = 0.005


class CallMismatchError(RuntimeError):
    """The processes of a job make different calls."""


class CallSequence:
    """Sequence of calls in which the n-th call of all processes must be the same.

    Each process writes its last call to ``board``, and waits ``seconds`` for the others.
    """

    def __init__(self, board: NoteBoard, seconds: float) -> None:
        self._board, self._seconds = board, seconds
        self._number = 0

    def compare(self, call: str, facts: Mapping[str, str]) -> None:
        """Compare the next call of this process, and its ``facts``, with the other processes'.

        All raise a CallMismatchError if one of them makes another call, or none in time.
        """
        self._number += 1
        self._board.write(json.dumps({"number": self._number, "facts": {"call": call, **facts}}))
        notes = self._wait(call)
        # A process with a higher number has compared this call already, and found no difference.
        of_call = {p: note["facts"] for p, note in notes.items() if note["number"] == self._number}
        one = min(of_call)
        for name in dict.fromkeys(name for each in of_call.values() for name in each):
            first = of_call[one].get(name)
            others = [p for p, each in sorted(of_call.items()) if each.get(name) != first]
            if others:
                raise CallMismatchError(
                    f"call {self._number} differs between processes: {who_has([one])} {name!r}: "
                    f"{first}; {who_has(others)} {name!r}: {of_call[others[0]].get(name)}"
                )

    def _wait(self, call: str) -> dict[int, dict[str, Any]]:
        """Wait until all processes have made this call; return the note of each."""
        end = time.monotonic() + self._seconds
        while True:
            notes = {process: json.loads(note) for process, note in self._board.read().items()}
            late = [
                process
                for process in range(self._board.num_processes)
                if notes.get(process, {"number": 0})["number"] < self._number
            ]
            if not late:
                return notes
            if time.monotonic() > end:
                last = notes.get(late[0], {"number": 0, "facts": {"call": "none"}})
                raise CallMismatchError(
                    f"process {self._board.process} is at call {self._number}, {call}; "
                    f"{who_has(late)} not come there in {self._seconds:g} s: the last call of "
                    f"process {late[0]} is {last['number']}, {last['facts']['call']}"
                )
            time.sleep(_POLL)


_sequences: dict[str, CallSequence] = {}


def check_call(sequence: str, call: str, facts: Callable[[], Mapping[str, str]]) -> None:
    """Compare the next call of a sequence with the other processes' if `SWITCH` is set.

    ``facts`` returns descriptions, by name, that must be the same in all processes.
    """
    # Calls of one thread have an order and those of two threads have none, so each thread has a
    # sequence.
    text = os.environ.get(SWITCH)
    if not text or jax.process_count() == 1:
        return
    if sequence not in _sequences:
        try:
            seconds = float(text)
        except ValueError:
            raise ValueError(f"{SWITCH} is a number of seconds, got {text!r}") from None
        _sequences[sequence] = CallSequence(NoteBoard(f"calls of {sequence}"), seconds)
    _sequences[sequence].compare(call, facts())


def batch_facts(batch: Any) -> dict[str, str]:
    """Describe the shape and type of each leaf of a batch, by its path."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(
        batch, is_leaf=lambda leaf: isinstance(leaf, KeyedJaggedArray)
    )
    return {f"batch{jax.tree_util.keystr(path)}": _form(leaf) for path, leaf in leaves}


def table_facts(model: Any) -> dict[str, str]:
    """Describe a model's tables over a mesh, and their capacity factors, by collection."""
    if not isinstance(model, nnx.Module):
        return {}
    return {
        f"tables at {path!r}": ", ".join(
            f"{table.name} {table.num_embeddings} x {table.embedding_dim}"
            for table in store.layout.configs
        )
        + f"; capacity factors {dict(store.capacity_factors)}"
        for path, store in mesh_stores(model).items()
    }


def _form(leaf: Any) -> str:
    if isinstance(leaf, KeyedJaggedArray):
        weights = "" if leaf.weights is None else " with weights"
        form = f"{_form(leaf.values)}{weights} of keys {leaf.keys}, capacities {leaf.capacities}"
        return f"{form}, bags {leaf.strides}"
    return f"{getattr(leaf, 'dtype', type(leaf).__name__)}{list(getattr(leaf, 'shape', ()))}"
