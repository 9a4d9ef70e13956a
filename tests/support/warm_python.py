"""`WarmForks.python`: to its caller, a Python that has imported torch and transformers.

A command line that starts a daemon gets a fork server for it. Another module or file runs in a fork of the warm
process, which this process represents: it waits, ends with the same status, and if it is killed, the fork ends too. The
real Python handles other command lines. This module imports almost nothing, because it is started often.
"""

import fcntl
import json
import os
import socket
import sys

FORK_SERVER = b"fork_server"
_STATUS = 16  # most bytes of an exit status


def ask_for_fork_server(address: str, log: int) -> tuple[int, int, int]:
    """(pid, socket, pidfd) of a fork server; see WarmForks.fork_server."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, _connected(address) as warm_forks:
        socket.send_fds(warm_forks, [FORK_SERVER], [theirs.fileno(), log])
        packet, (pidfd,), _, _ = socket.recv_fds(warm_forks, _STATUS, 1)
    return int(packet), ours.detach(), pidfd


def give_fork_server(fds: list[int]) -> None:
    """Passes the fork server to the daemon that this process becomes next, as a predecessor would: see
    djinnd/server/handover/succession.py."""
    copies = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 5) for fd in fds]
    for fd in fds:
        os.close(fd)
    for number, fd in enumerate(copies, 3):
        os.dup2(fd, number)
    names = "djinnd-nursery:djinnd-nursery-process"
    os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="2", LISTEN_FDNAMES=names)


def _connected(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(address)
    return connection


def main(address: str, *arguments: str) -> None:
    if arguments[:2] == ("-m", "djinnd"):
        give_fork_server(list(ask_for_fork_server(address, 2)[1:]))
    elif arguments[0] == "-m" or arguments[0].endswith(".py"):
        sys.exit(stand_for_command(address, arguments))
    os.execv(sys.executable, [sys.executable, *arguments])


def stand_for_command(address: str, arguments: tuple[str, ...]) -> int:
    """→ the exit status; 1 if a signal has killed the command."""
    with _connected(address) as warm_forks:
        request = json.dumps([arguments, dict(os.environ), os.getcwd()])
        socket.send_fds(warm_forks, [request.encode()], [0, 1, 2])
        return int(warm_forks.recv(_STATUS) or 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
