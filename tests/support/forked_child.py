"""`python -m tests.support.forked_child WHAT [VALUE]`: a child of the tests' fork server that reports its state and
waits, or ends in a given way."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import sys
from typing import Any


def about_itself(parent: int) -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "told parent": parent,
        "group": os.getpgid(0),
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": sorted(map(int, os.listdir("/proc/self/fd")))[:-1],  # the last is the listing's own
        "stdin": os.readlink("/proc/self/fd/0"),
        "environ": dict(os.environ),
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "modules": sorted(name for name in sys.modules if name.startswith(("djinnd", "djinn_client", "posix_ipc"))),
        "random": random.random(),
        "name": __name__,
        "main": sys.modules["__main__"].__dict__ is globals(),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["tell", "return", "exit", "raise", "kill"])
    parser.add_argument("value", nargs="?", type=int, default=0)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    given = parser.parse_args()
    match given.what:
        case "tell":
            with socket.socket(fileno=given.fd) as sock:
                sock.sendall(json.dumps(about_itself(given.parent)).encode() + b"\n")
                sock.recv(1)
        case "exit":
            sys.exit(given.value)
        case "raise":
            raise ValueError("as it is meant to")
        case "kill":
            os.kill(os.getpid(), given.value)


if __name__ == "__main__":
    main()
