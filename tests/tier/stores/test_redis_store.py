"""Rows in Redis: servers that fail, passwords, locks and TLS."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import threading
import time
import warnings

import numpy as np
import pytest
import redis

from jaxrec.tier.stores import redis_server as store_server
from jaxrec.tier.stores.record_format import RecordFormat
from jaxrec.tier.stores.redis_store import RedisStore
from tests.tier.kills import kill_repeatedly
from tests.tier.servers import free_port, redis_port, redis_server  # noqa: F401

WIDTH = 40
FORMAT = RecordFormat(WIDTH, "item rows uint8[40]")
SECRET = "open-sesame-7"


@contextlib.contextmanager
def opened(port, prefix, options="&lock=2", format=FORMAT):
    store = RedisStore.from_url(f"redis://127.0.0.1:{port}/0?prefix={prefix}{options}")
    store.open(format)
    with contextlib.closing(store):
        yield store


def open_and_close(*arguments):
    with opened(*arguments) as store:
        return len(store)


def random_records(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, WIDTH), np.uint8)


def test_prefixes_are_apart(redis_port):  # noqa: F811
    """Stores, and other programs, on one server."""
    client, ids = redis.Redis(port=redis_port), np.arange(100)
    client.set("other", 1)
    with opened(redis_port, "a") as first, opened(redis_port, "b") as second:
        first.put(ids, random_records(100))
        second.put(ids[:10], random_records(10, 1))
        first.delete(ids[50:])
        assert (len(first), len(second)) == (50, 10)
        assert sorted(client.keys("a:*")) == [b"a:format", b"a:lock", b"a:records"]
        first.clear()
        assert (len(first), len(second)) == (0, 10)
    assert client.get("other") == b"1"
    assert not client.exists("a:lock")


def test_a_key_of_another_program(redis_port):  # noqa: F811
    client = redis.Redis(port=redis_port)
    client.hset("theirs:records", "name", "value")
    message = "the key 'theirs:records' is something else's; choose another prefix"
    with pytest.raises(ValueError, match=message), opened(redis_port, "theirs"):
        pass
    assert client.hgetall("theirs:records") == {b"name": b"value"}
    assert not client.exists("theirs:lock")
    client.set("text:records", "value")
    with pytest.raises(OSError, match="the server refuses a command"), opened(redis_port, "text"):
        pass
    assert client.get("text:records") == b"value"


def lose_all(client, prefix):
    client.delete(f"{prefix}:records")


def lose_some(client, prefix):
    client.hdel(f"{prefix}:records", *[int(i).to_bytes(8, "big") for i in range(40, 45)])


def lose_to_another(client, prefix):
    client.rename(f"{prefix}:records", "kept")
    client.hset(f"{prefix}:records", "generation", "other")


@pytest.mark.parametrize(
    ("lose", "message"),
    [
        (lose_all, "another program deleted all records while this run had them open"),
        (lose_some, "another program deleted 5 of 100 records while this run had them open"),
        (lose_to_another, "another program replaced all records while this run had them open"),
    ],
    ids=["all", "some", "replaced"],
)
def test_records_that_another_program_deletes(lose, message, redis_port):  # noqa: F811
    client, ids = redis.Redis(port=redis_port), np.arange(100)
    for number, use in enumerate(
        (
            lambda store: store.get(ids[:10]),
            lambda store: store.put(ids[:10], random_records(10)),
            lambda store: store.delete(ids[90:]),
        )
    ):
        prefix = f"lost{lose.__name__}{number}"
        with opened(redis_port, prefix) as store:
            store.put(ids[:60], random_records(60))
            store.put(ids[50:], random_records(50, 1))
            store.delete(ids[:10])
            store.put(ids[:10], random_records(10))
            assert store.get(ids)[0].all()
            lose(client, prefix)
            with pytest.raises(OSError, match=message) as raised:
                use(store)
            assert "start again from the last checkpoint" in str(raised.value)
            store.clear()
            assert len(store) == 0
            assert not store.get(ids)[0].any()


def test_records_of_another_width(redis_port):  # noqa: F811
    with opened(redis_port, "wide") as store:
        store.put(np.arange(3), random_records(3))
        redis.Redis(port=redis_port).hset("wide:records", bytes(8), b"short")
        for use in (lambda: store.get(np.arange(3)), lambda: list(store.scan())):
            with pytest.raises(OSError, match="3 records have 85 bytes, and each should have 40"):
                use()


def test_a_scan_brings_each_record_once(redis_port):  # noqa: F811
    """Also while the server halves its table, which makes HSCAN repeat records."""
    ids = np.arange(60_000)
    with opened(redis_port, "scan") as store:
        store.put(ids, random_records(60_000))
        parts = store.scan(5000)
        found = [next(parts)[0]]
        gone = np.setdiff1d(ids, np.concatenate([found[0], np.arange(0, 60_000, 20)]))
        store.delete(gone)
        found += [part for part, _ in parts]
        found = np.concatenate(found)
        assert np.unique(found).size == found.size
        assert np.isin(np.setdiff1d(ids, gone), found).all()


def test_a_snapshot_replaces_all_records_at_once(redis_port, tmp_path, monkeypatch):  # noqa: F811
    ids = np.arange(100)
    with opened(redis_port, "whole") as store:
        store.put(ids, random_records(100))
        store.snapshot(tmp_path / "snapshot")
        store.put(ids[:50], random_records(50, 1))
        put = store._put

        def fail(key, ids, records):
            put(key, ids[:10], records[:10])
            raise KeyboardInterrupt

        monkeypatch.setattr(store, "_put", fail)
        with pytest.raises(KeyboardInterrupt):
            store.load_snapshot(tmp_path / "snapshot")
        monkeypatch.undo()
        np.testing.assert_array_equal(store.get(ids)[1][:50], random_records(50, 1))
        assert len(store) == 100
    with opened(redis_port, "whole") as store:
        assert not redis.Redis(port=redis_port).exists("whole:loading")
        store.load_snapshot(tmp_path / "snapshot")
        np.testing.assert_array_equal(store.get(ids)[1], random_records(100))


def test_an_unreachable_server():
    port = free_port()
    start = time.monotonic()
    with pytest.raises(ConnectionError, match=r"the server did not answer in 6 attempts") as raised:
        open_and_close(port, "a")
    assert time.monotonic() - start < 10
    assert f"redis://127.0.0.1:{port}/0?prefix=a" in str(raised.value)
    assert "start again from the last checkpoint" in str(raised.value)


def test_a_server_that_dies_and_one_that_comes_back(tmp_path, monkeypatch):
    monkeypatch.setattr(store_server, "_LONGEST_PAUSE", 0.1)
    with contextlib.ExitStack() as stack:
        with redis_server(tmp_path) as port:
            store = stack.enter_context(opened(port, "a", "&lock=60"))
            store.put(np.arange(10), random_records(10))
        for call in (lambda: store.get(np.arange(10)), lambda: len(store), store.clear):
            with pytest.raises(ConnectionError, match="did not answer in 6 attempts"):
                call()
        timer = threading.Timer(0.2, start_again, (tmp_path, port, stack))
        timer.start()
        monkeypatch.setattr(store_server, "_LONGEST_PAUSE", 1.0)
        retrying = store.address.client()
        with contextlib.closing(retrying):
            assert retrying.ping()  # after a few attempts
        timer.join()


def start_again(directory, port, stack):
    process = subprocess.Popen(
        [shutil.which("redis-server") or shutil.which("valkey-server"), "--port", str(port)],
        stdout=subprocess.DEVNULL,
        cwd=directory,
    )
    stack.callback(process.wait)
    stack.callback(process.kill)


def test_an_answer_that_takes_too_long(redis_port, monkeypatch):  # noqa: F811
    monkeypatch.setattr(store_server, "_LONGEST_PAUSE", 0.01)
    with opened(redis_port, "slow", "&lock=60&timeout=0.1") as store:
        redis.Redis(port=redis_port).client_pause(1500)
        with pytest.raises(ConnectionError, match="did not answer in 6 attempts"):
            store.get(np.arange(3))
        time.sleep(1.5)
        assert len(store) == 0


@pytest.mark.parametrize("password", [None, "wrong-secret"], ids=["none", "wrong"])
def test_passwords(password, tmp_path, monkeypatch, capfd):
    monkeypatch.delenv("REDIS_USERNAME", raising=False)
    with redis_server(tmp_path, "--requirepass", SECRET) as port:
        if password is not None:
            monkeypatch.setenv("REDIS_PASSWORD", password)
        start = time.monotonic()
        with pytest.raises(PermissionError, match="the server refuses the credentials") as raised:
            open_and_close(port, "a")
        assert time.monotonic() - start < 2  # no attempt is repeated
        assert "set the environment variables REDIS_USERNAME and REDIS_PASSWORD" in str(
            raised.value
        )
        monkeypatch.setenv("REDIS_PASSWORD", SECRET)
        with opened(port, "a") as store:
            store.put(np.arange(3), random_records(3))
            assert len(store) == 3
            said = repr(store) + repr(vars(store)) + str(raised.value) + repr(raised.value)
        monkeypatch.setenv("REDIS_USERNAME", "nobody")
        with pytest.raises(PermissionError, match="the server refuses the credentials"):
            open_and_close(port, "a")
        said += "".join(capfd.readouterr())
        for secret in (SECRET, "wrong-secret"):
            assert secret not in said


def test_a_server_whose_memory_is_full(tmp_path):
    with redis_server(tmp_path, "--maxmemory", "4mb") as port, opened(port, "a") as store:
        store.put(np.arange(1000), random_records(1000))
        with pytest.raises(OSError, match="the server's memory is full") as raised:
            fill(store)
        assert len(str(raised.value)) < 500  # without the command and its bytes
        assert str(raised.value).isprintable()
        assert "HSET" not in str(raised.value)
        np.testing.assert_array_equal(store.get(np.arange(1000))[1], random_records(1000))


def fill(store):
    for start in range(1000, 200_000, 10_000):
        store.put(np.arange(start, start + 10_000), random_records(10_000))


def test_a_server_that_evicts(tmp_path):
    options = ("--maxmemory", "50mb", "--maxmemory-policy", "allkeys-lru")
    with (
        redis_server(tmp_path, *options) as port,
        pytest.raises(ValueError, match=r"evicts any keys .*allkeys-lru.*; set it to noevicti"),
    ):
        open_and_close(port, "a")


def test_flush_with_an_append_only_file(tmp_path):
    with redis_server(tmp_path, "--appendonly", "yes") as port, opened(port, "a") as store:
        store.put(np.arange(10), random_records(10))
        store.flush()
    with redis_server(tmp_path, "--appendonly", "yes") as port, opened(port, "a") as store:
        np.testing.assert_array_equal(store.get(np.arange(10))[1], random_records(10))


@pytest.mark.slow
def test_the_lock_is_renewed_and_given_back(redis_port):  # noqa: F811
    with opened(redis_port, "renewed", "&lock=2") as store:
        time.sleep(2.5)
        waits = pytest.warns(UserWarning, match=r"by process \d+ on .* expires in [012] s: waiting")
        refused = pytest.raises(BlockingIOError, match=r"another run has it open \(process \d+ on")
        with waits, refused:
            open_and_close(redis_port, "renewed", "&lock=2")
        store.put(np.arange(3), random_records(3))
    with opened(redis_port, "renewed") as store:
        assert len(store) == 3


def test_a_lost_lock(redis_port):  # noqa: F811
    client = redis.Redis(port=redis_port)
    with opened(redis_port, "lost", "&lock=0.4") as store:
        client.set("lost:lock", "process 7 on host8, 1", px=60_000)
        time.sleep(1)
        with pytest.raises(OSError, match=r"the lock could not be renewed for 0.4 s, and another"):
            store.put(np.arange(3), random_records(3))
    assert client.get("lost:lock") == b"process 7 on host8, 1"
    client.unlink("lost:lock")


def test_the_lock_of_a_run_that_was_killed(redis_port):  # noqa: F811
    code = """
