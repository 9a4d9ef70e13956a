from __future__ import annotations

import asyncio
import os
import socket

import pytest
import uvloop

from djinn_client.protocol import HEADER, MAX_FDS, Done, FrameDecoder, Piece, Ping, encode
from djinnd.server.wire.connection import FRAMES_A_TURN, HIGH_WATER, FrameConnection
from tests.support.descriptors import open_descriptors

BIG = 1 << 20


class Owner:
    """Records the events of a connection, and wakes a test that waits for one."""

    def __init__(self):
        self.heard = []
        self.told = asyncio.Event()

    def _tell(self, *what):
        self.heard.append(what)
        self.told.set()

    def frame(self, payload, fds):
        self._tell("frame", payload, fds)

    def broken(self, error):
        self._tell("broken", type(error).__name__)

    def congested(self, is_congested):
        self._tell("congested", is_congested)

    def closed(self):
        self._tell("closed")

    async def until(self, kind):
        async with asyncio.timeout(60):
            while not any(what[0] == kind for what in self.heard):
                self.told.clear()
                await self.told.wait()
        return [what for what in self.heard if what[0] == kind]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def scene(request):
    """Runs a coroutine function with (connection, owner, the peer's socket)."""

    def run(act, output_limit=BIG, accept_fds=False):
        async def play():
            ours, theirs = socket.socketpair()
            with ours, theirs:
                theirs.setblocking(False)
                owner = Owner()
                connection = FrameConnection(ours, owner, 1 << 20, output_limit, accept_fds)
                try:
                    await act(connection, owner, theirs)
                finally:
                    connection.close()
                    await asyncio.sleep(0)

        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(play())

    return run


async def receive(peer, count):
    """Returns the payloads of so many frames."""
    decoder, payloads = FrameDecoder(1 << 28), []
    while len(payloads) < count:
        data = await asyncio.get_running_loop().sock_recv(peer, 1 << 16)
        assert data, "the connection was closed"
        payloads += [frame.payload for frame in decoder.feed(data)]
    return payloads


def test_frames_arrive_complete_however_they_are_cut(scene):
    async def act(connection, owner, peer):
        data = encode(Ping(id=1)) + encode(Ping(id=2))
        for byte in data:
            peer.send(bytes([byte]))
            await asyncio.sleep(0)
        while len(owner.heard) < 2:
            await owner.until("frame")
            await asyncio.sleep(0)
        assert [what[1] for what in owner.heard] == [encode(Ping(id=n))[HEADER.size :] for n in (1, 2)]

    scene(act)


def test_frames_sent_in_one_turn_arrive_in_order(scene):
    async def act(connection, owner, peer):
        for number in range(500):
            connection.send(encode(Done(id=number)))
        assert await receive(peer, 500) == [encode(Done(id=n))[HEADER.size :] for n in range(500)]

    scene(act)


def test_flushed_frames_arrive_in_this_turn_as_far_as_there_is_room(scene):
    async def act(connection, owner, peer):
        connection.flush()
        connection.send(b"one ")
        connection.send(b"two ")
        with pytest.raises(BlockingIOError):
            peer.recv(100)
        connection.flush()
        assert peer.recv(100) == b"one two "
        for number in range(500):  # more than the socket takes at once
            connection.send(encode(Piece(id=number, text="x" * 4000)))
            connection.flush()
        assert connection.queued_bytes > 0
        sent = [encode(Piece(id=number, text="x" * 4000))[HEADER.size :] for number in range(500)]
        assert await receive(peer, 500) == sent

    scene(act, output_limit=16 << 20)


def test_a_frame_larger_than_the_socket_s_buffer_arrives_in_parts(scene):
    async def act(connection, owner, peer):
        payload = os.urandom(8 << 20)
        connection.send(HEADER.pack(b"DJ", 1, 0, len(payload)) + payload)
        connection.send(encode(Done(id=1)))
        assert await receive(peer, 2) == [payload, encode(Done(id=1))[HEADER.size :]]
        assert connection.queued_bytes == 0

    scene(act, output_limit=16 << 20)


def test_a_slow_reader_and_its_recovery_are_noticed(scene):
    async def act(connection, owner, peer):
        frame = encode(Done(id=1))
        while connection.held_bytes <= HIGH_WATER:
            connection.send(frame)
        assert owner.heard == [("congested", True)]
        total, size = connection.queued_bytes, 0
        while size < total:
            size += len(await asyncio.get_running_loop().sock_recv(peer, 1 << 16))
        await asyncio.sleep(0)
        assert owner.heard == [("congested", True), ("congested", False)]

    scene(act)


