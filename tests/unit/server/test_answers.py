"""What a request is answered with, whatever its handler makes of it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Any

import pytest

from djinn_client import protocol
from djinn_client.protocol import Failure, FrameDecoder, GetTokens, Hello, Ping, TokenIds
from djinnd.config import Limits
from djinnd.server.client import Answer, Call, Client
from tests.support.descriptors import open_descriptors


class Desk:
    """Answers each request with token ids that no message can say, and a descriptor; but a ping."""

    limits = Limits()
    unfinished = 0

    def after(self, then: Callable[..., None], *args: Any) -> None:
        then(*args)

    def is_admin(self, user: int) -> bool:
        return False

    def begun(self) -> None: ...

    def ended(self) -> None: ...

    def gone(self, client: Client) -> None: ...

    def signal(self, client: Client, signal: protocol.Signal) -> None: ...

    async def handle(self, call: Call, request: protocol.Request) -> Answer:
        if isinstance(request, Ping):
            return Answer(protocol.Done(id=call.id))
        return Answer(TokenIds(id=call.id, token_ids=[1 << 64]), [os.open(os.devnull, os.O_RDONLY)])


def test_an_answer_that_no_message_can_say_is_a_failure_and_the_next_request_is_answered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def act() -> list[protocol.ServerMessage]:
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.setblocking(False)
            client = Client(ours, Desk())
            frames = [Hello(id=0, client="test"), GetTokens(id=1, session="s"), Ping(id=2)]
            theirs.send(b"".join(map(protocol.encode, frames)))
            decoder, found = FrameDecoder(1 << 20), list[protocol.ServerMessage]()
            async with asyncio.timeout(30):
                while len(found) < 3:
                    data = await asyncio.get_running_loop().sock_recv(theirs, 1 << 16)
                    found += [protocol.decode_reply(frame.payload) for frame in decoder.feed(memoryview(data))]
            client.close(at_once=True)
            return found

    before = open_descriptors()
    _, failure, done = asyncio.run(act())
    assert isinstance(failure, Failure) and (failure.id, failure.code) == (1, "error"), failure
    assert "its log has the details" in failure.message and "request_failed" in caplog.text
    assert done == protocol.Done(id=2)
    assert open_descriptors() == before
