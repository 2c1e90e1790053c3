"""The server process: signals, slow clients, large bodies, and limits."""

from __future__ import annotations

import json
import pathlib
import signal
import socket
import threading
import time

import pytest

from jaxrec.commands import main
from jaxrec.serve.http.limits import Limits
from jaxrec.serve.http.server import (
    LimitedProtocol,
    ModelServer,
    address_of,
    allow_connections,
    listen,
)
from tests.serve.http.endpoint import JSON, endpoint, process, wait
from tests.serve.http.models import raw_model, raw_table

pytestmark = pytest.mark.every_case

BODY = raw_table(4).drop_columns("label").to_pydict()


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("server") / "model"
    raw_model(path)
    return path


@pytest.fixture(scope="module")
def served(path):
    from jaxrec.serve import load

    return load(path)


def peak_megabytes(pid: int) -> float:
    text = pathlib.Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in text.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def connect(port: int, text: str) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), timeout=20)
    client.sendall(text.encode())
    return client


def read_all(client: socket.socket) -> bytes:
    parts = []
    with client:
        while part := client.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def test_sigterm_under_load_answers_what_was_accepted(path):
    """Later connections are refused by the system; one that begins at the very end may be reset."""
    with process(path, "--drain-s", "0.5") as (client, server):
        answers, errors, refused = [], [], threading.Event()

        def send() -> None:
            while not refused.is_set():
                try:
                    answers.append(client.post(BODY))
                except ConnectionRefusedError:
                    refused.set()
                except Exception as error:
                    errors.append(error)

        threads = [threading.Thread(target=send) for _ in range(4)]
        for thread in threads:
            thread.start()
        wait(lambda: len(answers) > 20 or errors)
        server.send_signal(signal.SIGTERM)
        wait(lambda: client.get("/ready").status == 503)
        before = len(answers)
        for thread in threads:
            thread.join(30)
        assert server.wait(20) == 0
    # A client whose connection was reset is refused at its next attempt.
    assert len(errors) <= len(threads)
    assert all(isinstance(error, ConnectionResetError) for error in errors), errors
    assert {answer.status for answer in answers} == {200}
    assert len({answer.body for answer in answers}) == 1
    assert len(answers) > before  # the server took requests while it was not ready


def test_connections_that_wait_at_the_end_are_answered(served, monkeypatch):
    """The system has completed them, and nothing has accepted them when the server stops."""
    waiting, pause = [], ModelServer._pause

    async def pause_after_connections(self, seconds, **options):
        if not waiting:  # The event loop does not run meanwhile.
            (listener,) = self.servers[0].sockets
            text = "GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
            waiting.extend(connect(listener.getsockname()[1], text) for _ in range(3))
            return
        await pause(self, seconds, **options)

    monkeypatch.setattr(ModelServer, "_pause", pause_after_connections)
    with endpoint(served, Limits(drain=0.0)) as client:
        assert client.get("/health").status == 200
    assert [b'{"status":"alive"}' in read_all(each) for each in waiting] == [True] * 3
    with pytest.raises(ConnectionRefusedError):
        client.get("/health")


def test_sigint_ends_an_idle_server(path):
    with process(path, "--drain-s", "0") as (client, server):
        assert client.post(BODY).status == 200
        server.send_signal(signal.SIGINT)
        assert server.wait(20) == 0


@pytest.mark.slow
def test_bodies_of_a_gigabyte_are_refused_in_little_memory(path):
    with process(path) as (client, server):
        assert client.post(BODY).status == 200
        before = peak_megabytes(server.pid)
        head = f"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: {JSON}\r\n"
        announced = connect(client.port, f"{head}content-length: {1 << 30}\r\n\r\n")
        chunked = connect(client.port, f"{head}transfer-encoding: chunked\r\n\r\n")
        chunk = b"%x\r\n%s\r\n" % (1 << 20, b" " * (1 << 20))
        sent = 0
        try:
            for _ in range(1 << 10):
                chunked.sendall(chunk)
                sent += 1
        except OSError:  # closed, after the response
            pass
        assert sent >= 16
        assert b" 413 " in read_all(announced)
        assert b" 413 " in read_all(chunked)
        assert client.post(BODY).status == 200
        assert peak_megabytes(server.pid) - before < 150


