from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
import torch

from djinn_client.protocol import FrameDecoder
from djinnd import messages
from djinnd.messages import MAX_FRAME, decode_from_engine, encode
from tests.support.engine_thread import FOREVER
from tests.support.models import REPOSITORY


class Process:
    """`python -m djinnd.engine`; the test holds the server's end of the socket pair."""

    def __init__(self, *options: str, parent: int | None = None) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(FOREVER)
        with theirs:
            command = [sys.executable, "-m", "djinnd.engine", f"--fd={theirs.fileno()}"]
            command += [f"--parent={os.getpid() if parent is None else parent}", *options]
            self.process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], cwd=REPOSITORY, stderr=subprocess.PIPE, text=True
            )

    def first_word(self) -> messages.FromEngine:
        decoder = FrameDecoder(MAX_FRAME)
        while True:
            data = self.socket.recv(1 << 16)
            assert data, "it ended without a word"
            for frame in decoder.feed(data):
                return decode_from_engine(frame.payload)

    def end(self) -> tuple[int, str]:
        """Exit status and log."""
        try:
            _, log = self.process.communicate(timeout=FOREVER)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            self.socket.close()
        return self.process.returncode, log


@pytest.mark.long
def test_the_engine_is_ready_and_ends_when_told_to() -> None:
    engine = Process("--device=cpu", f"--memory={1 << 30}")
    ready = engine.first_word()
    assert isinstance(ready, messages.Ready)
    assert (ready.device, ready.budget_bytes, ready.pid) == ("cpu", 1 << 30, engine.process.pid)
    engine.socket.sendall(encode(messages.Shutdown()))
    assert engine.end()[0] == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
@pytest.mark.long
def test_a_missing_device_is_reported_in_one_line() -> None:
    status, log = Process("--device=cuda:0").end()
    assert status == 3
    assert "device_refused device=cuda:0" in log and len(log.splitlines()) == 1


def test_the_engine_ends_if_its_server_is_gone_at_the_start() -> None:
    status, log = Process("--device=cpu", parent=1 << 22).end()
    assert status == 1 and "the server is gone already" in log
