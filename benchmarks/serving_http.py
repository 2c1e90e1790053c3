"""Latency, throughput, memory and robustness of ``jaxrec serve`` on loopback.

    python -m benchmarks.serving_http [--model MODEL] [--seconds 5]
    python -m benchmarks.serving_http --only slow --slow-clients 10000
    python -m benchmarks.serving_http --only bodies --bodies 8
    python -m benchmarks.serving_http --only fuzz --fuzz 1000000

The server is a process of its own; this one sends the requests, on the same cores. ``load``
measures the largest throughput with 32 connections that always wait for a response, and then the
latencies of an open loop at a quarter of that rate: requests are due at fixed times, and a latency
begins when its request is due. ``slow`` keeps connections open that send a byte of a header or of
a body now and then, ``bodies`` sends bodies of 1 GB, and both count requests of others that fail.
``fuzz`` decodes and predicts bodies with random damage. Each result is a line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import pathlib
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

GIGABYTE = 1 << 30
CONNECTIONS = 32
JSON, ARROW = "application/json", "application/vnd.apache.arrow.stream"
PARTS = ("load", "slow", "bodies", "fuzz")


class Server(NamedTuple):
    """A server process."""

    port: int
    pid: int

    @property
    def peak_megabytes(self) -> float:
        lines = pathlib.Path(f"/proc/{self.pid}/status").read_text().splitlines()
        (peak,) = (line.split()[1] for line in lines if line.startswith("VmHWM"))
        return int(peak) / 1024


def export_model(path: pathlib.Path, rows: int) -> None:
    """Export a DLRM of the generated log's columns: 13 numbers and 26 ids."""
    from flax import nnx

    import jaxrec
    from jaxrec.data import TableEncoder
    from jaxrec.data.criteo.log import criteo_schema

    encoder = TableEncoder(criteo_schema([rows] * 26), {}, {}, {})
    tables = [jaxrec.EmbeddingBagConfig(name, rows, 16) for name in encoder.schema.categorical]
    model = jaxrec.nn.DLRM(
        jaxrec.EmbeddingBagCollection(tables, rngs=nnx.Rngs(0)),
        num_dense=13,
        bottom_layer_sizes=(128, 64, 16),
        top_layer_sizes=(128, 64, 1),
        rngs=nnx.Rngs(0),
    )
    jaxrec.serve.export(model, path, encoder=encoder, platforms=("cpu",))


def columns_of(path: pathlib.Path, samples: int) -> dict[str, list[Any]]:
    """Return random columns that the model of an exported DLRM reads."""
    from jaxrec.data import TableEncoder

    schema = TableEncoder.load(path / "features").schema
    rng = np.random.default_rng(samples)
    dense = {name: rng.integers(0, 100, samples).tolist() for name in schema.dense}
    ids = {name: rng.integers(0, 2**31, samples).tolist() for name in schema.categorical}
    return dense | ids


