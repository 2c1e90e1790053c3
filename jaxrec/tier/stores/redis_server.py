"""The server of a row store in Redis: its address, its errors, and the lock of a run."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
import secrets
import threading
import time
import urllib.parse
import warnings
from collections.abc import Iterator
from typing import Any

import redis
import redis.backoff
import redis.exceptions
import redis.retry

from jaxrec.files.lock import owner

# Prefix of the client's error over one of several commands. It holds the whole command, with the
# bytes of its records.
_COMMAND = re.compile(r"Command # \d+ \(.*\) of pipeline caused error: ", re.DOTALL)
_LONGEST_MESSAGE = 300

_RETRIES = 5
_LONGEST_PAUSE, _FIRST_PAUSE = 1.0, 0.05  # seconds


@dataclasses.dataclass(frozen=True)
class Address:
    """Address of a store on a server.

    ``prefix`` begins its keys. ``timeout`` is seconds for a connection or an answer, ``lock``
    seconds after which a killed run's lock expires. ``ca`` is a file of the certificate authority.
    """

    host: str
    port: int = 6379
    database: int = 0
    prefix: str = "jaxrec"
    is_encrypted: bool = False
    timeout: float = 10.0
    lock: float = 15.0
    ca: str | None = None

    def __str__(self) -> str:
        scheme = "rediss" if self.is_encrypted else "redis"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{self.port}/{self.database}?prefix={self.prefix}"

    @classmethod
    def from_url(cls, url: str) -> Address:
        """Return the address of a URL such as ``"redis://host:6379/0?prefix=users&timeout=5"``."""
        parts = urllib.parse.urlsplit(url)
        if "@" in parts.netloc:
            raise ValueError(
                f"a URL {parts.scheme}:// must not have credentials, since it is shown in logs; "
                "set the environment variables REDIS_USERNAME and REDIS_PASSWORD"
            )
        wanted = f"write a URL like '{parts.scheme}://host:6379/0?prefix=users', not {url!r}"
        options = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
        if unknown := sorted(set(options) - {"prefix", "timeout", "lock", "ca"}):
            raise ValueError(
                f"unknown option {unknown[0]!r}; a store in Redis has prefix, timeout, lock and "
                f"ca: {wanted}"
            )
        try:
            address = cls(
                host=parts.hostname or "",
                port=parts.port or 6379,
                database=int(parts.path.strip("/") or 0),
                prefix=options.get("prefix", "jaxrec"),
                is_encrypted=parts.scheme == "rediss",
                timeout=float(options.get("timeout", 10)),
                lock=float(options.get("lock", 15)),
                ca=options.get("ca"),
            )
        except ValueError:
            raise ValueError(wanted) from None
        if not address.host or not address.prefix or min(address.timeout, address.lock) <= 0:
            raise ValueError(wanted)
        return address

    def client(self, retries: int = _RETRIES) -> Any:
        """Return a `redis.Redis` of the server, with the credentials of the environment."""
        encryption: dict[str, Any] = (
            {"ssl": True, "ssl_ca_certs": self.ca} if self.is_encrypted else {}
        )
        backoff = redis.backoff.ExponentialBackoff(cap=_LONGEST_PAUSE, base=_FIRST_PAUSE)
        return redis.Redis(
            host=self.host,
            port=self.port,
            db=self.database,
            username=os.environ.get("REDIS_USERNAME"),
            password=os.environ.get("REDIS_PASSWORD"),
            socket_timeout=self.timeout,
            socket_connect_timeout=self.timeout,
            retry=redis.retry.Retry(backoff, retries),
            **encryption,
        )


@contextlib.contextmanager
def clear_errors(address: Address) -> Iterator[None]:
    """Turn the client's errors into an OSError of one sentence."""
    place = str(address)
    try:
        yield
    except (redis.AuthenticationError, redis.exceptions.NoPermissionError) as error:
        raise _refused(error, place) from None
    except (redis.TimeoutError, redis.ConnectionError) as error:
        raise ConnectionError(
            errno.ECONNREFUSED,
            f"the server did not answer in {_RETRIES + 1} attempts ({_plain(error)}); see that it "
            "runs and start again from the last checkpoint",
            place,
        ) from None
    except redis.RedisError as error:
        text = _plain(error)
        if text.startswith(("NOAUTH", "WRONGPASS", "NOPERM")):
            raise _refused(error, place) from None
        if isinstance(error, redis.exceptions.OutOfMemoryError) or "OOM" in text:
            raise OSError(
                errno.ENOMEM,
                f"the server's memory is full ({text}); give it more (maxmemory) and start "
                "again from the last checkpoint",
                place,
            ) from None
        raise OSError(errno.EIO, f"the server refuses a command ({text})", place) from None


