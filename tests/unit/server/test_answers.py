"""Replies, whatever a handler returns."""

from __future__ import annotations

import asyncio
import os
import socket
import time

import pytest

from djinn_client import protocol
from djinn_client.protocol import Failure, FrameDecoder, GetTokens, Hello, Ping, TokenIds
from djinnd.config import Limits, Quota
from djinnd.server.principals.tokens import Tokens
from djinnd.server.quotas.quotas import Rule, Tenant
from djinnd.server.wire.call import ClientCall, FinalReply
from djinnd.server.wire.client import ConnectedClient
from djinnd.server.wire.clients import ClientTable
from tests.support.descriptors import open_descriptors


async def handle(call: ClientCall, request: protocol.Request) -> FinalReply:
    """Answers a ping; answers any other request with token ids that cannot be encoded, and a window."""
    if isinstance(request, Ping):
        return FinalReply(protocol.Done(id=call.id))
    return FinalReply(TokenIds(id=call.id, token_ids=[1 << 64]), [os.memfd_create("window")])


def clients() -> ClientTable:
    def tenant_of(user: int) -> Tenant:
        return Tenant(user, Rule("", Quota()), time.monotonic(), Limits)

    return ClientTable(
        Limits(),
        (),
        handle,
        lambda client, signal: None,
        lambda client: None,
        lambda then, *args: then(*args),
        tenant_of,
        Tokens("/nowhere", Limits(), list),
    )


def test_an_answer_that_cannot_be_encoded_is_a_failure_and_the_next_request_is_answered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def act() -> list[protocol.ServerMessage]:
        before = open_descriptors()
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.setblocking(False)
            client = ConnectedClient(ours, clients())
            frames = [Hello(id=0, client="test"), GetTokens(id=1, session="s"), Ping(id=2)]
            theirs.send(b"".join(map(protocol.encode, frames)))
            decoder, found = FrameDecoder(1 << 20), list[protocol.ServerMessage]()
            async with asyncio.timeout(30):
                while len(found) < 3:
                    data = await asyncio.get_running_loop().sock_recv(theirs, 1 << 16)
                    found += [protocol.decode_reply(frame.payload) for frame in decoder.feed(memoryview(data))]
            client.close(at_once=True)
        async with asyncio.timeout(30):
            while open_descriptors() > before:
                await asyncio.sleep(0.01)
        return found

    _, failure, done = asyncio.run(act())
    assert isinstance(failure, Failure) and (failure.id, failure.code) == (1, "error"), failure
    assert "its log has the details" in failure.message and "request_failed" in caplog.text
    assert done == protocol.Done(id=2)
