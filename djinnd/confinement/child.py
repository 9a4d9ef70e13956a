"""The start of a confined child process: its arguments, its descriptors, and its priority on the machine.

The child is a Python module that the server starts with a socket and these arguments. It ends with the server and keeps
only the socket open. If the machine is short of processor time or memory, the child yields or is killed first.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
from contextlib import suppress
from typing import NamedTuple

from djinnd.confinement import sandbox
from djinnd.lifeline import tie_to

_NICE = 10  # engines and the server come first


class Child(NamedTuple):
    """The arguments of a child."""

    server: socket.socket
    parent: int  # pid of the server
    user: int  # principal that the child works for; the child becomes that user if it can
    memory: int  # bytes that the child may take

    def close_sandbox(self, descriptors: int = sandbox.DESCRIPTORS) -> str:
        """Confines this process, or only sets limits if the kernel lacks a feature. Returns that feature; "" if
        none."""
        lacking = sandbox.missing()
        if lacking:
            sandbox.limit(self.memory, descriptors)
        else:
            sandbox.close(self.user, self.parent, self.memory, descriptors)
        return lacking


def begin(purpose: str | None) -> Child:
    """Parses the arguments and sets the process up. Called at the start of `main`, before large imports."""
    parser = argparse.ArgumentParser(description=purpose)
    parser.add_argument("--fd", type=int, required=True, help="Connected stream socket to the server.")
    parser.add_argument("--parent", type=int, required=True, help="The server's pid: this process ends when it does.")
    parser.add_argument("--user", type=int, required=True, help="The principal; where it can, it becomes that user.")
    parser.add_argument("--memory", type=int, required=True, help="Bytes that its work may take.")
    given = parser.parse_args()
    tie_to(given.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is meant for the server
    os.closerange(3, given.fd)
    os.closerange(given.fd + 1, os.sysconf("SC_OPEN_MAX"))
    os.nice(_NICE)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # the kernel kills this process first if the machine runs out of memory
    return Child(socket.socket(fileno=given.fd), given.parent, given.user, given.memory)
