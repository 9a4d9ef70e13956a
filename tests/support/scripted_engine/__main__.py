"""`python -m tests.support.scripted_engine`: a process with a scripted engine, started like djinnd.engine."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from tests.support.scripted_engine.engine import Engine
from tests.support.scripted_engine.script import Script


def main(command_line: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--script", type=Path, required=True)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)  # its pid; its death closes the stream too
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--memory", type=int, default=0)
    arguments = parser.parse_args(command_line)
    script = msgspec.json.decode(arguments.script.read_bytes(), type=Script)
    if script.marks:
        with open(script.marks, "ab") as marks:
            marks.write(b".")
            start = marks.tell()
        match script.on_start.get(str(start), script.on_start.get("every")):
            case "die":
                sys.exit(1)
            case "refuse":
                sys.exit(3)
            case "hang":
                os.kill(os.getpid(), signal.SIGSTOP)
    with (
        socket.socket(fileno=arguments.fd) as sock,
        suppress(ConnectionError),
    ):  # the server is gone
        Engine(sock, script, arguments.device, arguments.memory).serve()


if __name__ == "__main__":
    main()
