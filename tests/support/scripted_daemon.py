"""The daemon's side of a connection, played from a script, with real sockets and frames. Each connection has a thread.

The fixtures at the end are imported by conftest files.
"""

from __future__ import annotations

import array
import fcntl
import os
import shutil
import socket
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from djinn_client.errors import NotAuthenticated
from djinn_client.protocol import (
    MAX_REQUEST,
    ClientMessage,
    Failure,
    FrameDecoder,
    Hello,
    OpenSession,
    ServerMessage,
    SessionInfo,
    SessionOpened,
    Welcome,
    decode_request,
    encode,
)

M = TypeVar("M")

PATIENCE_S = 60  # seconds until a hanging script is ended; no test waits for it


def session_info(**fields: Any) -> SessionInfo:
    known: dict[str, Any] = {
        "id": "s-1",
        "model": "djinn-tiny",
        "priority": "interactive",
        "user": 1000,
        "state": "idle",
        "tokens": 0,
        "kv_tokens": 0,
        "pages": 0,
        "age_s": 0.0,
        "idle_s": 0.0,
        "attached": 1,
    }
    return SessionInfo(**known | fields)


class Line:
    """One connection, from the daemon's side."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(PATIENCE_S)
        self._socket = sock
        self._decoder = FrameDecoder(MAX_REQUEST)
        self._messages: list[ClientMessage] = []

    def receive(self) -> ClientMessage | None:
        """The next message; None if the client has hung up."""
        while not self._messages:
            try:
                data = self._socket.recv(1 << 16)
            except ConnectionResetError:
                data = b""
            if not data:
                return None
            self._messages += [decode_request(frame.payload) for frame in self._decoder.feed(data)]
        return self._messages.pop(0)

    def put_back(self, message: ClientMessage) -> None:
        """The next `receive` returns this message."""
        self._messages.insert(0, message)

    def expect(self, kind: type[M]) -> M:
        message = self.receive()
        assert isinstance(message, kind), f"{kind.__name__} was due, {message} came"
        return message

    def expect_hang_up(self) -> None:
        message = self.receive()
        assert message is None, f"the client should have hung up, {message} came"

    def send(self, *messages: ServerMessage) -> None:
        self._socket.sendall(b"".join(map(encode, messages)))

    def send_bytes(self, data: bytes) -> None:
        self._socket.sendall(data)

    def send_with(self, message: ServerMessage, fds: list[int]) -> None:
        """Sends the frame with its descriptors, which the script keeps."""
        frame = encode(message, len(fds))
        sent = socket.send_fds(self._socket, [frame], fds)
        if sent < len(frame):
            self._socket.sendall(frame[sent:])

    def welcome(self) -> None:
        hello = self.expect(Hello)
        self.send(Welcome(id=hello.id, version="0.1.0", user=1000, admin=False))

    def refuse(self) -> None:
        hello = self.expect(Hello)
        self.send(Failure(id=hello.id, code=NotAuthenticated.code, message="this token is not known"))

    def open_session(self, **fields: Any) -> None:
        self.welcome()
        request = self.expect(OpenSession)
        self.send(SessionOpened(id=request.id, session=session_info(**fields)))

    def await_read(self) -> None:
        """Waits until the other side has read all that was sent."""
        waiting = array.array("i", [1])
        while waiting[0]:
            fcntl.ioctl(self._socket, termios.TIOCOUTQ, waiting)
            time.sleep(0.001)

    def close(self) -> None:
        self._socket.close()


Script = Callable[[Line], None]


class ScriptedDaemon:
    """Takes connections in order and plays one script on each. The last script serves all further connections."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._scripts: list[Script] = []
        self._failures: list[BaseException] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(address)
        self._listener.listen()
        self._acceptor = threading.Thread(target=self._accept)

    def play(self, *scripts: Script) -> str:
        """Starts to listen. → the address."""
        self._scripts = list(scripts)
        self._acceptor.start()
        return self.address

    def play_next(self, script: Script) -> None:
        """Plays this script on all connections that come from now on."""
        self._scripts[:] = [script]

    def stop(self) -> None:
        """Waits for all scripts to end. Raises the error of a script that failed."""
        if self._acceptor.is_alive():
            self._listener.shutdown(socket.SHUT_RDWR)
            self._acceptor.join()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        self._listener.close()
        for failure in self._failures:
            raise failure

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            script = self._scripts.pop(0) if len(self._scripts) > 1 else self._scripts[0]
            thread = threading.Thread(target=self._play, args=(script, Line(sock)))
            self._threads.append(thread)
            thread.start()

    def _play(self, script: Script, line: Line) -> None:
        try:
            script(line)
        except BaseException as failure:
            self._failures.append(failure)
        finally:
            line.close()


@pytest.fixture
def directory() -> Iterator[str]:
    """A folder with a path short enough for a socket."""
    path = tempfile.mkdtemp(prefix="djinn-")
    yield path
    shutil.rmtree(path)


@pytest.fixture
def daemon(directory: str) -> Iterator[ScriptedDaemon]:
    scripted = ScriptedDaemon(os.path.join(directory, "s"))
    yield scripted
    scripted.stop()
