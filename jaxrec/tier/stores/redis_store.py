"""Rows in Redis or Valkey."""

from __future__ import annotations

import contextlib
import errno
import secrets
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import redis

from jaxrec.tier.ids.id_map import Places
from jaxrec.tier.stores.record_format import RecordFormat, ids_of, keys_of
from jaxrec.tier.stores.redis_server import Address, RedisLock, clear_errors
from jaxrec.tier.stores.row_store import RowStore

_CHUNK = 2048  # records of a command, so that other clients of the server need not wait long

# Field of the hash with the generation of its records, which each run and each replacement draws
# anew. A hash without this run's generation is not the one that it wrote. The name has 10 bytes and
# an id 8, so that they never collide.
_GENERATION = b"generation"


class RedisStore(RowStore):
    """Records on a server: the stores ``"redis://host:port/0?prefix=users"`` and ``"rediss://"``.

    When a `put` returns, its records outlive this process. Whether they outlive the server depends
    on its configuration: with ``appendonly yes``, `flush` waits until they are on its disk if the
    server can tell (Redis 7.2 and later). Failed commands are repeated before their error is
    raised. Needs the extra ``jaxrec[redis]``.
    """

    # The hash `PREFIX:records` has all records by ids of 8 bytes, and the generation;
    # `PREFIX:format` and `PREFIX:lock` stand beside it. Each call checks the generation, and that
    # the hash has no fewer fields than this run left. Records that another program deletes are then
    # an error: without it, their rows would silently begin anew.
    def __init__(self, address: Address) -> None:
        self.address = address
        self._records, self._format, self._loading, self._lock_key = (
            f"{address.prefix}:{name}" for name in ("records", "format", "loading", "lock")
        )
        self._client: Any = None
        self._run_lock: RedisLock | None = None
        self._writing = threading.Lock()
        self._generations: tuple[bytes, ...] = ()  # two while all records are replaced
        # The hash has this many fields or more, and how often that number was lowered.
        self._least, self._lowered = 0, 0

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
                self._generations = (_new_generation(),)
                client.hset(self._records, _GENERATION, self._generations[0])
                self._least = int(client.hlen(self._records))
            except BaseException:
                self.close()
                raise

    def get(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self.format.check_ids(ids)
        keys, width = keys_of(ids), self.format.width
        values: list[bytes | None] = []
        # Before the commands: records that another thread deletes meanwhile are not a loss.
        least, lowered = self._least, self._lowered
        with clear_errors(self.address):
            pipeline = self._opened.pipeline(transaction=False)
            for start in range(0, len(keys), _CHUNK):
                # The generation comes with each command, since another program may act between two
                # of them.
                pipeline.hmget(self._records, [_GENERATION, *keys[start : start + _CHUNK]])
            pipeline.hlen(self._records)
            *parts, fields = pipeline.execute()
        for generation, *part in parts:
            if lowered == self._lowered:  # no record was deleted or replaced meanwhile
                self._check_generation(generation)
            values += part
        if lowered == self._lowered:
            self._check_fields(fields, least)
        found = np.array([value is not None for value in values], bool)
        zeros = bytes(width)
        # A bytearray, so that the array over it can be changed by the caller.
        whole = bytearray().join(zeros if value is None else value for value in values)
        self._check_widths(whole, len(values))
        return found, np.frombuffer(whole, np.uint8).reshape(-1, width)

    def put(self, ids: np.ndarray, records: np.ndarray) -> None:
        self.format.check_ids(ids)
        with self._writing, clear_errors(self.address):
            before, after = self._put(self._records, ids, records)
            self._check_fields(before, self._least)
            self._least = after

    def delete(self, ids: np.ndarray) -> None:
        self.format.check_ids(ids)
        keys = keys_of(ids)
        with self._writing, clear_errors(self.address):
            least = self._least
            self._lower(least - len(keys))
            pipeline = self._opened.pipeline(transaction=False)
            pipeline.hget(self._records, _GENERATION)
            pipeline.hlen(self._records)
            for start in range(0, len(keys), _CHUNK):
                pipeline.hdel(self._records, *keys[start : start + _CHUNK])
            pipeline.hlen(self._records)
            generation, before, *deleted, after = pipeline.execute()
            self._check_generation(generation)
            # The others had no record, or a first attempt deleted it whose answer was lost.
            self._check_fields(before, least - (len(keys) - sum(deleted)))
            self._least = after

    def scan(self, size: int = 1 << 16) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        seen = Places(1024)  # HSCAN may bring a record several times.
        keys: list[bytes] = []
        values: list[bytes] = []
        cursor = -1
        while cursor != 0 or keys:
            while cursor != 0 and len(keys) < size:
                with clear_errors(self.address):
                    cursor, part = self._opened.hscan(self._records, max(cursor, 0), count=_CHUNK)
                part.pop(_GENERATION, None)
                ids = ids_of(part)
                is_new = (seen.find(ids) < 0).tolist()
                seen.assign(ids)
                for new, (key, value) in zip(is_new, part.items(), strict=True):
                    if new:
                        keys.append(key)
                        values.append(value)
            if cursor == 0:
                with clear_errors(self.address):
                    self._check_generation(self._opened.hget(self._records, _GENERATION))
            if keys:
                whole = bytearray().join(values[:size])
                self._check_widths(whole, len(keys[:size]))
                records = np.frombuffer(whole, np.uint8).reshape(-1, self.format.width)
                yield ids_of(keys[:size]), records
                keys, values = keys[size:], values[size:]

    def __len__(self) -> int:
        with clear_errors(self.address):
            pipeline = self._opened.pipeline(transaction=False)
            pipeline.hget(self._records, _GENERATION)
            pipeline.hlen(self._records)
            generation, fields = pipeline.execute()
            self._check_generation(generation)
            return int(fields) - 1

    def clear(self) -> None:
        self.replace(())

    def replace(self, parts: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
        with self._writing, clear_errors(self.address):
            client, generation = self._opened, _new_generation()
            client.unlink(self._loading)
            client.hset(self._loading, _GENERATION, generation)
            after = 1
            for ids, records in parts:
                _, after = self._put(self._loading, ids, records)
            self._lower(0)
            self._generations = (*self._generations, generation)
            # Readers see the old hash or the new one, never half of each; both generations are
            # right until then.
            pipeline = client.pipeline(transaction=True)
            pipeline.unlink(self._records)
            pipeline.rename(self._loading, self._records)
            pipeline.execute()
            self._generations = (generation,)
            self._lower(after)
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

    def _put(self, key: str, ids: np.ndarray, records: np.ndarray) -> tuple[int, int]:
        """Write records into the hash ``key``; return its numbers of fields before and after."""
        fields, width, values = keys_of(ids), self.format.width, records.tobytes()
        pipeline = self._opened.pipeline(transaction=False)
        pipeline.hget(key, _GENERATION)
        pipeline.hlen(key)
        for start in range(0, len(fields), _CHUNK):
            items: list[bytes] = []
            for number, field in enumerate(fields[start : start + _CHUNK], start):
                items += field, values[number * width : (number + 1) * width]
            pipeline.execute_command("HSET", key, *items)
        pipeline.hlen(key)
        generation, before, *_, after = pipeline.execute()
        if key == self._records:
            self._check_generation(generation)
        return int(before), int(after)

    def _lower(self, least: int) -> None:
        """Note that records are deleted or replaced, so that the hash may have fewer fields."""
        self._lowered += 1
        self._least = least

    def _check_generation(self, generation: bytes | None) -> None:
        """Raise an OSError unless the hash's generation is one that this run wrote."""
        if generation not in self._generations:
            what = "replaced" if generation else "deleted"
            raise self._loss(f"another program {what} all records while this run had them open")

    def _check_fields(self, fields: int, least: int) -> None:
        """Raise an OSError if the hash has fewer fields than this run left."""
        if fields < least:
            raise self._loss(
                f"another program deleted {least - fields:,} of {least - 1:,} records while this "
                "run had them open"
            )

    def _check_widths(self, whole: bytearray, count: int) -> None:
        if len(whole) != count * self.format.width:
            raise self._loss(
                f"{count:,} records have {len(whole):,} bytes, and each should have "
                f"{self.format.width:,}: another program changed them"
            )

    def _loss(self, problem: str) -> OSError:
        return OSError(
            errno.ESTALE,
            f"{problem}; keep others from the prefix, and start again from the last checkpoint",
            str(self.address),
        )

    def _check_credentials(self) -> None:
        """Raise the error of wrong credentials at once: another attempt would not help."""
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
        fields = client.hlen(self._records)
        if fields and not (fields == 1 and client.hexists(self._records, _GENERATION)):
            if stored is None:
                raise ValueError(
                    f"{self.address}: the key {self._records!r} is something else's; choose "
                    "another prefix"
                )
            self.format.check_same(RecordFormat.from_json(stored.decode()), str(self.address))
        client.set(self._format, self.format.to_json())


def _new_generation() -> bytes:
    return secrets.token_hex(8).encode()
