"""A daemon for tests of the server: the real server process, with a scripted engine. See scripted_engine.

`python -X dev -m tests.support.served CONFIG SCRIPT` is that daemon. `Served` forks it from a process that has done its
imports: see forked.py. Its engines are forks of itself, or of a fork server if a third argument is its module.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import uvloop
import yaml

from djinn_client import Client
from djinn_client.protocol import HEADER, MAX_FDS, MAX_REPLY, FrameDecoder, Hello, ServerMessage, decode_reply, encode
from djinnd.config import load
from djinnd.server.engines import engine_process
from djinnd.server.handover.stopping import Stopping
from djinnd.server.handover.succession import Inherited, succeed
from djinnd.server.server import Server
from djinnd.telemetry import configure_logging
from tests.support.forked import SERVED, Forked
from tests.support.scripted_engine.__main__ import main as engine_main
from tests.support.scripted_engine.script import Script

ROOT = Path(__file__).parents[2]
RELOADED = "djinnd_reloaded "
PATIENCE = 60.0  # seconds until a hanging test is ended; no test waits for it


class Served:
    """A daemon in a folder of its own. Leaving the context stops the daemon and asserts that nothing is left behind."""

    def __init__(self, folder: Path, script: Script | None = None, fork_server: str = "", **config: Any) -> None:
        self.folder = folder
        self._fork_server = [fork_server] if fork_server else []
        self.address = str(folder / "djinnd.sock")
        self.log_path = folder / "log"
        (folder / "state").mkdir(exist_ok=True)  # its arena is left alone by other daemons
        self.script = script or Script()
        self.script.marks = str(folder / "marks")
        self.environ = {"HF_HUB_OFFLINE": "1"}
        self._gate = -1
        self.config = {"socket": self.address, "state_dir": str(folder / "state"), "log": {"level": "debug"}} | config
        self.process: Forked | subprocess.Popen[bytes]

    def __enter__(self) -> Self:
        """Returns when the daemon listens; its engine may still be starting."""
        self.start()
        wait_for(lambda: is_listening(self.address) or self.process.poll() is not None)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        status = self.stop()
        if self._gate >= 0:
            os.close(self._gate)
        if error is not None:
            sys.stderr.write(self.log)
            return
        assert status == 0, self.log
        assert not self.left_behind(), self.log
        faults = re.findall(r".*(?:Traceback|(?:request|frame|token)_failed| ERROR asyncio ).*", self.log)
        assert not faults, self.log

    def gated(self) -> Self:
        """Makes the engine wait for `step` before each step. Called before `start`."""
        self.script.gate = str(self.folder / "gate")
        os.mkfifo(self.script.gate)
        self._gate = os.open(self.script.gate, os.O_RDWR)
        return self

    def step(self, count: int = 1) -> None:
        os.write(self._gate, b"." * count)

    def write_files(self) -> tuple[Path, Path]:
        config, script = self.folder / "djinnd.yaml", self.folder / "script.json"
        config.write_text(yaml.safe_dump(self.config, sort_keys=False))
        script.write_bytes(msgspec.json.encode(self.script))
        return config, script

    def start(self) -> None:
        config, script = self.write_files()
        with self.log_path.open("ab") as log:
            arguments = [str(config), str(script), *self._fork_server]
            self.process = Forked(SERVED, arguments, os.environ | self.environ, log.fileno())

    def reload(self, **config: Any) -> None:
        """Changes these values in the configuration file, and waits until the daemon has read it."""
        self.config |= config
        self.write_files()
        seen = self.log.count(RELOADED)
        self.signal(signal.SIGHUP)
        wait_for(lambda: self.log.count(RELOADED) > seen)

    def client(self) -> Client:
        return Client(self.address)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def stop(self) -> int:
        """→ the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)

    def start_again(self, *, kill: bool) -> None:
        """After SIGKILL, or after a clean stop."""
        if kill:
            self.signal(signal.SIGKILL)
            self.process.wait(PATIENCE)
        else:
            assert self.stop() == 0
        self.__enter__()

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    @property
    def starts(self) -> int:
        """The number of engines started."""
        return Path(self.script.marks).stat().st_size if os.path.exists(self.script.marks) else 0

    def kill_starting_engine(self) -> None:
        """Sends SIGKILL to an engine that hangs in its start, of a daemon without a fork server."""
        (pid,) = engines_of(self.process.pid)
        os.kill(pid, signal.SIGKILL)

    def arena(self) -> list[str]:
        return [path.name for path in Path("/dev/shm").glob(f"djinnd-{self.process.pid}-*")]

    def memfds(self) -> int:
        """The number of windows that the daemon holds."""
        folder, names = f"/proc/{self.process.pid}/fd", list[str]()
        for fd in os.listdir(folder):
            with suppress(FileNotFoundError):  # closed meanwhile
                names.append(os.readlink(f"{folder}/{fd}"))
        return sum(name.startswith("/memfd:") for name in names)

    def left_behind(self) -> list[str]:
        files = [name for name in (self.address, f"{self.address}.lock") if os.path.lexists(name)]
        return files + self.arena() + [f"process {pid}" for pid in engines_of(self.process.pid)]


