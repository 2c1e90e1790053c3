"""Two processes of two CPU devices each, joined by gloo, which run scenarios.

A scenario is a function that both processes call. Its keyword arguments and its result are pickled.
"""

from __future__ import annotations

import importlib
import time
import traceback
from collections.abc import Iterator

import pytest

from tests.forks import Fork, ForkServer, forks, free_port

__all__ = ["Pair", "forks", "pair"]

# Seconds that one process has to answer after the other one failed.
_GRACE = 10.0


class Pair:
    """Two processes that run one scenario after another.

    Attributes:
        processes: The processes, started by the first scenario. Empty before it, and after a
            scenario that failed.
    """

    def __init__(self, forks: ForkServer, heartbeat_timeout: int = 100):
        self.processes: list[Fork] = []
        self._forks, self._heartbeat_timeout = forks, heartbeat_timeout

    def send(self, scenario: str, /, **arguments) -> list[Fork]:
        """Let both processes call ``"package.module:function"``; do not wait for the results."""
        if not self.processes:
            port = free_port()
            self.processes = [
                self._forks.start("tests.pairs:serve", port, process, self._heartbeat_timeout)
                for process in range(2)
            ]
        for process in self.processes:
            process.connection.send((scenario, arguments))
        return self.processes

    def run(self, scenario: str, /, *, timeout: float = 300, **arguments) -> list:
        """Return the results of both processes.

        Raises:
            AssertionError: If the scenario raises an error in a process, or a process ends or does
                not answer in time; with the errors of both. The next scenario has new processes.
        """
        processes = self.send(scenario, **arguments)
        end = time.monotonic() + timeout
        answers: dict[int, tuple] = {}
        while len(answers) < 2 and time.monotonic() < end:
            for number, process in enumerate(processes):
                if number not in answers and process.connection.poll(0.01):
                    try:
                        answers[number] = process.connection.recv()
                    except (EOFError, ConnectionError):
                        answers[number] = ("the process ended", None)
                    if answers[number][0]:
                        end = min(end, time.monotonic() + _GRACE)
        failures = [
            f"process {number}: {answers.get(number, ('no answer', None))[0]}\n{process.errors}"
            for number, process in enumerate(processes)
        ]
        if len(answers) < 2 or any(error for error, _ in answers.values()):
            self.stop()
            raise AssertionError(f"{scenario} failed\n" + "\n".join(failures))
        return [answers[number][1] for number in range(2)]

    def stop(self) -> None:
        for process in self.processes:
            process.stop()
        self.processes = []


def serve(connection, port: int, process: int, heartbeat_timeout: int) -> None:
    """Run the scenarios that a `Pair` sends."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"localhost:{port}",
        num_processes=2,
        process_id=process,
        heartbeat_timeout_seconds=heartbeat_timeout,
    )
    while True:
        try:
            scenario, arguments = connection.recv()
        except EOFError:
            return
        module, _, function = scenario.partition(":")
        try:
            result = getattr(importlib.import_module(module), function)(**arguments)
        except BaseException:
            connection.send((traceback.format_exc(), None))
            raise
        connection.send(("", result))


@pytest.fixture(scope="session")
def pair(forks: ForkServer) -> Iterator[Pair]:
    """The two processes that the tests of this process share."""
    shared = Pair(forks)
    yield shared
    shared.stop()
