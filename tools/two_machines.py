"""Two machines in one: two network namespaces and a cable between them.

    this process, after `enter`             what `Client.command` runs
    SERVER, at the end `server0` ── veth ── `client0`, at CLIENT

Each namespace has its end of the cable and a loopback, nothing else, and no name in the file system: the kernel removes
it with its last process. A user who is not root gets a user namespace around both, where the system allows that.

    python -m tools.two_machines        exit code 0 where this works; else SKIPPED, and what to do
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, NoReturn

SERVER, CLIENT = "10.83.0.1", "10.83.0.2"
SERVER_END, CLIENT_END = "server0", "client0"
SKIPPED = 77  # the exit code of a test that cannot run here, as automake has it
USER_NAMESPACE = ["--user", "--map-current-user", "--keep-caps"]
ENTERED = "TWO_MACHINES_ENTERED"
REMEDY = (
    "Allow network namespaces: run as root; or on Debian and Ubuntu `sysctl kernel.unprivileged_userns_clone=1` and "
    "`sysctl kernel.apparmor_restrict_unprivileged_userns=0`; or give a container `--cap-add=SYS_ADMIN "
    "--cap-add=NET_ADMIN --security-opt seccomp=unconfined`"
)


class NamespacesRefused(Exception):
    """This user may not have network namespaces here."""


def entered() -> bool:
    """Whether this process was started by `enter`."""
    return ENTERED in os.environ


def enter(*arguments: str) -> NoReturn:
    """Replaces this process by Python with these arguments, in a namespace of its own. Raises NamespacesRefused."""
    expect_allowed()
    command = [*_apart(), sys.executable, *arguments]
    os.execvpe(command[0], command, _environ() | {ENTERED: "1"})


def expect_allowed() -> None:
    """Raises NamespacesRefused where this user may not make namespaces and a cable."""
    try:
        _run(*_apart(), "ip", "link", "add", "one", "type", "veth", "peer", "name", "other")
    except NamespacesRefused as refused:
        raise NamespacesRefused(f"network namespaces cannot be used here: {refused}. {REMEDY}.") from None


def _environ() -> dict[str, str]:
    """`ip` and `tc` are in folders that a plain user's PATH may lack."""
    return os.environ | {"PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"}


def _apart() -> list[str]:
    """Runs a command in a network namespace. root keeps its user: a daemon of root gives up its groups in children,
    which a user namespace forbids."""
    return ["unshare", *(USER_NAMESPACE if os.geteuid() else []), "--net"]


class Client(NamedTuple):
    """The client's machine. `pid` is a process in its namespace."""

    pid: int

    def command(self, *command: str) -> list[str]:
        """The command that runs this one there."""
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net", *command]


@contextmanager
def client_machine() -> Iterator[Client]:
    """The client's namespace, and the cable to it from this process's one."""
    holds = ["unshare", "--net", "sh", "-c", "echo; exec cat"]  # `cat` ends with this process, which has its input
    pipe = subprocess.PIPE
    with subprocess.Popen(holds, stdin=pipe, stdout=pipe, start_new_session=True) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        with holder.stdin:
            if not holder.stdout.readline():
                raise NamespacesRefused("the client's network namespace could not be made")
            client = Client(holder.pid)
            far_end = ["peer", "name", CLIENT_END, "netns", str(holder.pid)]
            _run("ip", "link", "add", SERVER_END, "type", "veth", *far_end)
            try:
                _plug([], SERVER_END, SERVER)
                _plug(client.command(), CLIENT_END, CLIENT)
                yield client
            finally:
                _run("ip", "link", "delete", SERVER_END)


def _plug(there: list[str], device: str, address: str) -> None:
    _run(*there, "ip", "address", "add", f"{address}/24", "dev", device)
    for each in ("lo", device):
        _run(*there, "ip", "link", "set", each, "up")


def crossed(device: str) -> int:
    """Bytes that the device has sent and received, with the packets' headers."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == device:
            figures = counters.split()
            return int(figures[0]) + int(figures[8])
    raise ValueError(f"this namespace has no device {device}")


def _run(*command: str) -> None:
    """Raises NamespacesRefused with the command and its last words."""
    try:
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=_environ())
    except FileNotFoundError as error:
        raise NamespacesRefused(f"there is no {error.filename} (of util-linux and iproute2)") from error
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines() or [f"exit code {error.returncode}"]
        raise NamespacesRefused(f"`{' '.join(command)}`: {said[-1]}") from error


def main() -> int:
    try:
        expect_allowed()
    except NamespacesRefused as refused:
        print(refused, file=sys.stderr)
        return SKIPPED
    return 0


if __name__ == "__main__":
    sys.exit(main())