@pytest.mark.slow
def test_slow_clients_do_not_hinder_others(served):
    limits = Limits(drain=0.0, read_timeout=1.0)
    half = "POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with endpoint(served, limits) as client:
        headers = [connect(client.port, half) for _ in range(50)]
        bodies = [
            connect(client.port, half + 'content-length: 100\r\n\r\n{"age":') for _ in range(50)
        ]
        stop = time.monotonic() + 0.8
        while time.monotonic() < stop:
            assert client.post(BODY).status == 200
            for slow in headers[:5]:
                slow.sendall(b"x: y\r\n")
        for slow in headers:
            assert b"the header did not come within 1 s" in read_all(slow)
        for slow in bodies:
            answer = read_all(slow)
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b"the body did not come within 1 s; 7 bytes did" in answer


def test_connections_that_end_early(served):
    with endpoint(served, Limits(drain=0.0)) as client:
        for text in (
            "",
            "POST",
            "POST /predict HTTP/1.1\r\ncontent-length: 9\r\n\r\n{",
            "\x00\xff",
        ):
            connect(client.port, text).close()
        assert b"400 Bad Request" in read_all(connect(client.port, "no http\r\n\r\n"))
        assert client.post(BODY).status == 200


@pytest.fixture
def loading(served, monkeypatch):
    """An event; the model is not loaded before it is set."""
    loaded, warm_up = threading.Event(), served.warm_up
    monkeypatch.setattr(served, "warm_up", lambda: (loaded.wait(20), warm_up()))
    yield loaded
    loaded.set()


def test_requests_wait_for_the_model(served, loading):
    printed = []
    with endpoint(
        served, Limits(drain=0.0), until_ready=False, on_ready=lambda: printed.append("ready")
    ) as client:
        assert client.get("/example").status == 200
        answers = []
        threads = [
            threading.Thread(target=lambda: answers.append(client.post(BODY))) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        assert client.get("/ready").status == 503
        assert (answers, printed) == ([], [])
        loading.set()
        for thread in threads:
            thread.join(20)
        assert [answer.status for answer in answers] == [200] * 3
        assert printed == ["ready"]
        assert client.get("/ready").status == 200


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"timeout": 0.2}, "the model was not loaded within 0.2 s; try again later"),
        ({"max_concurrent": 0}, "the model is being loaded, and 0 requests wait for it; try again"),
    ],
    ids=["time", "number"],
)
def test_requests_wait_for_the_model_within_limits(served, loading, limits, message):
    with endpoint(served, Limits(drain=0.0, **limits), until_ready=False) as client:
        answer = client.post(BODY)
        assert (answer.status, message in answer.json["error"]) == (503, True), answer.body
        assert answer.headers["retry-after"] == "1"
        loading.set()


@pytest.mark.parametrize("size", [66_000, 130_000, 300_000])
def test_a_header_that_is_too_large(served, size):
    text = f"GET /health HTTP/1.1\r\nhost: localhost\r\nx-large: {'y' * size}\r\n\r\n"
    with endpoint(served, Limits(drain=0.0)) as client:
        answer = read_all(connect(client.port, text))
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert b"the header is larger than 65,536 bytes" in answer
        assert client.get("/health", x_large="y" * 60_000).status == 200


@pytest.mark.parametrize("protocol", ["websocket", "h2c"])
def test_other_protocols_are_answered_as_http(served, protocol, caplog):
    with endpoint(served, Limits(drain=0.0)) as client:
        answer = client.post(BODY, connection="upgrade", upgrade=protocol)
    assert answer.status == 200
    assert not caplog.records