def test_a_reader_that_is_too_slow_is_disconnected(scene):
    async def act(connection, owner, peer):
        frame = encode(Done(id=1)) + bytes(1000)
        for _ in range(3 * BIG // 1000):
            connection.send(frame)
        await owner.until("closed")
        assert connection.queued_bytes == 0 and not connection.is_open
        assert connection.fd == -1

    scene(act)


def test_one_large_frame_passes_the_limit_and_the_next_does_not(scene):
    async def act(connection, owner, peer):
        connection.send(bytes(2 * BIG))
        assert connection.is_open
        connection.send(b"one more")
        assert not connection.is_open

    scene(act)


def test_descriptors_travel_with_their_frame_and_are_closed_here(scene):
    async def act(connection, owner, peer):
        read, write = os.pipe()
        connection.send(encode(Done(id=1)))
        connection.send(encode(Done(id=2), fds=1), [write])
        connection.send(encode(Done(id=3)))
        assert connection.queued_fds == 1
        for _ in range(3):
            await asyncio.sleep(0)
        assert connection.queued_fds == 0
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(write)
        peer.setblocking(True)
        frame = len(encode(Done(id=1)))
        first, none, _, _ = socket.recv_fds(peer, frame, 4)
        second, fds, _, _ = socket.recv_fds(peer, frame, 4)
        assert first == encode(Done(id=1)) and none == []
        assert second == encode(Done(id=2), fds=1)
        os.write(fds[0], b"through")
        assert os.read(read, 20) == b"through"
        os.close(fds[0])
        os.close(read)

    scene(act)


def test_descriptors_that_cannot_be_sent_are_closed(scene):
    async def act(connection, owner, peer):
        waiting, late = os.memfd_create("waiting"), os.memfd_create("late")
        connection.send(encode(Done(id=1), fds=1), [waiting])
        connection.close()
        connection.send(encode(Done(id=2), fds=1), [late])
        for fd in (waiting, late):
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(fd)

    scene(act)


def test_descriptors_from_a_peer_that_may_send_them(scene):
    async def act(connection, owner, peer):
        fd = os.memfd_create("given")
        socket.send_fds(peer, [encode(Ping(id=1)) + encode(Ping(id=2), fds=1)], [fd])
        while len(owner.heard) < 2:
            await asyncio.sleep(0)
        assert [len(fds) for _, _, fds in owner.heard] == [0, 1]
        given = owner.heard[1][2][0]
        assert os.readlink(f"/proc/self/fd/{given}").startswith("/memfd:given")
        os.close(given)
        os.close(fd)

    scene(act, accept_fds=True)


def test_descriptors_from_a_peer_that_may_not_are_dropped(scene):
    async def act(connection, owner, peer):
        fd = os.memfd_create("unasked")
        before = open_descriptors()
        for number in range(50):
            socket.send_fds(peer, [encode(Ping(id=number), fds=1)], [fd])
        while len(owner.heard) < 50:
            await asyncio.sleep(0)
        assert all(fds == [] for _, _, fds in owner.heard)
        assert open_descriptors() == before
        os.close(fd)

    scene(act)


def test_bytes_that_are_no_frame(scene):
    async def act(connection, owner, peer):
        peer.send(encode(Ping(id=1)) + b"GET / HTTP/1.1\r\n\r\n")
        await owner.until("broken")
        assert [what[0] for what in owner.heard] == ["frame", "broken"]
        connection.send(encode(Done(id=0)))
        connection.close_when_sent()
        connection.send(encode(Done(id=7)))  # too late
        assert await receive(peer, 1) == [encode(Done(id=0))[HEADER.size :]]
        await owner.until("closed")
        assert await asyncio.get_running_loop().sock_recv(peer, 100) == b""

    scene(act)


def test_closing_waits_for_a_slow_reader_for_a_limited_time(scene, monkeypatch):
    async def act(connection, owner, peer):
        connection.send(bytes(BIG))
        connection.close_when_sent()
        assert owner.heard[-1:] != [("closed",)]
        await owner.until("closed")

    monkeypatch.setattr("djinnd.server.wire.connection.LINGER", 0.01)
    scene(act)


def test_a_disconnected_peer_is_reported_once(scene, caplog):
    async def act(connection, owner, peer):
        peer.send(encode(Ping(id=1))[:5])
        peer.close()
        await owner.until("closed")
        connection.close()
        await asyncio.sleep(0)
        assert owner.heard == [("closed",)]

    with caplog.at_level("INFO"):
        scene(act)
    assert "frame_truncated" in caplog.text


@pytest.mark.parametrize("size", [0, 3 * 32 << 10], ids=["short", "long"])
def test_a_disconnect_with_unread_data_is_reported_after_the_last_frames(scene, size):
    """epoll reports EPOLLERR then, after which uvloop watches no more."""

    async def act(connection, owner, peer):
        connection.send(encode(Done(id=1)))
        connection.flush()
        peer.setblocking(True)
        peer.sendall(encode(Ping(id=2)) + encode(Piece(id=3, text="é" * size, token_ids=[])))
        peer.close()
        await owner.until("closed")
        assert [what[0] for what in owner.heard] == ["frame", "frame", "closed"]

    scene(act)


def test_a_peer_that_disconnects_while_it_is_sent_to(scene):
    async def act(connection, owner, peer):
        peer.close()
        connection.send(bytes(BIG))
        await owner.until("closed")

    scene(act)


def test_a_fault_of_the_owner_closes_its_connection_and_spares_the_loop(scene, caplog):
    async def act(connection, owner, peer):
        owner.frame = lambda payload, fds: 1 / 0
        peer.send(encode(Ping(id=1)))
        await owner.until("closed")

    scene(act)
    assert "ZeroDivisionError" in caplog.text


def test_descriptors_without_a_frame_do_not_pile_up(scene):
    async def act(connection, owner, peer):
        fd = os.memfd_create("unasked")
        before = open_descriptors()
        frame = encode(Ping(id=1))
        for place in range(3):
            socket.send_fds(peer, [frame[place : place + 1]], [fd] * (MAX_FDS // 2))
        await owner.until("broken")
        assert owner.heard == [("broken", "ProtocolError")]
        connection.close()
        assert open_descriptors() == before - 1
        os.close(fd)

    scene(act, accept_fds=True)


def test_a_flood_leaves_other_connections_their_turn_and_loses_nothing(scene):
    """One socket has many small frames when a single frame comes in another."""

    async def act(connection, owner, peer):
        flood = [encode(Ping(id=n)) for n in range(100 * FRAMES_A_TURN)]
        ours, theirs = socket.socketpair()
        with ours, theirs:
            other = Owner()
            beside = FrameConnection(ours, other, 1 << 20, BIG)
            data = memoryview(b"".join(flood))
            data = data[peer.send(data) :]
            await owner.until("frame")
            theirs.send(encode(Ping(id=7)))
            await other.until("frame")
            heard = len(owner.heard)
            assert heard < 20 * FRAMES_A_TURN, "the other frame waited for the whole flood"
            while data:
                try:
                    data = data[peer.send(data) :]
                except BlockingIOError:
                    await asyncio.sleep(0)
            async with asyncio.timeout(60):
                while len(owner.heard) < len(flood):
                    await asyncio.sleep(0)
            assert [what[1] for what in owner.heard] == [frame[HEADER.size :] for frame in flood]
            beside.close()
            await asyncio.sleep(0)

    scene(act)


def test_a_connection_that_closes_in_a_flood_delivers_no_more_frames(scene):
    async def act(connection, owner, peer):
        peer.send(b"".join(encode(Ping(id=n)) for n in range(3 * FRAMES_A_TURN)))
        await owner.until("frame")
        connection.close()
        await owner.until("closed")
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(owner.heard) == FRAMES_A_TURN + 1

    scene(act)


def test_frames_before_garbage_in_a_flood_are_delivered(scene):
    async def act(connection, owner, peer):
        peer.send(b"".join(encode(Ping(id=n)) for n in range(3 * FRAMES_A_TURN)) + b"this is no frame at all")
        await owner.until("broken")
        assert [what[0] for what in owner.heard] == ["frame"] * 3 * FRAMES_A_TURN + ["broken"]

    scene(act)


def test_an_end_behind_a_flood_is_reported_after_its_last_frame(scene):
    async def act(connection, owner, peer):
        peer.send(b"".join(encode(Ping(id=n)) for n in range(3 * FRAMES_A_TURN)))
        peer.shutdown(socket.SHUT_WR)
        await owner.until("closed")
        assert len(owner.heard) == 3 * FRAMES_A_TURN + 1

    scene(act)


def test_descriptors_in_a_flood_stay_with_their_frames(scene):
    async def act(connection, owner, peer):
        with open(os.devnull) as file:
            small = b"".join(encode(Ping(id=n)) for n in range(2 * FRAMES_A_TURN))
            for round in range(3):
                peer.send(small)
                socket.send_fds(peer, [encode(Ping(id=100 + round), 1)], [file.fileno()])
        async with asyncio.timeout(60):
            while len(owner.heard) < 3 * (2 * FRAMES_A_TURN + 1):
                await asyncio.sleep(0)
        with_fds = [place for place, (_, _, fds) in enumerate(owner.heard) if fds]
        assert with_fds == [n * (2 * FRAMES_A_TURN + 1) - 1 for n in (1, 2, 3)]
        for place in with_fds:
            os.close(*owner.heard[place][2])

    scene(act, accept_fds=True)
