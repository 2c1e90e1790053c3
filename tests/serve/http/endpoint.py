"""Endpoints on a free port: in a thread of the tests, and in a process of their own."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from jaxrec.serve.http.app import Application, loopback_hosts
from jaxrec.serve.http.limits import Limits
from jaxrec.serve.http.server import ModelServer, listen

JSON = "application/json"
ARROW = "application/vnd.apache.arrow.stream"


@dataclasses.dataclass(frozen=True)
class Answer:
    """A response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def table(self) -> pa.Table:
        return pa.ipc.open_stream(self.body).read_all()


@dataclasses.dataclass(frozen=True)
class Client:
    """A client of an endpoint; each request has a connection of its own."""

    port: int

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        with contextlib.closing(connection):
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, named)
            response = connection.getresponse()
            content = response.read()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, found, content)

    def get(self, path: str, **headers: str) -> Answer:
        return self.request("GET", path, **headers)

    def post(self, columns: Any, **headers: str) -> Answer:
        """Send columns in JSON, text as it is, or an Arrow table."""
        if isinstance(columns, pa.Table):
            headers = {"content_type": ARROW} | headers
            body: str | bytes = stream(columns)
        else:
            headers = {"content_type": JSON} | headers
            body = columns if isinstance(columns, str | bytes) else json.dumps(columns)
        return self.request("POST", "/predict", body, **headers)


def stream(table: pa.Table, compression: str | None = None) -> bytes:
    """Return an Arrow IPC stream of a table."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, table.schema, options=options) as file:
        file.write_table(table)
    return sink.getvalue().to_pybytes()


@contextlib.contextmanager
def endpoint(
    served: Any, limits: Limits | None = None, *, until_ready: bool = True, **options: Any
) -> Iterator[Client]:
    """Serve a model in a thread, and wait until it is ready."""
    limits = limits or Limits(drain=0.0)
    options.setdefault("allowed_hosts", loopback_hosts("127.0.0.1"))
    application = Application(served, limits, **options)
    with listen("127.0.0.1", 0) as listener:
        client = Client(listener.getsockname()[1])
        server = ModelServer(application)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            if until_ready:
                wait(lambda: application.is_ready or application.failure or not thread.is_alive())
            yield client
        finally:
            server.handle_exit(15, None)
            thread.join(60)
            assert not thread.is_alive()


def wait(is_true: Any, seconds: float = 60.0) -> None:
    """Wait until a function returns something true."""
    stop = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < stop, "it did not become true"
        time.sleep(0.01)


@contextlib.contextmanager
def process(path: pathlib.Path, *options: str) -> Iterator[tuple[Client, subprocess.Popen]]:
    """Serve a model by the command, which says when it is ready."""
    command = [sys.executable, "-P", "-m", "jaxrec", "serve", str(path), "--port", "0", *options]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert " at http://127.0.0.1:" in line, line + server.stdout.read()
        client = Client(int(line.rstrip("/\n").rpartition(":")[2]))
        assert client.get("/ready").status == 200
        yield client, server
    finally:
        server.kill()
        server.wait()
        assert server.stdout is not None
        server.stdout.close()
