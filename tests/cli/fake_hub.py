"""A server that speaks the protocol of the Hugging Face hub, for downloads of one model."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from support.waiting import AMPLE_SECONDS

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """Serves the files of one repository on a free port.

    Attributes:
        num_sent: file -> number of bytes of it that were sent, in all requests.
        stall_after: after this number of bytes of a file the server sends nothing more, until `stop_stalling`.
    """

    def __init__(self, name: str, files: dict[str, bytes]) -> None:
        self.name = name
        self.files = files
        self.num_sent = dict.fromkeys(files, 0)
        self.stall_after: int | None = None
        self.is_stalled = threading.Event()
        self._released = threading.Event()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self, has_body=True)

            def do_HEAD(self) -> None:
                hub.answer(self, has_body=False)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop_stalling(self) -> None:
        self.stall_after = None
        self._released.set()

    def close(self) -> None:
        self.stop_stalling()
        self._server.shutdown()

    def answer(self, handler: BaseHTTPRequestHandler, has_body: bool) -> None:
        path = handler.path.partition("?")[0]
        if path in (f"/api/models/{self.name}", f"/api/models/{self.name}/revision/main"):
            siblings = [{"rfilename": name} for name in self.files]
            content = {"id": self.name, "modelId": self.name, "sha": COMMIT, "siblings": siblings}
            self._send(handler, 200, json.dumps(content).encode(), {"Content-Type": "application/json"}, has_body)
            return
        if path in (f"/api/models/{self.name}/tree/{revision}" for revision in ("main", COMMIT)):
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in self.files.items()
            ]
            self._send(handler, 200, json.dumps(tree).encode(), {"Content-Type": "application/json"}, has_body)
            return
        found = re.fullmatch(rf"/{self.name}/resolve/[^/]+/(.+)", path)
        if found is None or found[1] not in self.files:
            headers = {"X-Error-Code": "RepoNotFound" if found is None else "EntryNotFound"}
            self._send(handler, 404, b"", headers, has_body)
            return
        self._send_file(handler, found[1], has_body)

    def _send_file(self, handler: BaseHTTPRequestHandler, name: str, has_body: bool) -> None:
        content = self.files[name]
        headers = {
            "X-Repo-Commit": COMMIT,
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "Accept-Ranges": "bytes",
        }
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", handler.headers.get("Range", ""))
        if wanted is None:
            self._send(handler, 200, content, headers, has_body, name)
            return
        start, end = int(wanted[1]), int(wanted[2] or len(content) - 1)
        headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
        self._send(handler, 206, content[start : end + 1], headers, has_body, name)

    def _send(
        self,
        handler: BaseHTTPRequestHandler,
        status: int,
        body: bytes,
        headers: dict[str, str],
        has_body: bool,
        name: str | None = None,
    ) -> None:
        handler.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            handler.send_header(key, value)
        handler.end_headers()
        if not has_body:
            return
        limit = len(body) if name is None or self.stall_after is None else self.stall_after
        handler.wfile.write(body[:limit])
        handler.wfile.flush()
        if name is not None:
            self.num_sent[name] += len(body[:limit])
        if limit < len(body):
            self.is_stalled.set()
            self._released.wait(AMPLE_SECONDS)
            handler.close_connection = True
