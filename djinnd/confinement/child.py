"""The first moments of every confined child: what the server tells it, and its place on the machine.

The child is a Python module that the server starts with a socket and these arguments. It ends when the server does,
keeps no descriptor but the socket, and is the first to go where the machine is short of processor time or memory.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
from contextlib import suppress
from typing import NamedTuple

from djinnd.confinement import sandbox

_NICE = 10  # engines and the server come first


class Child(NamedTuple):
    """`user`: the principal whose work this is; where the child can, it becomes that user. `memory`: bytes that it may
    take. `parent`: the server's pid."""

    server: socket.socket
    parent: int
    user: int
    memory: int

    def close_sandbox(self, descriptors: int = sandbox.DESCRIPTORS) -> str:
        """Confines this process, or only limits it where the kernel lacks something. → what is lacking."""
        lacking = sandbox.missing()
        if lacking:
            sandbox.limit(self.memory, descriptors)
        else:
            sandbox.close(self.user, self.parent, self.memory, descriptors)
        return lacking


def begin(purpose: str | None) -> Child:
    """For the start of `main`, before anything large is imported."""
    parser = argparse.ArgumentParser(description=purpose)
    parser.add_argument("--fd", type=int, required=True, help="Connected stream socket to the server.")
    parser.add_argument("--parent", type=int, required=True, help="The server's pid: this process ends when it does.")
    parser.add_argument("--user", type=int, required=True, help="The principal; where it can, it becomes that user.")
    parser.add_argument("--memory", type=int, required=True, help="Bytes that its work may take.")
    given = parser.parse_args()
    sandbox.tie_to(given.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the server
    os.closerange(3, given.fd)
    os.closerange(given.fd + 1, os.sysconf("SC_OPEN_MAX"))
    os.nice(_NICE)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # where the machine's memory ends, this goes first
    return Child(socket.socket(fileno=given.fd), given.parent, given.user, given.memory)
