"""Processes that are forked from one that has imported JAX and the package.

Importing takes one to two seconds of each process. A fork is a process of its own otherwise: it
starts JAX, prints into files of its own, and is killed without harm to the others.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import pathlib
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from multiprocessing import reduction
from multiprocessing.connection import Connection

import pytest

# The checkout comes last, so that the installed package is tested.
_SERVER = """
import sys
sys.path.append(sys.argv[1])
from tests.forks import serve
serve(int(sys.argv[2]))
"""


class ForkServer:
    """A process that forks itself when asked to."""

    def __init__(self) -> None:
        self.files = tempfile.TemporaryDirectory(prefix="jaxrec-forks-")
        self.forks: list[Fork] = []
        self._connection, theirs = multiprocessing.Pipe()
        root = str(pathlib.Path(__file__).parents[1])
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _SERVER, root, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C is for the tests
        )
        theirs.close()

    def start(self, target: str, *arguments, environ: Mapping[str, str] | None = None) -> Fork:
        """Fork a process that calls a function and exits with its result.

        Args:
            target: The function, as ``"package.module:function"``. Its first argument is a
                connection to this process.
            arguments: Its other arguments.
            environ: Environment variables of the process besides the server's. JAX has read its
                own already; `JAX_PLATFORMS` is heeded nevertheless.
        """
        ours, theirs = multiprocessing.Pipe()
        output = pathlib.Path(self.files.name, str(len(self.forks)))
        for suffix in (".out", ".err"):
            output.with_suffix(suffix).touch()
        self._connection.send(("start", target, arguments, dict(environ or {}), str(output)))
        reduction.send_handle(self._connection, theirs.fileno(), self._process.pid)
        theirs.close()
        fork = Fork(self, self._connection.recv(), ours, output)
        self.forks.append(fork)
        return fork

    def run(self, module: str, *arguments, environ: Mapping[str, str] | None = None) -> Fork:
        """Fork a process that runs ``python -m module`` with arguments."""
        arguments = map(str, arguments)
        return self.start("tests.forks:run_module", module, *arguments, environ=environ)

    def poll(self, pid: int) -> int | None:
        """Return the exit code of a fork that has ended, as `subprocess.Popen.poll` does."""
        self._connection.send(("poll", pid))
        return self._connection.recv()

    def stop(self) -> None:
        for fork in self.forks:
            fork.stop()
        self._connection.close()
        self._process.wait(timeout=60)
        self.files.cleanup()


class Fork:
    """A forked process.

    Attributes:
        connection: Connection to the process.
        code: Exit code, None while it runs.
    """

    def __init__(self, server: ForkServer, pid: int, connection: Connection, output: pathlib.Path):
        self.connection, self.code = connection, None
        self._server, self._pid, self._output = server, pid, output

    def poll(self) -> int | None:
        if self.code is None:
            self.code = self._server.poll(self._pid)
        return self.code

    def wait(self, timeout: float) -> int:
        """Return the exit code; raise `TimeoutError` if the process has not ended by then."""
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise TimeoutError(f"the process has not ended in {timeout} s:\n{self.errors}")
            time.sleep(0.005)
        return self.code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self._pid, number)

    def stop(self) -> int:
        """Kill the process unless it has ended, and return its exit code."""
        self.send_signal(signal.SIGKILL)
        self.connection.close()
        return self.wait(60)

    @property
    def output(self) -> str:
        """Standard output until now."""
        return self._output.with_suffix(".out").read_text()

    @property
    def errors(self) -> str:
        """Standard error until now."""
        return self._output.with_suffix(".err").read_text()


def serve(handle: int) -> None:
    """Answer the requests of a `ForkServer`; a fork returns from here to exit as any process."""
    connection = Connection(handle)
    for module in ("jaxrec.commands.train", "jaxrec.tier", "optax", "pyarrow.parquet", "pytest"):
        importlib.import_module(module)
    from tests.quick import (
        SHARED_PROGRAMS,
        collect_garbage_rarely,
        compile_quickly,
        draw_small_blocks,
        lower_without_sources,
        share_programs,
    )

    share_programs(os.environ[SHARED_PROGRAMS])
    compile_quickly()
    lower_without_sources()
    draw_small_blocks()
    collect_garbage_rarely()
    codes: dict[int, int | None] = {}
    with contextlib.suppress(EOFError):
        while True:
            request, *arguments = connection.recv()
            if request == "start":
                theirs = reduction.recv_handle(connection)
                pid = os.fork()
                if not pid:
                    connection.close()
                    sys.exit(_call(Connection(theirs), *arguments))
                os.close(theirs)
                codes[pid] = None
                connection.send(pid)
            else:
                (pid,) = arguments
                if codes[pid] is None:
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    codes[pid] = os.waitstatus_to_exitcode(status) if ended else None
                connection.send(codes[pid])
    for pid, code in codes.items():
        if code is None:  # the tests were killed
            os.kill(pid, signal.SIGKILL)


def _call(connection, target, arguments, environ, output):
    """Call a function in a fork whose standard output and error are files."""
    import jax

    os.environ.update(environ)
    if "JAX_PLATFORMS" in environ:
        jax.config.update("jax_platforms", environ["JAX_PLATFORMS"])
    for suffix, stream in ((".out", sys.stdout), (".err", sys.stderr)):
        with open(output + suffix, "wb") as file:
            os.dup2(file.fileno(), stream.fileno())
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)(connection, *arguments)


def run_module(connection, name: str, *arguments: str) -> None:
    """Run ``python -m name`` with arguments."""
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="session")
def forks() -> Iterator[ForkServer]:
    """Server that forks processes for the tests of this process."""
    server = ForkServer()
    yield server
    server.stop()
