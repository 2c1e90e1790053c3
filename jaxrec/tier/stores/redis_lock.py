"""A lock in Redis that expires unless its owner renews it."""

from __future__ import annotations

import errno
import secrets
import threading
import time
import warnings
from typing import Any

import redis

from jaxrec.files.lock import owner

# Both change the key only if it has the value of this lock.
_RENEW = "return redis.call('get',KEYS[1])==ARGV[1] and redis.call('pexpire',KEYS[1],ARGV[2]) or 0"
_RELEASE = "return redis.call('get',KEYS[1])==ARGV[1] and redis.call('del',KEYS[1]) or 0"

_POLL_SECONDS = 0.1


class RedisLock:
    """Lock of a run on a server, renewed by a thread.

    Args:
        client: The server.
        key: The key of the lock.
        seconds: Time after which the lock of a run that was killed expires.
        place: The store, for messages.
    """

    def __init__(self, client: Any, key: str, seconds: float, place: str) -> None:
        self._client, self._key, self._place = client, key, place
        self._seconds, self._milliseconds = seconds, max(1, round(1000 * seconds))
        self._value = f"{owner()}, {secrets.token_hex(4)}"
        self._valid_until = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="row store lock", daemon=True)

    def acquire(self) -> None:
        """Take the lock. If another run has it, wait until that one would have renewed it.

        Raises:
            BlockingIOError: The other run still has the lock.
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
        """Raise an OSError if the lock may be another run's by now."""
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