@pytest.mark.parametrize("where", ["header", "trailer"])
def test_headers_without_end(served, where):
    with endpoint(served, Limits(drain=0.0, read_timeout=2.0)) as client:
        text = f"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: {JSON}\r\n"
        if where == "trailer":
            text += "transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
        is_closed = False
        with connect(client.port, text) as slow:
            try:
                for number in range(200_000):
                    slow.sendall(b"x-%d: %s\r\n" % (number, b"y" * 50))
                assert slow.recv(1 << 16).startswith(b"HTTP/1.1 408 ")
            except OSError:
                is_closed = True
        assert is_closed or where == "trailer"
        assert client.post(BODY).status == 200


def test_several_requests_of_a_connection(served):
    body = json.dumps(BODY)
    text = (
        "POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n{body}"
    )
    last = text.replace("\r\nhost", "\r\nconnection: close\r\nhost", 1)
    with endpoint(served, Limits(drain=0.0)) as client:
        answers = read_all(connect(client.port, text * 3 + last))
    assert answers.count(b"HTTP/1.1 200 OK") == 4


def test_responses_leave_at_once(served):
    """Without TCP_NODELAY each waits for the client's acknowledgement, 40 ms on Linux."""
    seen = []
    made = LimitedProtocol.connection_made

    def connection_made(self, transport):
        made(self, transport)
        connection = transport.get_extra_info("socket")
        seen.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LimitedProtocol, "connection_made", connection_made)
        with endpoint(served, Limits(drain=0.0)) as client:
            assert client.get("/health").status == 200
    assert seen
    assert all(seen)


@pytest.mark.parametrize(
    ("limits", "status", "message"),
    [
        ({"max_body": 10}, 413, "the body is larger than"),
        ({"max_samples": 3}, 413, "4 samples, and the server takes 3 at most"),
        ({"max_buffer": 10}, 503, "try again later"),
        ({"max_concurrent": 0}, 503, "0 requests are under way; try again later"),
        ({"timeout": 1e-6}, 504, "was not answered within 1e-06 s"),
    ],
    ids=["body", "samples", "buffer", "concurrent", "timeout"],
)
def test_limits(served, limits, status, message):
    with endpoint(served, Limits(drain=0.0, **limits)) as client:
        answer = client.post(BODY)
        assert (answer.status, message in answer.json["error"]) == (status, True), answer.body
        if status == 503:
            assert answer.headers["retry-after"] == "1"


def test_too_many_connections(served):
    with endpoint(served, Limits(drain=0.0, max_connections=3)) as client:
        kept = [connect(client.port, "GET") for _ in range(3)]
        assert b"too many connections; try again later" in read_all(connect(client.port, ""))
        for each in kept:
            each.close()
        wait(lambda: client.get("/health").status == 200)


def test_wrong_commands(path, capsys, tmp_path):
    with listen("127.0.0.1", 0) as listener:
        taken = str(listener.getsockname()[1])
        for arguments, code, message in (
            ((), 2, "give the directory of an exported model: MODEL"),
            ((str(path), "--max-batch", "0"), 2, "--max-batch must be above 0, got 0"),
            ((str(path), "--max-delay-ms", "-1"), 2, "--max-delay-ms must be 0 or more, got -1"),
            ((str(path), "--timeout-s", "nan"), 2, "--timeout-s must be above 0, got nan"),
            ((str(path), "--port", "70000"), 2, "--port must be from 0 to 65535, got 70000"),
            ((str(path), "--max-body-mb", "999"), 2, "--max-buffer-mb must be --max-body-mb or"),
            ((str(tmp_path),), 1, "exported model: manifest.json is missing"),
            ((str(path), "--port", taken), 1, "Address already in use"),
            ((str(path), "--cache-mb", "-1"), 2, "--cache-mb must be 0 or more, got -1"),
            ((str(path), "--cache-mb", "64"), 2, "is another model, which keeps none"),
            ((str(path), "--deltas", "nope://x"), 1, "no folder has the URL 'nope://x'"),
        ):
            assert main(["serve", *arguments]) == code, arguments
            said = capsys.readouterr().err
            assert message in said
            assert said.count("\n") == 1


def test_addresses():
    with listen("127.0.0.1", 0) as listener:
        assert address_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}/"
    assert 0 < allow_connections(10) <= 10
