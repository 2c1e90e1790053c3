"""Chromium without a window, driven by its DevTools protocol over two pipes."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)


class Page:
    """A page that is open.

    Args:
        reader: Pipe that the browser writes to.
        writer: Pipe that the browser reads from.
    """

    def __init__(self, reader: Any, writer: Any) -> None:
        self._reader, self._writer, self._session = reader, writer, {}
        self._numbers = itertools.count(1)
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": session["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol, and keep errors that the page reports meanwhile."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters} | self._session
        self._writer.write(json.dumps(message).encode() + b"\0")
        self._writer.flush()
        while True:
            answer = json.loads(self._read())
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(json.dumps(answer["params"]))

    def _read(self) -> bytes:
        parts = bytearray()
        while (part := self._reader.read(1)) != b"\0":
            assert part, "the browser ended"
            parts += part
        return bytes(parts)

    def open(self, url: str) -> None:
        """Open a page."""
        self.call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """Return the value of an expression of JavaScript; promises are awaited."""
        result = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, script: str, seconds: float = 30.0) -> None:
        """Wait until an expression is true."""
        stop = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < stop, f"{script} did not become true"
            time.sleep(0.05)

    def picture(self, path: pathlib.Path, width: int, height: int) -> None:
        """Write a picture of the page."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height,
            deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        data = self.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """Start Chromium, whose pipes are its file descriptors 3 and 4."""
    assert CHROMIUM is not None
    to_browser, from_browser = os.pipe(), os.pipe()
    ends = to_browser[0], from_browser[1]
    pipes = f'exec "$@" 3<&{ends[0]} 4>&{ends[1]}'
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe")
        process = subprocess.Popen(
            ["bash", "-c", pipes, "bash", CHROMIUM, *options, f"--user-data-dir={profile}"],
            pass_fds=ends, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for end in ends:
            os.close(end)
        with open(from_browser[0], "rb") as reader, open(to_browser[1], "wb") as writer:
            try:
                yield Page(reader, writer)
            finally:
                process.kill()
                process.wait()
