"""A server with the parts of Hugging Face's hub that a data set is read by, for tests."""

from __future__ import annotations

import contextlib
import http.server
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator, Mapping


@contextlib.contextmanager
def serve_hub(files: Mapping[str, bytes]) -> Iterator[str]:
    """Serve the data set ``owner/name`` with some files; yield the address of the server."""
    handler = type("Handler", (_Handler,), {"files": files})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    files: Mapping[str, bytes]

    def do_GET(self) -> None:
        path = urllib.parse.unquote(urllib.parse.urlparse(self.path).path)
        if tree := re.fullmatch("/api/datasets/owner/name/tree/main/?(.*)", path):
            self._send_json(list(self._tree(tree[1], "recursive=true" in self.path.lower())))
        elif path == "/api/datasets/owner/name":
            self._send_json({"_id": "1", "id": "owner/name", "sha": "s", "siblings": []})
        elif resolved := re.fullmatch("/datasets/owner/name/resolve/main/(.*)", path):
            self._send_file(self.files[resolved[1]])
        else:
            self._send(b"{}", 404, {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def _tree(self, above: str, is_recursive: bool) -> Iterator[dict]:
        """Yield the files and directories in a directory, as the hub describes them."""
        prefix = f"{above}/" if above else ""
        directories = set()
        for name, content in self.files.items():
            first, *rest = name.removeprefix(prefix).split("/")
            if not name.startswith(prefix):
                continue
            if rest and prefix + first not in directories:
                directories.add(prefix + first)
                yield {"type": "directory", "oid": first, "size": 0, "path": prefix + first}
            if is_recursive or not rest:
                yield {"type": "file", "oid": name, "size": len(content), "path": name}

    def _send_file(self, content: bytes) -> None:
        headers = {"ETag": '"tag"', "X-Repo-Commit": "0" * 40, "Accept-Ranges": "bytes"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if wanted is None:
            self._send(content, 200, headers)
            return
        first, last = int(wanted[1]), int(wanted[2] or len(content) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        self._send(content[first : last + 1], 206, headers)

    def _send_json(self, value: object) -> None:
        self._send(json.dumps(value).encode(), 200, {"Content-Type": "application/json"})

    def _send(self, body: bytes, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""
