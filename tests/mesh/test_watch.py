"""A process that is lost ends the others, with a last line that names it."""

from __future__ import annotations

import json
import signal
import socket
import time

import pytest

from jaxrec.mesh import processes
from tests.forks import free_port
from tests.mesh.test_batch_counts import Board


class Ended(Exception):
    """In the place of the end of a process."""


@pytest.fixture
def center(monkeypatch):
    """Process 0 of four, and a function that makes another process's connection to it."""

    def end(process, num_processes):
        raise Ended(process, num_processes)

    monkeypatch.setattr(processes, "_end", end)
    board = Board(0, 4, {})
    center = processes._Center(board, lost_after=20)
    port, token = json.loads(board.read()[0])
    opened = []

    def connect(*message):
        theirs = socket.create_connection(("localhost", port), timeout=5)
        ours, _ = center._server.accept()
        opened.extend((ours, theirs))
        data = [processes._Lines(ours, 20), None]
        if message:
            theirs.sendall(json.dumps(message).encode() + b"\n")
            center._hear(data)
        return data, theirs

    yield center, connect, token
    center._server.close()
    for each in opened:
        each.close()


def test_all_hear_of_a_lost_process(center):
    center, connect, token = center
    (_, first), (data, second) = connect(token, 1), connect(token, 2)
    second.close()
    center._hear(data)
    assert first.recv(100) == b'["lost", 2]\n'
    # One that connects only now hears of the same process, not of this one's end.
    assert not center._is_over()
    _, third = connect(token, 3)
    assert third.recv(100) == b'["lost", 2]\n'
    assert center._is_over()
    with pytest.raises(Ended) as raised:
        center.say_goodbye()
    assert raised.value.args == (2, 4)


def test_a_process_that_never_connects_is_not_waited_for(center, monkeypatch):
    center, connect, token = center
    monkeypatch.setattr(processes, "_TELL_SECONDS", 0.0)
    data, other = connect(token, 2)
    other.close()
    center._hear(data)
    with pytest.raises(Ended) as raised:
        center.run()
    assert raised.value.args == (2, 4)


def test_a_process_that_says_goodbye_is_not_lost(center):
    center, connect, token = center
    data, other = connect(token, 3)
    other.sendall(b'["bye"]\n')
    assert center._hear(data)
    other.close()
    assert not center._hear(data)
    connect(token, 1)
    center.say_goodbye()


@pytest.mark.every_case
@pytest.mark.parametrize(
    "message",
    [b"GET / HTTP/1.1\r\n\r\n", b"5\n", b'["x", 1]\n', b'["x"]\n', b"[" * 2000, b"\xff\n", b""],
    ids=["http", "number", "token", "short", "deep", "bytes", "nothing"],
)
def test_strangers_are_sent_away(center, message):
    center, connect, _ = center
    data, other = connect()
    other.sendall(message)
    other.close()
    heard = [center._hear(data) for _ in range(2)]
    assert not all(heard)
    assert center._members == {}


@pytest.mark.parametrize("number", [0, 4, "1", None])
def test_numbers_that_are_none(center, number):
    center, connect, token = center
    connect(token, number)
    assert center._members == {}


@pytest.mark.slow
@pytest.mark.jax_version
@pytest.mark.every_case
@pytest.mark.parametrize(
    ("victim", "is_started_by_hand"), [(2, False), (0, False), (1, True), (None, False)]
)
def test_one_of_three_is_killed(forks, victim, is_started_by_hand):
    port = free_port()
    processes = [
        forks.start("tests.mesh.watched:work", port, process, 3, is_started_by_hand)
        for process in range(3)
    ]
    try:
        for process in processes:
            assert process.connection.poll(120), process.errors
            process.connection.recv()
        if victim is None:
            processes[1].connection.send("end")
            assert [process.wait(60) for process in processes] == [0] * 3
            assert not any("lost" in process.errors for process in processes)
            return
        start = time.monotonic()
        processes[victim].send_signal(signal.SIGKILL)
        for number, process in enumerate(processes):
            assert process.wait(60) == (-signal.SIGKILL if number == victim else 1)
            # Threads of gRPC may write further lines.
            lines = process.errors.splitlines()
            says = [line.startswith(f"process {victim} of 3 is lost: ") for line in lines]
            assert number == victim or any(says), process.errors
        assert time.monotonic() - start < 30
    finally:
        for process in processes:
            process.stop()
