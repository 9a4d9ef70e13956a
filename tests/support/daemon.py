"""A real daemon for tests: server and engine processes on the CPU, and its notifications as systemd would get them."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from djinn_client import Client, DeviceInfo, ModelInfo
from tests.support.forked import REAL, Forked
from tests.support.warm_forks import ROOT, WarmForks

SHM = Path("/dev/shm")
PATIENCE = 180.0  # seconds until a hanging test is ended; no test waits for it
A_MOMENT = 1.0  # seconds for an engine without a server to exit
THREADS = "1"  # of torch, in daemon and tests: more threads would wait for each other on few shared cores

# The daemon ends when the test process does, even if that is killed.
_TIED = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
os.execvp(sys.argv[1], sys.argv[1:])
"""


class Daemon:
    """Runs `djinnd` in a folder of its own.

    `config` is written to its configuration file; `flags` and `environ` are passed beside it. `wrapper` is a command
    that ends by executing its arguments, and `pass_fds` are descriptors for it. `cold`: the daemon is started by its
    command, and starts its fork server itself. With a wrapper it always is. Otherwise the daemon is forked from a
    process with its imports (forked.py), and gets a fork server with an engine's imports (warm_forks.py). The context
    starts the daemon. Leaving it stops the daemon, and asserts that nothing is left behind and no error was logged
    except `errors`.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any] | None = None,
        *,
        flags: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        wrapper: Sequence[str] = (),
        pass_fds: Sequence[int] = (),
        errors: Sequence[str] = (),
        cold: bool = False,
    ) -> None:
        self.folder = folder
        self.address = str(folder / "djinnd.sock")
        self.log_path = folder / "log"
        (folder / "state").mkdir(exist_ok=True)  # its arena is left alone by other daemons
        self.notifications: list[dict[str, str]] = []
        self.process: Forked | subprocess.Popen[bytes]
        self._errors = set(errors)
        self._pass_fds = pass_fds
        self._cold = cold or bool(wrapper) or bool(pass_fds)
        self._fork_servers: list[int] = []  # fork servers that it was given; they are not its children
        self._descendants: set[int] = set()  # all descendants seen so far
        self._arguments = [f"--config={folder / 'djinnd.yaml'}", *flags]
        self._wrapper = wrapper
        self._environ = clean_environ() | {"NOTIFY_SOCKET": str(folder / "notify")} | dict(environ or {})
        self._settings = {
            "device": "cpu",
            "memory": "1GiB",
            "socket": self.address,
            "state_dir": str(folder / "state"),
        }
        self.configure(config or {})
        self._changed = threading.Condition()
        self._ended = False

    # --- its life ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notify.bind(str(self.folder / "notify"))
        with self.log_path.open("ab") as log:
            self.process = self._executed(log.fileno()) if self._cold else self._forked(log.fileno())
        self._listener = threading.Thread(target=self._listen, name="notifications")
        self._listener.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        status = self._end()
        self._listener.join(PATIENCE)
        self._notify.close()
        if error is not None:
            sys.stderr.write(self.log)
            return
        assert status is None or status == 0, f"djinnd ended with status {status}\n{self.log}"
        self._let_orphans_end()
        assert not self.left_behind(), f"{self.left_behind()}\n{self.log}"
        assert not self.unexpected_errors(), "\n".join(self.unexpected_errors()) + f"\n{self.log}"

    def _executed(self, log: int) -> subprocess.Popen[bytes]:
        command = [*self._wrapper, sys.executable, "-m", "djinnd", *self._arguments]
        return subprocess.Popen(
            [sys.executable, "-c", _TIED, *command],
            env=self._environ,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=self._pass_fds,
        )

    def _forked(self, log: int) -> Forked:
        """With a new fork server, which no other test has used."""
        made = _warm_forks().fork_server(log)
        self._fork_servers.append(made.pid)
        given = [made.socket, made.pidfd]
        try:
            return Forked(REAL, self._arguments, self._environ, log, given)
        finally:
            for fd in given:
                os.close(fd)

    def configure(self, config: Mapping[str, Any]) -> None:
        """Writes the configuration file, as the constructor does."""
        (self.folder / "djinnd.yaml").write_text(yaml.safe_dump(self._settings | dict(config), sort_keys=False))

    def wait_until_ready(self) -> None:
        self.wait_until_told(lambda told: told.get("READY") == "1")
        self._look_for_descendants()

    def wait_until_told(self, wanted: Callable[[dict[str, str]], bool]) -> dict[str, str]:
        """Returns the first notification, past or future, that is `wanted`."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or any(map(wanted, self.notifications)), PATIENCE)
            found = next(filter(wanted, self.notifications), None)
        assert found is not None, f"djinnd {'ended' if self._ended else 'did not say it in time'}\n{self.log}"
        return found

    def _listen(self) -> None:
        """Receives notifications on a thread until the daemon ends."""
        with open(os.pidfd_open(self.pid)) as end:
            while self._notify in select.select([self._notify, end], [], [])[0]:
                message = dict(line.split("=", 1) for line in self._notify.recv(4096).decode().splitlines())
                with self._changed:
                    self.notifications.append(message)
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def reload(self, config: Mapping[str, Any], told: str = "djinnd_reloaded ") -> None:
        """Writes the configuration and sends SIGHUP; returns when the log says `told`."""
        self.configure(config)
        before = self.log.count(told)
        self.signal(signal.SIGHUP)
        wait_for(lambda: self.log.count(told) > before)

    def wait(self) -> int:
        """→ its exit status."""
        return self.process.wait(PATIENCE)

    def kill(self) -> None:
        """Sends SIGKILL; returns when its engine is gone too."""
        self._look_for_descendants()
        self.signal(signal.SIGKILL)
        self.wait()
        wait_for(lambda: not any(map(is_alive, self._descendants)))

    def _look_for_descendants(self) -> None:
        for pid in (self.pid, *self._fork_servers):
            self._descendants.update(descendants_of(pid))
        self._descendants.update(self._fork_servers)

    def _end(self) -> int | None:
        """Sends SIGTERM. → the exit status, or None if a test has ended the daemon. No process survives this."""
        if self.process.poll() is not None:
            return None
        self._look_for_descendants()
        self.signal(signal.SIGTERM)
        try:
            return self.wait()
        except subprocess.TimeoutExpired:
            self.kill()
            return -signal.SIGKILL

    def _let_orphans_end(self) -> None:
        """Waits for an engine that was being forked when its daemon stopped: it notices that by itself a moment later.
        No other process may be left."""
        heard_of = {*self._fork_servers, *map(int, re.findall(r"engine_started pid=(\d+)", self.log))}
        until = time.monotonic() + A_MOMENT
        while any(map(is_alive, self._descendants - heard_of)) and time.monotonic() < until:
            time.sleep(0.01)

    # --- what is there ----------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        return self.process.pid

    def client(self) -> Client:
        return Client(self.address)

    def device(self) -> DeviceInfo:
        with self.client() as client:
            (device,) = client.status().devices
        if device.pid:
            self._descendants.add(device.pid)
        return device

    def kill_engine(self) -> int:
        """Sends SIGKILL to the current engine. → its pid."""
        pid = self.device().pid
        os.kill(pid, signal.SIGKILL)
        return pid

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def unexpected_errors(self) -> list[str]:
        lines = [line for line in self.log.splitlines() if " ERROR " in line or " CRITICAL " in line]
        return [line for line in lines if line.split()[3] not in self._errors] + [
            line for line in self.log.splitlines() if line.startswith("Traceback")
        ]

    def shared_memory(self) -> list[str]:
        return sorted(path.name for path in SHM.glob(f"djinnd-{self.pid}-*"))

    def left_behind(self) -> list[str]:
        files = [name for name in (self.address, f"{self.address}.lock") if os.path.lexists(name)]
        return files + self.shared_memory() + [f"process {pid}" for pid in sorted(self._descendants) if is_alive(pid)]


