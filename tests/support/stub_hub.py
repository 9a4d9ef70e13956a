"""A hub on this machine: one repository over HTTP, with the endpoints that huggingface_hub uses."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

COMMIT = "c" * 40


class Served(NamedTuple):
    path: str
    first: int  # byte


class StubHub(ThreadingHTTPServer):
    """`cut`: bytes after which the transfer of a file breaks off, once."""

    daemon_threads = True

    def __init__(self, hub_id: str, files: Mapping[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.hub_id = hub_id
        self.files = files
        self.cut: dict[str, int] = {}
        self.served: list[Served] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def stub_hub(hub_id: str, files: Mapping[str, bytes]) -> Iterator[StubHub]:
    hub = StubHub(hub_id, files)
    thread = threading.Thread(target=hub.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()


class _Answers(BaseHTTPRequestHandler):
    server: StubHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        hub = self.server
        path = self.path.partition("?")[0]
        before = f"/{hub.hub_id}/resolve/{COMMIT}/"
        if path.startswith(f"/api/models/{hub.hub_id}"):
            self._info(path)
        elif path.startswith(before) and path.removeprefix(before) in hub.files:
            self._file(path.removeprefix(before), with_body)
        else:
            self._send(404, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"}, with_body)

    def _info(self, path: str) -> None:
        if "/tree/" in path:
            listed: Any = [{"type": "file", "path": n, "size": len(d), "oid": _tag(d)} for n, d in self._files()]
        else:
            siblings = [{"rfilename": name, "size": len(data)} for name, data in self._files()]
            listed = {"id": self.server.hub_id, "modelId": self.server.hub_id, "sha": COMMIT, "siblings": siblings}
        self._send(200, json.dumps(listed).encode(), {"Content-Type": "application/json"}, True)

    def _file(self, name: str, with_body: bool) -> None:
        data, first = self.server.files[name], 0
        headers = {"ETag": f'"{_tag(data)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if (wanted := self.headers.get("Range", "")) and wanted != "bytes=0-":
            first = int(wanted.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        cut = None
        if with_body:
            self.server.served.append(Served(name, first))
            cut = self.server.cut.pop(name, None)
        self._send(206 if first else 200, data[first:], headers, with_body, cut)

    def _send(self, code: int, body: bytes, headers: dict[str, str], with_body: bool, cut: int | None = None) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body[:cut])
            if cut is not None:
                self.close_connection = True

    def _files(self) -> list[tuple[str, bytes]]:
        return list(self.server.files.items())

    def log_message(self, format: str, *args: Any) -> None:
        return None


def _tag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
