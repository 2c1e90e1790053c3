"""Processes of a job: how they start, exchange notes, and watch each other.

If a process is lost, the others end with a line that names it. Without the watch they would wait
for it in a collective until JAX notices, and then abort with a trace of C++.

Each process holds a connection to process 0. The operating system closes it when the process is
killed or crashes, or when its host has not answered for some seconds. A process needs no Python
code for that, so one that computes or compiles for long is never taken for lost.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import hmac
import json
import logging
import math
import os
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax
from flax import nnx

_PREFIX = "jaxrec"


class NoteBoard:
    """Notes of the processes on one subject: each writes its own, and all read them."""

    # JAX's coordination service holds the notes. Unlike gathers of arrays, they need neither a
    # device nor an order that all processes share, so any thread may write and read them.

    def __init__(self, subject: str) -> None:
        # JAX's public interface gives no access to the service's keys and values.
        from jax._src import distributed

        client = distributed.global_state.client
        if client is None:
            raise RuntimeError(
                "the processes of this job do not know each other; call "
                "jaxrec.mesh.join_processes() before anything else of JAX"
            )
        self._client: Any = client
        self.process, self.num_processes = jax.process_index(), jax.process_count()
        self._directory = f"{_PREFIX}/{urllib.parse.quote(subject, safe='')}/"

    def write(self, note: str) -> None:
        """Replace this process's note."""
        key = f"{self._directory}{self.process}"
        self._client.key_value_set(key, note, allow_overwrite=True)

    def read(self) -> dict[int, str]:
        """Return the notes by process; a process that wrote none is missing."""
        notes = {}
        for key, note in self._client.key_value_dir_get(self._directory):
            with contextlib.suppress(ValueError):
                notes[int(key.rpartition("/")[2])] = note
        return notes


def who_has(processes: list[int]) -> str:
    """Return the start of a sentence, such as "processes 1, 2 and 5 have"."""
    if len(processes) == 1:
        return f"process {processes[0]} has"
    return f"processes {', '.join(map(str, processes[:-1]))} and {processes[-1]} have"


logger = logging.getLogger(__name__)

LOST_AFTER_SECONDS = 20
"""Default seconds without an answer of its host after which a process counts as lost."""

# Seconds to wait for a first connection, and for JAX to abort once process 0 is lost.
_CONNECT_SECONDS, _ABORT_SECONDS = 60.0, 1.0

# Seconds by which an error of a collective may come before the news that a process is lost.
_NEWS_SECONDS = 3.0

# Seconds for processes that have not connected yet to do so and learn of a lost one.
_TELL_SECONDS = 2.0

_BYE, _LOST = "bye", "lost"

# Longest message. A connection that sends a longer one is closed.
_MAX_BYTES = 1024

_started = threading.Lock()


def watch_processes(lost_after: int = LOST_AFTER_SECONDS) -> None:
    """Start a thread that ends this process if another one is lost; a second call does nothing.

    `jaxrec.mesh.join_processes` and `jaxrec.shard` call it.
    """
    if jax.process_count() == 1 or not jax.distributed.is_initialized():
        return
    if not _started.acquire(blocking=False):
        return
    board = NoteBoard("watch")
    watch = _Center(board, lost_after) if board.process == 0 else _Member(board, lost_after)
    threading.Thread(target=watch.run, name="watch", daemon=True).start()
    atexit.register(watch.say_goodbye)


@contextlib.contextmanager
def losses_first() -> Iterator[None]:
    """Within this context, delay errors of collectives: the name of a lost process comes first."""
    # The collective fails because a process is lost, but its error does not say which. The thread
    # that watches has some seconds to end this process with the name.
    try:
        yield
    except Exception as error:
        is_of_collective = isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error)
        if _started.locked() and is_of_collective:
            time.sleep(_NEWS_SECONDS)
        raise