@cache
def _warm_forks() -> WarmForks:
    return WarmForks(clean_environ())


def warm_python() -> str:
    """The sys.executable of a command that starts daemons or imports torch: see warm_python.py."""
    return str(_warm_forks().python)


def clean_environ() -> dict[str, str]:
    """This process's environment, without variables that configure a daemon or a client."""
    ours = ("DJINND_", "LISTEN_", "NOTIFY_SOCKET", "WATCHDOG_", "STATE_DIRECTORY")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    path = os.pathsep.join([str(ROOT), str(ROOT / "tools")])
    return environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": THREADS, "HF_HUB_OFFLINE": "1"}


def descendants_of(pid: int) -> list[int]:
    """The fork server, its engine, and the engine's children."""
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
    return children + [found for child in children for found in descendants_of(child)]


def is_alive(pid: int) -> bool:
    """False for a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat[stat.rindex(")") + 2] != "Z"


def descriptors_of(pid: int) -> list[str]:
    """The kind of each of the process's descriptors: a path, or a word such as socket or /memfd."""
    return [target.split(":")[0] for target in targets_of(pid)]


def targets_of(pid: int) -> list[str]:
    """The target of each of the process's descriptors."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(os.readlink(link))
        except FileNotFoundError:  # closed meanwhile
            continue
    return sorted(found)


def expect_no_windows(server: int, engine: int) -> None:
    """Asserts that neither process has a memfd open, once they have ended their work."""

    def windows() -> list[str]:
        named = {"server": server, "engine": engine}
        return [f"{name} {to}" for name, pid in named.items() for to in targets_of(pid) if to.startswith("/memfd:")]

    with suppress(AssertionError):
        wait_for(lambda: not windows())
    assert not (left := windows()), left


def expect_held(daemon: Daemon, before: dict[str, object]) -> None:
    """Asserts that the daemon holds no more and no less than `before`, once its processes have ended their work."""
    with suppress(AssertionError):
        wait_for(lambda: holdings(daemon) == before)
    assert holdings(daemon) == before


def wait_for(condition: Callable[[], Any]) -> None:
    """Polls a condition that no event reports, such as another process's files and state."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def lacks_tiers(model: ModelInfo) -> bool:
    """True until the tiers of a model with lower tiers are set up. They come a moment after the model, host and disk
    together, or a note says why they cannot."""
    refused = any("no pages on the host" in note for note in model.notes)
    return model.state == "ready" and not model.host_pages and not refused


