"""A real gateway for tests: a process in front of a daemon."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from tests.conftest import MODEL, DaemonStarter
from tests.support.chat_families import TOOLS
from tests.support.daemon import PATIENCE, ROOT, Daemon, clean_environ, wait_for


class Gateway:
    """`http` is its section of the configuration; without `listen` it takes a free port of 127.0.0.1. The context
    starts the gateway. Leaving it stops the gateway, and asserts that it exits well and has logged no error except
    `errors`."""

    READY = "gateway_ready"  # the last line that the gateway logs at its start

    def __init__(
        self, folder: Path, daemon: str, http: Mapping[str, Any] | None = None, errors: Collection[str] = ()
    ) -> None:
        self.daemon = daemon  # its address
        self.log_path = folder / "gateway.log"
        self._errors = errors
        self._file = folder / "gateway.yaml"
        self.configure(http or {})
        self.process: subprocess.Popen[bytes]

    def configure(self, http: Mapping[str, Any]) -> None:
        """Writes the configuration, which a running gateway reads at SIGHUP."""
        section = {"listen": "127.0.0.1:0", "loopback_without_token": True} | dict(http)
        told = {"socket": self.daemon, "state_dir": str(self._file.parent), "http": section} | self.sections()
        self._file.write_text(yaml.safe_dump(told))

    def sections(self) -> dict[str, Any]:
        """Further sections of the configuration."""
        return {}

    def __enter__(self) -> Self:
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "djinnd.gateway", f"--config={self._file}"],
                env=clean_environ(),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        wait_for(lambda: self.READY in self.log or self.process.poll() is not None)
        assert self.process.poll() is None, self.log
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.process.terminate()
        status = self.process.wait(PATIENCE)
        if error is not None:
            sys.stderr.write(self.log)
            return
        assert status == 0, self.log
        events = [line.split()[3] for line in self.log.splitlines() if " ERROR " in line]
        assert set(events) <= set(self._errors) and "Traceback" not in self.log, self.log

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @cached_property
    def address(self) -> tuple[str, int]:
        """Read from the log once: a test may send 100,000 requests, and each adds a line to the log."""
        found = re.search(r"gateway_ready address=([\d.]+):(\d+)", self.log)
        assert found is not None
        return found[1], int(found[2])

    @property
    def url(self) -> str:
        return "http://{}:{}".format(*self.address)

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> Answer:
        return self.ask("GET", path, None, headers)

    def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Answer:
        return self.ask("POST", path, body, headers)

    def ask(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Answer:
        """`body`: bytes, or a value that is encoded as JSON."""
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection = HTTPConnection(*self.address, timeout=PATIENCE)
        try:
            connection.request(method, path, content, dict(headers or {}))
            return Answer(connection.getresponse())
        finally:
            connection.close()


@contextmanager
def gateway_with_tools() -> Iterator[Gateway]:
    """A gateway in front of a daemon of its own, whose djinn-tiny has a chat template with tools."""
    with DaemonStarter() as start:
        daemon = start()
        with daemon.client() as client:
            client.load(MODEL, chat_template=TOOLS)
        with Gateway(start.folder(), daemon.address) as running:
            yield running


def close_conversations(daemon: Daemon) -> None:
    """For a daemon that serves other tests too: sessions of conversations outlive their gateway."""
    with daemon.client() as client:
        for kept in client.sessions():
            client.close_session(kept.id)


class Answer:
    def __init__(self, response: HTTPResponse) -> None:
        self.status = response.status
        self.headers = response.headers
        self.content = response.read()

    @property
    def json(self) -> Any:
        return json.loads(self.content)

    @property
    def events(self) -> list[Any]:
        """The events of a stream of server-sent events, up to OpenAI's end mark."""
        lines = [line for line in self.content.decode().splitlines() if line and not line.startswith(":")]
        assert all(line.startswith("data: ") for line in lines), lines
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
