"""A daemon of one's own, for the demo and the benches: in a folder of its own, gone afterwards."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

START_LIMIT_S = 300.0
STOP_LIMIT_S = 60.0


class DaemonFailed(Exception):
    """It did not start, or did not stop as it should."""


def end_with_parent() -> None:
    """In the child: the kernel sends it SIGTERM when the parent is gone, however that ended."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


class PrivateDaemon:
    """`djinnd` as a child process, told about itself through NOTIFY_SOCKET as systemd would be.

    `folder` receives the socket, the state and the log, and is the caller's to remove. `config` is YAML; the system's
    configuration and DJINND_* variables do not count: a token among them, which is for another daemon, is taken away.
    """

    def __init__(self, folder: Path, config: str, options: Sequence[str] = ()) -> None:
        os.environ.pop("DJINND_TOKEN", None)
        self.address = str(folder / "djinnd.sock")
        self._log = folder / "djinnd.log"
        (folder / "notify").unlink(missing_ok=True)  # of a daemon that was in this folder before
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notify.bind(str(folder / "notify"))
        self._notify.settimeout(0.2)
        file = folder / "djinnd.yaml"
        file.write_text(config)
        options = [f"--config={file}", f"--socket={self.address}", f"--state-dir={folder / 'state'}", *options]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("DJINND_")}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "djinnd", *options],
                env=environment | {"NOTIFY_SOCKET": str(folder / "notify")},
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the parent, which then stops the daemon
                preexec_fn=end_with_parent,
            )

    def wait_until_ready(self, on_status: Callable[[str], None] = lambda status: None) -> None:
        """`on_status` is told what the daemon says of itself, when that is something new. Raises DaemonFailed."""
        said = ""
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise DaemonFailed(f"djinnd ended with exit code {self._process.returncode}")
            try:
                message = self._notify.recv(4096).decode()
            except TimeoutError:
                continue
            for status in re.findall(r"^STATUS=(.*)$", message, re.MULTILINE):
                if status != said:
                    on_status(said := status)
            if re.search(r"^READY=1$", message, re.MULTILINE):
                self._notify.close()  # unread messages would fill it, and the daemon would wait for room
                return
        raise DaemonFailed(f"djinnd was not ready after {START_LIMIT_S:.0f} s")

    def stop(self) -> None:
        """Sends SIGTERM, as systemd does, unless the daemon has ended. Raises DaemonFailed unless it ends with status
        0."""
        self._process.terminate()
        try:
            code = self._process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise DaemonFailed(f"djinnd did not stop within {STOP_LIMIT_S:.0f} s of SIGTERM") from None
        if code != 0:
            raise DaemonFailed(f"djinnd stopped with exit code {code}")

    def wait(self) -> None:
        """Returns when it has ended by itself, or was killed."""
        self._notify.close()
        self._process.wait(STOP_LIMIT_S)

    def shared_memory(self) -> list[str]:
        """The names of its objects in /dev/shm; none once it has stopped."""
        return sorted(path.name for path in Path("/dev/shm").glob(f"djinnd-{self._process.pid}-*"))

    def last_words(self) -> str:
        """The end of its log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._notify.close()
        if self._process.poll() is None:
            self.stop()
