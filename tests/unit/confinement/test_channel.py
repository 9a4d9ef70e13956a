"""A confined process's socket to the server: messages, and an end without one more word."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from djinn_client.protocol import framed
from djinnd.confinement.channel import ConfinedChannel


@pytest.fixture
def ends() -> Iterator[tuple[ConfinedChannel[bytes, bytes], socket.socket]]:
    ours, server = socket.socketpair()
    with ours, server:
        yield ConfinedChannel(ours, 1 << 10, bytes, framed), server


def test_messages_come_until_the_server_closes(ends: tuple[ConfinedChannel[bytes, bytes], socket.socket]) -> None:
    channel, server = ends
    server.sendall(framed(b"one") + framed(b"two"))
    server.close()
    assert list(channel.messages()) == [(b"one", []), (b"two", [])]


def test_a_server_that_is_killed_with_unread_answers_ends_the_messages(
    ends: tuple[ConfinedChannel[bytes, bytes], socket.socket],
) -> None:
    channel, server = ends
    channel.send(b"answer")
    server.close()
    channel.send(b"another answer")
    assert list(channel.messages()) == []
