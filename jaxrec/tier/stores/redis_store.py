"""Rows in Redis or Valkey."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import redis

from jaxrec.tier.stores.places import Places
from jaxrec.tier.stores.record_format import RecordFormat
from jaxrec.tier.stores.redis_address import Address, clear_errors
from jaxrec.tier.stores.redis_lock import RedisLock
from jaxrec.tier.stores.row_store import RowStore

_CHUNK = 2048  # records of a command, so that other clients of the server need not wait long
_KEY_BYTES = 8


class RedisStore(RowStore):
    """Records on a server: the stores ``"redis://host:port/0?prefix=users"`` and ``"rediss://"``.

    All records are one hash, ``PREFIX:records``, whose fields are ids of 8 bytes; ``PREFIX:format``
    and ``PREFIX:lock`` stand beside it. The credentials are those of the environment variables
    REDIS_USERNAME and REDIS_PASSWORD. Commands that fail are repeated, with pauses that
    double; then the error is raised. Needs the extra ``jaxrec[redis]``.

    A `put` outlives this process when it has returned. Whether records outlive the server says the
    server's configuration: with ``appendonly yes`` `flush` waits until they are on its disk, where
    the server can say so (Redis 7.2 and later).

    Args:
        address: The server and the prefix. One run can have a prefix open.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self._records, self._format, self._loading, self._lock_key = (
            f"{address.prefix}:{name}" for name in ("records", "format", "loading", "lock")
        )
        self._client: Any = None
        self._run_lock: RedisLock | None = None
        self._writing = threading.Lock()

    @classmethod
    def from_url(cls, url: str) -> RedisStore:
        """Make the store of a URL; see `Address.from_url`."""
        return cls(Address.from_url(url))

    def __repr__(self) -> str:
        return f"RedisStore('{self.address}')"

    def open(self, format: RecordFormat) -> None:
        with clear_errors(self.address):
            self._check_credentials()
            client = self.address.client()
            try:
                self._check_server(client)
                lock = RedisLock(client, self._lock_key, self.address.lock, str(self.address))
                lock.acquire()
            except BaseException:
                client.close()
                raise
            self.format, self._client, self._run_lock = format, client, lock
            try:
                self._check_format(client)
                client.unlink(self._loading)  # of a run that was killed
            except BaseException:
                self.close()
                raise

    def get(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self.format.check_ids(ids)
        keys, width = _keys(ids), self.format.width
        values: list[bytes | None] = []
        with clear_errors(self.address):
            pipeline = self._opened.pipeline(transaction=False)
            for start in range(0, len(keys), _CHUNK):
                pipeline.hmget(self._records, keys[start : start + _CHUNK])
            for part in pipeline.execute():
                values += part
        found = np.array([value is not None for value in values], bool)
        zeros = bytes(width)
        whole = bytearray().join(zeros if value is None else value for value in values)
        return found, np.frombuffer(whole, np.uint8).reshape(-1, width)

    def put(self, ids: np.ndarray, records: np.ndarray) -> None:
        self.format.check_ids(ids)
        with self._writing, clear_errors(self.address):
            self._put(self._records, ids, records)

    def delete(self, ids: np.ndarray) -> None:
        self.format.check_ids(ids)
        keys = _keys(ids)
        with self._writing, clear_errors(self.address):
            pipeline = self._opened.pipeline(transaction=False)
            for start in range(0, len(keys), _CHUNK):
                pipeline.hdel(self._records, *keys[start : start + _CHUNK])
            pipeline.execute()

    def scan(self, size: int = 1 << 16) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        seen = Places(1024)  # HSCAN may bring a record several times.
        keys: list[bytes] = []
        values: list[bytes] = []
        cursor = -1
        while cursor != 0 or keys:
            while cursor != 0 and len(keys) < size:
                with clear_errors(self.address):
                    cursor, part = self._opened.hscan(self._records, max(cursor, 0), count=_CHUNK)
                ids = _ids(part)
                is_new = (seen.find(ids) < 0).tolist()
                seen.assign(ids)
                for new, (key, value) in zip(is_new, part.items(), strict=True):
                    if new:
                        keys.append(key)
                        values.append(value)
            if keys:
                whole = np.frombuffer(bytearray().join(values[:size]), np.uint8)
                yield _ids(keys[:size]), whole.reshape(-1, self.format.width)
                keys, values = keys[size:], values[size:]

    def __len__(self) -> int:
        with clear_errors(self.address):
            return int(self._opened.hlen(self._records))

    def clear(self) -> None:
        with self._writing, clear_errors(self.address):
            self._opened.unlink(self._records)

    def replace(self, parts: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
        with self._writing, clear_errors(self.address):
            client = self._opened
            client.unlink(self._loading)
            for ids, records in parts:
                self._put(self._loading, ids, records)
            if client.exists(self._loading):
                client.rename(self._loading, self._records)  # at once
            else:
                client.unlink(self._records)
        self.flush()

    def flush(self) -> None:
        with self._writing, clear_errors(self.address):
            if self._opened.info("persistence").get("aof_enabled"):
                with contextlib.suppress(redis.ResponseError):  # The server does not know it.
                    self._opened.execute_command("WAITAOF", 1, 0, 0)

    def close(self) -> None:
        if self._client is not None:
            client, lock, self._client = self._client, self._run_lock, None
            with contextlib.suppress(redis.RedisError):  # The lock expires anyway.
                if lock is not None:
                    lock.release()
            client.close()

    @property
    def _opened(self) -> Any:
        if self._client is None or self._run_lock is None:
            raise ValueError(f"{self!r} is not open")
        self._run_lock.check()
        return self._client

    def _put(self, key: str, ids: np.ndarray, records: np.ndarray) -> None:
        fields, width, values = _keys(ids), self.format.width, records.tobytes()
        pipeline = self._opened.pipeline(transaction=False)
        for start in range(0, len(fields), _CHUNK):
            items: list[bytes] = []
            for number, field in enumerate(fields[start : start + _CHUNK], start):
                items += field, values[number * width : (number + 1) * width]
            pipeline.execute_command("HSET", key, *items)
        pipeline.execute()

    def _check_credentials(self) -> None:
        """Raise the error of wrong credentials, which is not worth a second attempt."""
        with contextlib.closing(self.address.client(retries=0)) as client:
            try:
                client.ping()
            except redis.AuthenticationError:
                raise
            except (redis.ConnectionError, redis.TimeoutError):
                return  # Tried again later.

    def _check_server(self, client: Any) -> None:
        memory = client.info("memory")
        policy = str(memory.get("maxmemory_policy", ""))
        if memory.get("maxmemory") and policy.startswith("allkeys"):
            raise ValueError(
                f"{self.address}: the server evicts any keys when its memory is full "
                f"(maxmemory-policy {policy}), and rows would be lost; set it to noeviction"
            )

    def _check_format(self, client: Any) -> None:
        stored = client.get(self._format)
        if client.hlen(self._records):
            if stored is None:
                raise ValueError(
                    f"{self.address}: the key {self._records!r} is something else's; choose "
                    "another prefix"
                )
            self.format.check_same(RecordFormat.from_json(stored.decode()), str(self.address))
        client.set(self._format, self.format.to_json())


def _keys(ids: np.ndarray) -> list[bytes]:
    whole = ids.astype(">i8").tobytes()
    return [whole[start : start + _KEY_BYTES] for start in range(0, len(whole), _KEY_BYTES)]


def _ids(keys: Iterable[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(keys), ">i8").astype(np.int64)
