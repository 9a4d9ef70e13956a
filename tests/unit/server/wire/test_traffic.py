from __future__ import annotations

import asyncio
import os
import socket
import threading

import pytest

from djinn_client.errors import FrameTooLarge
from djinnd.server.quotas.ledger import CONNECTION_BYTES, DESCRIPTORS, Ledger, Limit
from djinnd.server.system.closer import EACH, QUICK_BYTES, Closer
from djinnd.server.wire.traffic import Traffic


class Holder:
    def __init__(self, held=0):
        self.held_bytes = held
        self.heard = []

    def room_made(self):
        self.heard.append("room")

    def close(self):
        self.heard.append("closed")


class Lane:
    """A lane that closes at once."""

    def close(self, fds, closed=lambda: None):
        for fd in fds:
            os.close(fd)
            closed()


@pytest.fixture
def ledger():
    return Ledger(lambda resource: Limit(f"limits.{resource.name}", "", 100))


@pytest.fixture
def traffic(ledger):
    return Traffic(ledger, Lane())


def test_frames_without_room_are_admitted_one_after_another(ledger, traffic):
    first, second, third = Holder(), Holder(), Holder()
    assert traffic.take(first, 60)
    assert not traffic.take(second, 60)
    assert not traffic.take(third, 10)  # it fits, but is not first
    traffic.give_back(60)
    assert (second.heard, third.heard) == (["room"], ["room"])
    assert ledger.used(CONNECTION_BYTES) == 70


def test_a_closed_connection_stops_waiting(ledger, traffic):
    first, second, third = Holder(), Holder(), Holder()
    traffic.take(first, 60)
    traffic.take(second, 60)
    traffic.take(third, 10)
    traffic.leave(second)
    assert (second.heard, third.heard) == ([], ["room"])
    assert ledger.used(CONNECTION_BYTES) == 70


def test_a_frame_that_can_never_have_room(ledger, traffic):
    with pytest.raises(FrameTooLarge):
        traffic.take(Holder(), 101)
    assert ledger.used(CONNECTION_BYTES) == 0


def test_the_connection_with_the_most_replies_is_closed_when_there_are_too_many(ledger, traffic):
    some, most = Holder(40), Holder(50)
    traffic.replies(some, 0, 40)
    traffic.replies(most, 0, 50)
    assert (some.heard, most.heard) == ([], [])
    traffic.replies(some, 40, 45)
    traffic.replies(some, 45, 51)
    assert (some.heard, most.heard) == ([], ["closed"])
    traffic.replies(most, 50, 0)
    traffic.replies(some, 51, 0)
    assert ledger.used(CONNECTION_BYTES) == 0


def test_descriptors_count_until_they_are_closed_or_taken(ledger, traffic):
    assert traffic.came(100)
    assert not traffic.came(1)
    traffic.drop([os.memfd_create("a"), os.memfd_create("b")])
    assert ledger.used(DESCRIPTORS) == 99
    traffic.taken(99)
    assert ledger.used(DESCRIPTORS) == 0


def test_a_connection_with_unread_bytes_is_closed_by_the_lane(traffic):
    ours, theirs = socket.socketpair()
    theirs.send(b"unread")
    traffic.hang_up(ours)
    assert ours.fileno() == -1
    with pytest.raises(ConnectionResetError):
        theirs.recv(1)
    theirs.close()


# --- the closer -----------------------------------------------------------------------------------------------------


def test_descriptors_that_linger_delay_only_their_sender(monkeypatch):
    """An event delays close(2), as a lingering socket does."""
    held, close = threading.Event(), os.close
    slow, quick = [os.pipe() for _ in range(EACH + 1)], os.pipe()
    lingering = {fd for pair in slow for fd in pair}
    monkeypatch.setattr(os, "close", lambda fd: (held.wait(60) if fd in lingering else None, close(fd)))

    async def act():
        closer, closed = Closer(), asyncio.Queue()
        closer.lane().close(sorted(lingering), lambda: closed.put_nowait("slow"))
        closer.lane().close(quick, lambda: closed.put_nowait("quick"))
        async with asyncio.timeout(60):
            assert [await closed.get() for _ in quick] == ["quick", "quick"]
            held.set()
            assert [await closed.get() for _ in lingering] == ["slow"] * len(lingering)

    asyncio.run(act())


def test_a_small_memfd_is_closed_at_once_and_a_large_one_by_a_thread():
    async def act():
        lane, closed = Closer().lane(), asyncio.Event()
        small, large = os.memfd_create("small"), os.memfd_create("large")
        os.posix_fallocate(large, 0, 2 * QUICK_BYTES)
        count = []
        lane.close([small], lambda: count.append("small"))
        assert count == ["small"]
        lane.close([large], closed.set)
        assert not closed.is_set()
        async with asyncio.timeout(60):
            await closed.wait()

    asyncio.run(act())