def _plain(error: Exception) -> str:
    """Return an error's message as one printable line, without the command and its bytes."""
    text = " ".join(_COMMAND.sub("", str(error)).split())
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return shown if len(shown) <= _LONGEST_MESSAGE else f"{shown[:_LONGEST_MESSAGE]}..."


def _refused(error: Exception, place: str) -> PermissionError:
    return PermissionError(
        errno.EACCES,
        f"the server refuses the credentials ({_plain(error)}); set the environment variables "
        "REDIS_USERNAME and REDIS_PASSWORD",
        place,
    )


# Scripts, which the server runs as a whole: the key is changed only if it still has this lock's
# value.
_RENEW = "return redis.call('get',KEYS[1])==ARGV[1] and redis.call('pexpire',KEYS[1],ARGV[2]) or 0"
_RELEASE = "return redis.call('get',KEYS[1])==ARGV[1] and redis.call('del',KEYS[1]) or 0"

_POLL_SECONDS = 0.1


class RedisLock:
    """Lock of a run on a Redis server, which a thread renews as long as the run lives.

    The lock of a killed run expires after ``seconds``. ``place`` names the store in messages.
    """

    def __init__(self, client: Any, key: str, seconds: float, place: str) -> None:
        self._client, self._key, self._place = client, key, place
        self._seconds, self._milliseconds = seconds, max(1, round(1000 * seconds))
        self._value = f"{owner()}, {secrets.token_hex(4)}"
        self._valid_until = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="row store lock", daemon=True)

    def acquire(self) -> None:
        """Take the lock; if another run has it, wait until that lock expires or is renewed.

        A renewed lock belongs to a living run, and raises a BlockingIOError.
        """
        before = time.monotonic()
        other, give_up = "", before
        while not self._client.set(self._key, self._value, nx=True, px=self._milliseconds):
            held = (self._client.get(self._key) or b"").decode(errors="replace")
            if held == self._value:  # by an attempt whose answer was lost
                break
            if held and not other:
                other = held
                left = max(0, self._client.pttl(self._key)) / 1000
                give_up = time.monotonic() + left + 2 * _POLL_SECONDS
                warnings.warn(
                    f"{self._place} is locked by {held.split(',')[0]}; if that run was killed, its "
                    f"lock expires in {left:.0f} s: waiting",
                    stacklevel=4,
                )
            # Longer than its remaining time, or with another value: the other run is alive.
            if held and (held != other or time.monotonic() > give_up):
                raise BlockingIOError(
                    errno.EWOULDBLOCK,
                    f"another run has it open ({held.split(',')[0]}); stop it, or choose another "
                    "prefix",
                    self._place,
                )
            time.sleep(_POLL_SECONDS)
            before = time.monotonic()
        self._valid_until = before + self._seconds
        self._thread.start()

    def check(self) -> None:
        """Raise an OSError if the lock has expired, so that another run may have it."""
        if time.monotonic() > self._valid_until:
            raise OSError(
                errno.ESTALE,
                f"the lock could not be renewed for {self._seconds:g} s, and another run may write "
                "here; start again from the last checkpoint",
                self._place,
            )

    def release(self) -> None:
        """Give the lock back."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
            self._client.eval(_RELEASE, 1, self._key, self._value)

    def _renew(self) -> None:
        # Four attempts within the lock's time. It counts from before an attempt, since the answer
        # may be late.
        while not self._stop.wait(self._seconds / 4):
            before = time.monotonic()
            try:
                is_mine = self._client.eval(
                    _RENEW, 1, self._key, self._value, str(self._milliseconds)
                )
            except redis.RedisError:
                continue  # `check` raises if this goes on.
            if not is_mine:
                self._valid_until = 0.0
                return
            self._valid_until = before + self._seconds