import sys, numpy as np
from jaxrec.tier.stores.redis_store import RedisStore
from jaxrec.tier.stores.record_format import RecordFormat
store = RedisStore.from_url(sys.argv[1])
store.open(RecordFormat(40, "item rows uint8[40]"))
store.put(np.arange(10), np.zeros((10, 40), np.uint8))
print("open", flush=True)
sys.stdin.read()
"""
    url = f"redis://127.0.0.1:{redis_port}/0?prefix=killed&lock=1.5"
    command = [sys.executable, "-P", "-c", code, url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"open\n"
        other.kill()
        other.wait()
        start = time.monotonic()
        with pytest.warns(UserWarning, match=rf"is locked by process {other.pid} on .*: waiting"):
            count = open_and_close(redis_port, "killed")
        assert count == 10
        assert time.monotonic() - start < 20


@pytest.mark.slow
def test_encryption(tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    port = free_port()
    options = ["--tls-port", str(port), "--tls-cert-file", str(certificate)]
    options += ["--tls-key-file", str(key), "--tls-auth-clients", "no"]
    with redis_server(tmp_path, *options, "--tls-ca-cert-file", str(certificate)):
        url = f"rediss://127.0.0.1:{port}?prefix=a&lock=2"
        store = RedisStore.from_url(f"{url}&ca={certificate}")
        store.open(FORMAT)
        store.put(np.arange(3), random_records(3))
        assert store.get(np.arange(3))[0].all()
        store.close()
        with pytest.raises(ConnectionError, match="certificate verify failed"):
            RedisStore.from_url(url).open(FORMAT)


@pytest.mark.slow
def test_kills(redis_port, tmp_path):  # noqa: F811
    url = f"redis://127.0.0.1:{redis_port}/0?prefix=kills&lock=1"
    with warnings.catch_warnings():
        result = kill_repeatedly(url, tmp_path / "snapshots", True, kills=3, may_tear=False)
    assert result.kills == 3
    assert result.batches > 0