def end_text_workers(daemon: Daemon) -> None:
    """Kills the daemon's text workers. Returns when the daemon has closed its connections to them."""

    def living() -> set[str]:
        started, ended = (re.findall(rf"text_worker_{what} .*pid=(\d+)", daemon.log) for what in ("started", "ended"))
        return set(started) - set(ended)

    for pid in living():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    wait_for(lambda: not living())


def holdings(daemon: Daemon) -> dict[str, object]:
    """The daemon's resources when no other client is connected and all sessions are gone, and the findings of its
    audit.

    Waits for that, and for the end of work beside the steps: lower tiers of all models set up, no page being copied, no
    window being closed, no checkpoint being inspected. Ends text workers, which the daemon keeps until they had no
    question for a minute.
    """
    end_text_workers(daemon)
    engine = daemon.device().pid
    with daemon.client() as client:
        wait_for(lambda: client.status().connections == 1)
        wait_for(lambda: not any(client.status().sessions.values()))
        wait_for(lambda: not any(map(lacks_tiers, client.models())))
        wait_for(lambda: not any(model.pages_used for model in client.models()))
        expect_no_windows(daemon.pid, engine)
        wait_for(lambda: daemon.log.count("inspection_started") == daemon.log.count("inspection_ended"))
        status = client.status(check=True)
        return {
            "findings": status.integrity,
            "pages": [model.pages_used for model in status.models],
            "device bytes": status.devices[0].used_bytes,
            "restarts": status.devices[0].restarts,
            "server's descriptors": descriptors_of(daemon.pid),
            "engine's descriptors": descriptors_of(engine),
            "shared memory": daemon.shared_memory(),
        }
