from __future__ import annotations

import asyncio
import errno
import socket

import pytest
import uvloop

from djinnd.server.wire import listener as listener_module
from djinnd.server.wire.listener import Listener


class Exhaustible:
    """A listening socket whose process can run out of descriptors."""

    def __init__(self, sock):
        self._sock = sock
        self.refusals = 0
        self.exhausted = False

    def accept(self):
        if self.exhausted:
            self.refusals += 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self._sock.accept()

    def __getattr__(self, name):
        return getattr(self._sock, name)


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_all_connections_are_accepted_and_a_lack_of_descriptors_is_waited_out(folder, factory, monkeypatch, caplog):
    monkeypatch.setattr(listener_module, "PAUSE", 0.05)

    async def play():
        accepted = asyncio.Queue()
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(f"{folder}/s")
            sock.listen(200)
            wrapped = Exhaustible(sock)
            listener = Listener(wrapped, accepted.put_nowait)
            peers = [socket.socket(socket.AF_UNIX) for _ in range(150)]
            for peer in peers[:100]:
                peer.connect(f"{folder}/s")
            taken = [await accepted.get() for _ in range(100)]
            wrapped.exhausted = True
            for peer in peers[100:]:
                peer.connect(f"{folder}/s")
            async with asyncio.timeout(60):
                while wrapped.refusals < 2:
                    await asyncio.sleep(0)
            assert accepted.empty()
            wrapped.exhausted = False
            taken += [await accepted.get() for _ in range(50)]
            listener.close()
            for one in [*taken, *peers]:
                one.close()

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(play())
    assert "accept_paused" in caplog.text
