"""Speed of row stores beside their clients, and stores whose writers are killed.

See `benchmarks.tier`, whose commands ``stores`` and ``kills`` these are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jaxrec.tier.stores import open_store
from jaxrec.tier.stores.record_format import RecordFormat

_Write = Callable[[np.ndarray, np.ndarray], Any]
_Read = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Stores:
    """Records a second of each store, and of its client with the same batches."""

    batch: int = 20_000
    """Records of a batch."""
    width: int = 260
    """Bytes of a record."""
    ids: int = 1_000_000
    """Number of ids, all of which have a record in the end."""
    rounds: int = 9
    """Batches of each measure."""
    directory: pathlib.Path | None = None
    """Where files are written; default: a temporary directory."""

    def run(self) -> None:
        with (
            tempfile.TemporaryDirectory(dir=self.directory) as name,
            redis_server(name) as redis_port,
        ):
            directory = pathlib.Path(name)
            self.compare("file (range)", f"file://{name}/a", self.memmap(directory / "b"), True)
            self.compare("file (any ids)", f"file://{name}/c", self.memmap(directory / "d"), False)
            self.compare("rocksdb", f"rocksdb://{name}/e", self.rocksdb(directory / "f"), True)
            if redis_port is not None:
                url = f"redis://127.0.0.1:{redis_port}/0?prefix=store"
                self.compare("redis", url, self.redis(redis_port), True)
            self.compare("memory", "memory://", self.array(), True)

    def compare(
        self, name: str, url: str, client: tuple[str, _Write, _Read], is_range: bool
    ) -> None:
        """Time puts and gets of a store and of its client, in turn, after all ids have a record."""
        rng = np.random.default_rng(0)
        store, (peer, write, read) = open_store(url), client
        store.open(RecordFormat(self.width, "rows", self.ids if is_range else None))
        records = rng.integers(0, 256, (self.batch, self.width), np.uint8)
        for start in range(0, self.ids, self.batch):
            ids = np.arange(start, min(start + self.batch, self.ids))
            store.put(ids, records[: ids.size])
            write(ids, records[: ids.size])
        times: dict[str, list[tuple[float, float]]] = {
            f"{who} {what}": [] for what in ("put", "get") for who in ("store", "client")
        }
        for number in range(self.rounds + 2):
            ids = rng.permutation(self.ids)[: self.batch]
            records = rng.integers(0, 256, (self.batch, self.width), np.uint8)
            calls: dict[str, Callable[[], Any]] = {
                "store put": lambda ids=ids, records=records: store.put(ids, records),
                "client put": lambda ids=ids, records=records: write(ids, records),
                "store get": lambda ids=ids: store.get(ids)[1],
                "client get": lambda ids=ids: read(ids),
            }
            names = list(calls) if number % 2 else [*calls][1::-1] + [*calls][:1:-1]
            for each in names:
                wall, processor = time.perf_counter(), time.process_time()
                result = calls[each]()
                times[each].append((time.perf_counter() - wall, time.process_time() - processor))
                assert "put" in each or np.array_equal(result, records)
        store.close()
        for what in ("put", "get"):
            medians = {}
            for who in ("store", "client"):
                columns = zip(*times[f"{who} {what}"][2:], strict=True)
                medians[who] = [statistics.median(column) for column in columns]
            line: dict[str, Any] = {"store": name, "client": peer, "measure": what}
            for who, (wall, processor) in medians.items():
                line[f"{who}_records_per_second"] = round(self.batch / wall)
                line[f"{who}_processor_ms"] = round(1e3 * processor, 2)
            line["ratio"] = round(medians["client"][0] / medians["store"][0], 2)
            line["processor_ratio"] = round(medians["client"][1] / medians["store"][1], 2)
            print(json.dumps(line), flush=True)

    def memmap(self, path: pathlib.Path) -> tuple[str, _Write, _Read]:
        rows = np.memmap(path, np.uint8, "w+", shape=(self.ids, self.width))

        def write(ids: np.ndarray, records: np.ndarray) -> None:
            rows[ids] = records

        return "numpy.memmap", write, lambda ids: rows[ids]

    def array(self) -> tuple[str, _Write, _Read]:
        rows = np.zeros((self.ids, self.width), np.uint8)

        def write(ids: np.ndarray, records: np.ndarray) -> None:
            rows[ids] = records

        return "numpy array", write, lambda ids: rows[ids]

    def rocksdb(self, path: pathlib.Path) -> tuple[str, _Write, _Read]:
        import rocksdict

        from jaxrec.tier.stores.rocksdb_database import options

        database = rocksdict.Rdict(str(path), options(may_create=True))

        def write(ids: np.ndarray, records: np.ndarray) -> None:
            batch = rocksdict.WriteBatch(raw_mode=True)
            for each, record in zip(ids.tolist(), records, strict=True):
                batch.put(each.to_bytes(8, "big"), record.tobytes())
            database.write(batch)

        def read(ids: np.ndarray) -> np.ndarray:
            values = database.get([each.to_bytes(8, "big") for each in ids.tolist()])
            return np.frombuffer(b"".join(values), np.uint8).reshape(-1, self.width)

        return "rocksdict", write, read

    def redis(self, port: int) -> tuple[str, _Write, _Read]:
        import redis

        client = redis.Redis(port=port)

        def write(ids: np.ndarray, records: np.ndarray) -> None:
            keys = (b"c" + each.to_bytes(8, "big") for each in ids.tolist())
            client.mset(dict(zip(keys, (each.tobytes() for each in records), strict=True)))

        def read(ids: np.ndarray) -> np.ndarray:
            values = client.mget([b"c" + each.to_bytes(8, "big") for each in ids.tolist()])
            return np.frombuffer(b"".join(values), np.uint8).reshape(-1, self.width)

        return "redis-py", write, read


@dataclasses.dataclass(frozen=True)
class Kills:
    """Writers of each store that are killed by SIGKILL at random moments."""

    kills: int = 100
    """Writers of each store; half of them with a range of ids."""
    seed: int = 0
    """Seed of the moments."""

    def run(self) -> None:
        from tests.tier.kills import kill_repeatedly

        with tempfile.TemporaryDirectory() as name, redis_server(name) as redis_port:
            urls = {"file": f"file://{name}/file", "rocksdb": f"rocksdb://{name}/rocksdb"}
            if redis_port is not None:
                urls["redis"] = f"redis://127.0.0.1:{redis_port}/0?lock=2&prefix="
            for store, url in urls.items():
                for is_range in (True, False):
                    kind = "range" if is_range else "any"
                    start = time.monotonic()
                    result = kill_repeatedly(
                        f"{url}{kind}",
                        pathlib.Path(name, f"{store}-{kind}-snapshots"),
                        is_range,
                        kills=self.kills // 2,
                        may_tear=store == "file",
                        seed=self.seed,
                    )
                    line = {"store": store, "ids": kind, **dataclasses.asdict(result)}
                    print(
                        json.dumps({**line, "seconds": round(time.monotonic() - start)}), flush=True
                    )


@contextlib.contextmanager
def redis_server(directory: str) -> Iterator[int | None]:
    """Run a server where there is one, and yield its port."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        print("redis: left out, since redis-server is not installed", flush=True)
        yield None
        return
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [
        program,
        "--port",
        str(port),
        "--bind",
        "127.0.0.1",
        "--save",
        "",
        "--dir",
        directory,
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            while True:
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                time.sleep(0.02)
            yield port
        finally:
            server.terminate()