class _Lines:
    """A connection whose messages are lines of JSON."""

    def __init__(self, connection: socket.socket, lost_after: int) -> None:
        self.connection = connection
        self._received = b""
        # TCP asks an idle host for an answer, and closes the connection if none comes in time.
        for level, name, value in (
            (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
            (socket.IPPROTO_TCP, "TCP_KEEPIDLE", max(1, lost_after // 2)),
            (socket.IPPROTO_TCP, "TCP_KEEPINTVL", max(1, lost_after // 8)),
            (socket.IPPROTO_TCP, "TCP_KEEPCNT", 4),
            (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", 1000 * lost_after),
        ):
            if hasattr(socket, name):  # macOS has other names, and longer times
                connection.setsockopt(level, getattr(socket, name), value)

    def send(self, *message: Any) -> None:
        with contextlib.suppress(OSError):  # the other end is gone, as the next `receive` says
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Any] | None:
        """Wait for bytes; return the complete messages, or None once the connection has ended."""
        try:
            received = self.connection.recv(_MAX_BYTES)
            *lines, self._received = (self._received + received).split(b"\n")
            is_open = received and len(self._received) < _MAX_BYTES
            return [json.loads(line) for line in lines] if is_open else None
        except (OSError, ValueError, RecursionError):
            return None


class _Center:
    """Process 0's part of the watch: it notices a lost process and tells all others."""

    def __init__(self, board: NoteBoard, lost_after: int) -> None:
        self._lost_after, self._num_processes = lost_after, board.num_processes
        self._members: dict[int, _Lines] = {}
        self._left: set[int] = set()
        self._is_ending = False
        self._lost: int | None = None  # the first process that was lost
        self._told: set[int] = set()  # processes that were told of it
        self._end_at = math.inf
        # The port is open to the network, so members prove themselves by the token in the note. A
        # stranger that connects and leaves must not end the job.
        self._token = secrets.token_hex(16)
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        self._server = socket.create_server(
            ("", 0), family=family, dualstack_ipv6=family == socket.AF_INET6
        )
        board.write(json.dumps([self._server.getsockname()[1], self._token]))

    def run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._server, selectors.EVENT_READ)
            while not self._is_over():
                for key, _ in selector.select(self._seconds_left()):
                    if key.data is None:
                        with contextlib.suppress(OSError):  # the caller has gone again
                            lines = _Lines(self._server.accept()[0], self._lost_after)
                            selector.register(lines.connection, selectors.EVENT_READ, [lines, None])
                    elif not self._hear(key.data):
                        selector.unregister(key.fileobj)
                        key.data[0].connection.close()
        assert self._lost is not None
        _end(self._lost, self._num_processes)

    def _seconds_left(self) -> float | None:
        """Return the seconds left to tell all processes of a lost one; None: no process is lost."""
        return None if self._lost is None else max(0.0, self._end_at - time.monotonic())

    def _is_over(self) -> bool:
        """Return whether all other processes were told of a lost one, or had time to connect."""
        # A process that connects only now, in the first seconds of a job, would else find this one
        # gone, and name it as the lost one.
        if self._lost is None:
            return False
        known = self._told | self._left | {self._lost}
        return self._seconds_left() == 0 or known.issuperset(range(1, self._num_processes))

    def _hear(self, data: list[Any]) -> bool:
        """Receive a connection's messages; return whether it stays open.

        ``data`` is ``[connection, process]``, where the process is None until it is known.
        """
        lines, process = data
        messages = lines.receive()
        for message in messages or ():
            if process is None:
                process = data[1] = self._number_of(message)
                if process is None:
                    return False  # a stranger
                self._members[process] = lines
                self._tell()
            elif message == [_BYE]:
                self._left.add(process)
        if messages is None and process is not None:
            del self._members[process]
            # Members that have heard this process's goodbye end without one of their own.
            if process not in self._left and not self._is_ending and self._lost is None:
                self._lost, self._end_at = process, time.monotonic() + _TELL_SECONDS
                self._tell()
        return messages is not None

    def _tell(self) -> None:
        """If a process is lost, tell the members that were not told yet."""
        if self._lost is not None:
            for number in self._members.keys() - self._told:
                self._members[number].send(_LOST, self._lost)
                self._told.add(number)

    def _number_of(self, message: Any) -> int | None:
        """Return the process that a connection's first message names; None: it names none."""
        if not isinstance(message, list) or len(message) != 2:
            return None
        token, process = message
        # Compared in constant time, so that answers do not give the token away byte by byte.
        is_member = isinstance(token, str) and hmac.compare_digest(
            token.encode(), self._token.encode()
        )
        return process if is_member and process in range(1, self._num_processes) else None

    def say_goodbye(self) -> None:
        """Tell the other processes that this one ends in order."""
        if self._lost is not None:  # an exception of a collective came before `run` was over
            _end(self._lost, self._num_processes)
        self._is_ending = True
        for member in list(self._members.values()):
            member.send(_BYE)


class _Member:
    """Another process's part of the watch: process 0 tells it of lost processes, or is lost."""

    def __init__(self, board: NoteBoard, lost_after: int) -> None:
        self._board, self._lost_after = board, lost_after
        self._lines: _Lines | None = None

    def run(self) -> None:
        lines = self._connect()
        if lines is None:
            logger.warning(
                "process %d cannot reach process 0 to watch it: the loss of a process will be "
                "noticed late",
                self._board.process,
            )
            return
        self._lines = lines
        _before_abort(self._end_if_lost)
        while (messages := lines.receive()) is not None:
            for kind, *process in messages:
                if kind == _BYE:
                    self._lines = None
                    return
                _end(process[0], self._board.num_processes)
        # JAX aborts the process now; the line comes after its trace.
        time.sleep(_ABORT_SECONDS)
        _end(0, self._board.num_processes)

    def _connect(self) -> _Lines | None:
        from jax._src import distributed

        host = str(distributed.global_state.coordinator_address).rpartition(":")[0].strip("[]")
        end = time.monotonic() + _CONNECT_SECONDS
        while time.monotonic() < end:
            note = self._board.read().get(0)
            if note is not None:
                port, token = json.loads(note)
                with contextlib.suppress(OSError):
                    connection = socket.create_connection(
                        (host, port), timeout=_CONNECT_SECONDS / 4
                    )
                    connection.settimeout(None)
                    lines = _Lines(connection, self._lost_after)
                    lines.send(token, self._board.process)
                    return lines
            time.sleep(0.2)
        return None

    def _end_if_lost(self) -> None:
        """End this process if process 0 has closed the connection without a goodbye."""
        if self._lines is None:
            return
        try:
            flags = socket.MSG_PEEK | socket.MSG_DONTWAIT
            is_closed = self._lines.connection.recv(1, flags) == b""
        except BlockingIOError:
            return
        except OSError:
            is_closed = True
        if is_closed:
            _end(0, self._board.num_processes)

    def say_goodbye(self) -> None:
        """Tell process 0 that this process ends in order."""
        self._end_if_lost()
        lines, self._lines = self._lines, None
        if lines is not None:
            lines.send(_BYE)


def _end(process: int, num_processes: int) -> NoReturn:
    """End this process with a last line that names the lost one."""
    # os._exit, since the main thread may wait in a collective for ever, where no exception reaches
    # it.
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    line = (
        f"process {process} of {num_processes} is lost: it was killed, it crashed, or its host "
        f"does not answer. Process {jax.process_index()} ends too; start the job again from its "
        "last checkpoint\n"
    )
    with contextlib.suppress(OSError):
        os.write(2, line.encode())
    os._exit(1)


_handlers: list[Any] = []


def _before_abort(action: Callable[[], None]) -> None:
    """Call a function when this process aborts, as JAX makes it when process 0 is lost."""
    # A handler of C, since Python runs its own handlers in the main thread, between bytecodes,
    # which an abort never reaches.
    kind = ctypes.CFUNCTYPE(None, ctypes.c_int)
    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)

    def handle(number: int) -> None:
        action()
        if before not in (None, ctypes.c_void_p(-1).value):
            kind(before)(number)

    handler = kind(handle)
    _handlers.append(handler)  # C keeps no reference
    before = libc.signal(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))


# Seconds that an ending process waits for the others. Bounded, since after a failure they may wait
# for it in turn.
SHUTDOWN_SECONDS = 30

# Seconds by which JAX's own notice of a lost process comes after that of `watch_processes`.
_LATER = 10


def join_processes(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    lost_after: int = LOST_AFTER_SECONDS,
) -> None:
    """Join the processes that a launcher started; without a launcher this process stays alone.

    Call it before any other function of JAX, instead of `jax.distributed.initialize`. JAX
    recognises Slurm, Open MPI, Kubernetes and TPU pods.

    If a process is lost later, the others end with exit code 1, within a few seconds after
    ``lost_after``. Their last line on standard error names the lost process.

    Programs of CPUs then run one after the other: ``jax_cpu_enable_async_dispatch`` is off.

    Args:
        coordinator: Address of process 0, ``host:port``, if JAX cannot detect it.
        num_processes: Number of processes, if JAX cannot detect it. With 1, and no coordinator,
            this process stays alone.
        process_id: Number of this process, from 0.
        lost_after: Seconds without an answer of its host after which a process counts as lost. A
            process that is killed or crashes is noticed at once.

    Raises:
        ValueError: Some arguments are given, but not the others that they need; a number is out of
            its range.
        RuntimeError: The other processes cannot be reached, or JAX has started already.

    Example:
        >>> import jaxrec
        >>> jaxrec.mesh.join_processes(num_processes=1)
        >>> jax.process_count()
        1
    """
    check_processes(coordinator, num_processes, process_id)
    if lost_after < 1:
        raise ValueError(f"lost_after is a number of seconds of 1 or more, got {lost_after}")
    if num_processes == 1 and coordinator is None:
        return
    by_hand = num_processes is not None or coordinator is not None
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            heartbeat_timeout_seconds=lost_after + _LATER,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except (ValueError, RuntimeError) as error:
        # JAX's errors without a launcher, and if it has started already, as in a notebook. Neither
        # is one, unless arguments asked for other processes.
        alone = ("coordinator_address", "must be called before")
        if by_hand or not any(reason in str(error) for reason in alone):
            raise
        return
    # A CPU orders programs on one device of a process apart from those on several of them: a gather
    # of numbers might start before the step in one process, and after it in another. JAX reads this
    # when it makes its devices, which joining does not.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    watch_processes(lost_after)


def check_processes(
    coordinator: str | None, num_processes: int | None, process_id: int | None
) -> None:
    """Raise a ValueError if the arguments of `join_processes` do not go together."""
    if coordinator is not None and None in (num_processes, process_id):
        raise ValueError("--coordinator needs --num-processes and --process-id")
    if num_processes is not None and num_processes < 1:
        raise ValueError(f"--num-processes is 1 or more, got {num_processes}")
    if process_id is not None and not 0 <= process_id < (num_processes or 1):
        raise ValueError(
            f"--process-id is one of 0 to --num-processes less 1, got {process_id} of "
            f"{num_processes}"
        )


def spans_processes(model: nnx.Module) -> bool:
    """Return whether a model is on devices of several processes."""
    leaves = jax.tree.leaves(nnx.state(model))
    return any(isinstance(x, jax.Array) and not x.is_fully_addressable for x in leaves)