@contextlib.contextmanager
def server(path: pathlib.Path, *options: str) -> Iterator[Server]:
    """Start the server, and end it by SIGTERM, which must end it with exit code 0."""
    command = [sys.executable, "-m", "jaxrec", "serve", str(path), "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline().rstrip("/\n").rpartition(":")[2])
        asyncio.run(_until_ready(port))
        yield Server(port, process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


async def _until_ready(port: int) -> None:
    for _ in range(600):
        connection = await Connection.open(port)
        status, _ = await connection.send(b"GET /ready HTTP/1.1\r\nhost: localhost\r\n\r\n")
        connection.close()
        if status == 200:
            return
        await asyncio.sleep(0.1)
    raise TimeoutError("the server did not become ready")


class Connection:
    """An HTTP connection that is used for one request after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, port: int) -> Connection:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def send(self, request: bytes) -> tuple[int, bytes]:
        """Send a request; return the status and the body of its response."""
        self.writer.write(request)
        return await self.receive()

    async def receive(self) -> tuple[int, bytes]:
        head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return int(head[9:12]), await self.reader.readexactly(length)

    def close(self) -> None:
        self.writer.close()


def request_of(columns: dict[str, list[Any]], kind: str) -> bytes:
    """Return a request as it is sent."""
    if kind == JSON:
        body = json.dumps(columns, separators=(",", ":")).encode()
    else:
        table, sink = pa.table(columns), pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        body = sink.getvalue().to_pybytes()
    head = f"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: {kind}\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def closed_loop(port: int, request: bytes, seconds: float) -> float:
    """Return the requests per second of connections that always wait for a response."""
    stop, count = time.perf_counter() + seconds, 0

    async def client() -> None:
        nonlocal count
        connection = await Connection.open(port)
        while time.perf_counter() < stop:
            status, body = await connection.send(request)
            assert status == 200, body
            count += 1
        connection.close()

    await asyncio.gather(*(client() for _ in range(CONNECTIONS)))
    return count / seconds


async def open_loop(port: int, request: bytes, rate: float, seconds: float) -> np.ndarray:
    """Return the milliseconds from each request's due time to its response."""
    free: asyncio.Queue[Connection] = asyncio.Queue()
    for _ in range(4 * CONNECTIONS):
        free.put_nowait(await Connection.open(port))
    start = time.perf_counter()

    async def client(due: float) -> float:
        connection = await free.get()
        status, body = await connection.send(request)
        assert status == 200, body
        free.put_nowait(connection)
        return 1e3 * (time.perf_counter() - due)

    tasks = []
    for number in range(max(20, int(rate * seconds))):
        due = start + number / rate
        while (wait := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(client(due)))
    latencies = np.array(await asyncio.gather(*tasks))
    while not free.empty():
        free.get_nowait().close()
    return latencies


def load(path: pathlib.Path, options: argparse.Namespace) -> None:
    """Measure latencies and throughput."""
    with server(path, "--max-delay-ms", str(options.max_delay_ms)) as running:
        for samples in options.samples:
            columns = columns_of(path, samples)
            for kind in (JSON, ARROW):
                request = request_of(columns, kind)
                asyncio.run(closed_loop(running.port, request, 0.5))
                most = asyncio.run(closed_loop(running.port, request, options.seconds))
                rate = options.share * most
                latencies = asyncio.run(open_loop(running.port, request, rate, options.seconds))
                report(
                    "load",
                    samples=samples,
                    body=kind.rpartition("/")[2],
                    p50_ms=float(np.quantile(latencies, 0.5)),
                    p99_ms=float(np.quantile(latencies, 0.99)),
                    requests_per_second=most,
                    samples_per_second=most * samples,
                )
        report("load", peak_mb=running.peak_megabytes)


async def good_requests(port: int, request: bytes, is_over: Callable[[], bool]) -> list[float]:
    """Send requests one after the other; return their milliseconds. A failure raises."""
    latencies = []
    while not is_over():
        start = time.perf_counter()
        connection = await Connection.open(port)
        status, body = await connection.send(request)
        connection.close()
        assert status == 200, body
        latencies.append(1e3 * (time.perf_counter() - start))
        await asyncio.sleep(0.01)
    return latencies


def beside_good_requests(
    name: str, path: pathlib.Path, attack: Callable[[int], Awaitable[dict[str, Any]]], *options: str
) -> None:
    """Run an attack while another client sends good requests, and report both."""
    request = request_of(columns_of(path, 1), JSON)

    async def both(port: int) -> tuple[dict[str, Any], list[float]]:
        task = asyncio.ensure_future(attack(port))
        latencies = await good_requests(port, request, task.done)
        return await task, latencies

    with server(path, *options) as running:
        before = running.peak_megabytes
        result, latencies = asyncio.run(both(running.port))
        report(
            name,
            **result,
            good_requests=len(latencies),
            good_p99_ms=float(np.quantile(latencies, 0.99)),
            peak_mb_before=before,
            peak_mb=running.peak_megabytes,
        )


def slow(path: pathlib.Path, options: argparse.Namespace) -> None:
    """Keep connections open that send slowly."""
    head = b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"

    async def client(port: int, number: int) -> str:
        try:
            connection = await Connection.open(port)
            connection.writer.write(head)
            if number % 2:
                connection.writer.write(b'content-length: 9999\r\n\r\n{"int_0":')
            answer = asyncio.ensure_future(connection.receive())
            while not (await asyncio.wait([answer], timeout=1.0))[0]:
                connection.writer.write(b"1" if number % 2 else b"x: y\r\n")
            connection.close()
            return str(answer.result()[0])
        except (OSError, asyncio.IncompleteReadError) as error:
            return type(error).__name__

    async def attack(port: int) -> dict[str, Any]:
        outcomes = await asyncio.gather(*(client(port, i) for i in range(options.slow_clients)))
        return {"clients": len(outcomes), "outcomes": {x: outcomes.count(x) for x in set(outcomes)}}

    beside_good_requests("slow", path, attack)


def bodies(path: pathlib.Path, options: argparse.Namespace) -> None:
    """Send bodies of 1 GB, half of them without saying so before."""
    part = b" " * (1 << 20)
    head = b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"

    async def client(port: int, number: int) -> str:
        connection = await Connection.open(port)
        is_chunked = number % 2
        connection.writer.write(
            head
            + (b"transfer-encoding: chunked" if is_chunked else b"content-length: %d" % GIGABYTE)
        )
        connection.writer.write(b"\r\n\r\n")
        answer = asyncio.ensure_future(connection.receive())
        with contextlib.suppress(OSError):
            for _ in range(GIGABYTE // len(part)):
                if answer.done():
                    break
                connection.writer.write(b"%x\r\n%s\r\n" % (len(part), part) if is_chunked else part)
                await connection.writer.drain()
        status, _ = await answer
        connection.close()
        return str(status)

    async def attack(port: int) -> dict[str, Any]:
        outcomes = await asyncio.gather(*(client(port, i) for i in range(options.bodies)))
        return {"bodies": len(outcomes), "outcomes": {x: outcomes.count(x) for x in set(outcomes)}}

    beside_good_requests("bodies", path, attack)


def fuzz(path: pathlib.Path, options: argparse.Namespace) -> None:
    """Decode and predict bodies with random damage; anything but a score or an error raises."""
    from jaxrec.serve import load
    from jaxrec.serve.http.predictor import Predictor
    from tests.serve.http.fuzz import Bodies, decoders, outcome
    from tests.serve.http.models import raw_model, raw_table

    with tempfile.TemporaryDirectory() as directory:
        raw_model(pathlib.Path(directory, "model"))
        predictor = Predictor(load(pathlib.Path(directory, "model")))
        decode_json, decode_arrow = decoders(predictor)
        bodies = Bodies(raw_table(3).drop_columns("label").to_pydict(), options.seed)
        statuses: dict[int, int] = {}
        start = time.perf_counter()
        for number in range(options.fuzz):
            is_json = number % 2 == 0
            body = bodies.json_body() if is_json else bodies.arrow_body()
            decode = decode_json.decode if is_json else decode_arrow.decode
            status = outcome(predictor, decode, body)
            statuses[status] = statuses.get(status, 0) + 1
        report("fuzz", bodies=options.fuzz, statuses=statuses, seconds=time.perf_counter() - start)


def report(name: str, **values: Any) -> None:
    rounded = {k: round(v, 2) if isinstance(v, float) else v for k, v in values.items()}
    print(json.dumps({"part": name} | rounded), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=pathlib.Path, help="an exported DLRM of Criteo's columns")
    parser.add_argument("--rows", type=int, default=100_000, help="rows of each table")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 64, 1024])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--share", type=float, default=0.25, help="rate of the open loop")
    parser.add_argument("--max-delay-ms", type=float, default=2.0)
    parser.add_argument("--slow-clients", type=int, default=10_000)
    parser.add_argument("--bodies", type=int, default=8)
    parser.add_argument("--fuzz", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with tempfile.TemporaryDirectory() as directory:
        path = options.model
        if path is None:
            path = pathlib.Path(directory, "model")
            export_model(path, options.rows)
        for name in options.only:
            {"load": load, "slow": slow, "bodies": bodies, "fuzz": fuzz}[name](path, options)


if __name__ == "__main__":
    main()