class Wire:
    """A client that sends exactly the messages of a test."""

    def __init__(self, address: str, hello: bool = True) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(PATIENCE)
        self.socket.connect(address)
        self._decoder = FrameDecoder(MAX_REPLY)
        self._replies: list[ServerMessage] = []
        self._fds: list[int] = []
        if hello:
            self.ask(Hello(id=0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()
        for fd in self._fds:
            os.close(fd)

    def send(self, *messages: Any) -> None:
        self.socket.sendall(b"".join(encode(message) for message in messages))

    def send_bytes(self, data: bytes) -> None:
        self.socket.sendall(data)

    def send_payload(self, payload: bytes) -> None:
        self.socket.sendall(encode_payload(payload))

    def reply(self) -> ServerMessage | None:
        """The next message; None if the daemon has hung up."""
        while not self._replies:
            try:
                data, fds, _, _ = socket.recv_fds(self.socket, 1 << 16, MAX_FDS)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._fds += fds
            self._replies += [decode_reply(frame.payload) for frame in self._decoder.feed(data)]
        return self._replies.pop(0)

    def take_fd(self) -> int:
        """The oldest descriptor received. The caller owns it."""
        return self._fds.pop(0)

    def ask(self, message: Any) -> ServerMessage | None:
        self.send(message)
        return self.reply()


def encode_payload(payload: bytes) -> bytes:
    """A frame around any bytes."""
    return HEADER.pack(b"DJ", 1, 0, len(payload)) + payload


def engines_of(pid: int) -> list[int]:
    """The children of `pid`."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(text[text.rindex(")") + 2 :].split()[1]) == pid:
            found.append(int(stat.parent.name))
    return found


def is_listening(address: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(address) == 0


def is_running(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def wait_for(condition: Any) -> None:
    """Polls a condition that no event reports, such as another process's files and state."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


class ForkedEngine:
    """An engine that this process has forked, with the methods of asyncio.subprocess.Process that the server uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._pidfd = os.pidfd_open(pid)
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode


async def fork_engine(command: Sequence[str], environ: Mapping[str, str], fd: int) -> ForkedEngine:
    """In place of `execute`: forks this process, which has an engine's imports. Executing one would do them anew."""
    daemon = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return ForkedEngine(pid)
    status: int = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        os.closerange(3, fd)
        os.closerange(fd + 1, os.sysconf("SC_OPEN_MAX"))
        os.environ.clear()
        os.environ.update(environ)
        engine_main([*command[3:], "--fd", str(fd), "--parent", str(daemon)])
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # nothing of the daemon is ended


def main(config: Path, script: Path, fork_server: Path | None = None) -> None:
    vars(engine_process)["execute"] = fork_engine
    read = partial(load, config, {}, {})
    effective = read()
    configure_logging(effective.config.log.level, "text")
    command = [sys.executable, "-m", "tests.support.scripted_engine", "--script", str(script), "--device", "cpu"]
    fork_server_command = [sys.executable, "-m", str(fork_server)] if fork_server else []

    async def serve() -> list[Inherited]:
        stopping = Stopping()
        with stopping.by_signals():
            server = Server(effective.config, command, fork_server_command, [], stopping, lambda: read().config)
            return await server.serve()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        handed_over = runner.run(serve())
    if handed_over:
        succeed(handed_over)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
