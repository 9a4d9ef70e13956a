from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from djinn_client.errors import ProtocolError
from djinn_client.protocol import FrameDecoder, Sampling
from djinnd.engine.io.channel import ServerChannel, ServerGone
from djinnd.messages import (
    MAX_FDS,
    MAX_FRAME,
    Alive,
    ArenaReady,
    CancelRun,
    Load,
    Loading,
    LogitsReady,
    Run,
    Shutdown,
    ToEngine,
    decode_from_engine,
    encode,
)

FOREVER = 60.0  # seconds until a test has failed


@pytest.fixture
def pair() -> Iterator[tuple[ServerChannel, socket.socket]]:
    ours, theirs = socket.socketpair()
    theirs.settimeout(FOREVER)
    channel = ServerChannel(ours.detach())
    yield channel, theirs
    channel.close()
    theirs.close()


def receive(channel: ServerChannel, count: int) -> list[ToEngine]:
    messages: list[ToEngine] = []
    while len(messages) < count:
        messages += channel.receive(FOREVER)
    return messages


def test_messages_arrive_in_order_however_they_were_cut(pair: tuple[ServerChannel, socket.socket]) -> None:
    channel, server = pair
    sent = [CancelRun(1), Run(2, "s", [1, 2, 3], 4, Sampling(seed=5)), Shutdown()]
    stream = b"".join(encode(message) for message in sent)
    for cut in (1, 9, len(stream)):
        server.sendall(stream[:cut])
        got = channel.receive(FOREVER)
        server.sendall(stream[cut:])
        assert got + (receive(channel, 3 - len(got)) if len(got) < 3 else []) == sent


def test_a_descriptor_arrives_with_the_message_that_it_belongs_to(pair: tuple[ServerChannel, socket.socket]) -> None:
    channel, server = pair
    window = os.memfd_create("window")
    os.write(window, b"weights")
    frame = encode(ArenaReady(2, "", 0, complete=True), fds=1)
    server.sendall(encode(CancelRun(1)))
    socket.send_fds(server, [frame[:5]], [window])
    server.sendall(frame[5:] + encode(ArenaReady(3, "/an-object", 4096, complete=False)) + encode(CancelRun(4)))
    os.close(window)
    first, shared, named, last = receive(channel, 4)
    assert (first, last) == (CancelRun(1), CancelRun(4))
    assert isinstance(shared, ArenaReady) and os.pread(shared.fd, 10, 0) == b"weights"
    assert not os.get_inheritable(shared.fd)
    assert named == ArenaReady(3, "/an-object", 4096, complete=False, fd=-1)
    os.close(shared.fd)


def test_receive_returns_at_once_without_a_message_and_patience(pair: tuple[ServerChannel, socket.socket]) -> None:
    assert pair[0].receive(0.0) == []


def test_a_frame_arrives_whole_with_its_descriptor(pair: tuple[ServerChannel, socket.socket]) -> None:
    channel, server = pair
    read, write = os.pipe()
    message = LogitsReady(1, tokens=2, vocab=3)
    channel.send(message, [read])
    os.close(read)
    data, fds, _, _ = socket.recv_fds(server, 1 << 16, 4)
    (frame,) = FrameDecoder(MAX_FRAME).feed(data)
    assert frame.fds == len(fds) == 1 and decode_from_engine(frame.payload) == message
    os.write(write, b"x")
    os.close(write)
    assert os.read(fds[0], 9) == b"x"
    os.close(fds[0])


def test_frames_of_several_threads_do_not_mix(pair: tuple[ServerChannel, socket.socket]) -> None:
    channel, server = pair
    threads = [
        threading.Thread(target=lambda name=name: [channel.send(Loading(name * 5000, "reading", i)) for i in range(50)])
        for name in "abcd"
    ]
    for thread in threads:
        thread.start()
    decoder, got = FrameDecoder(MAX_FRAME), []
    while len(got) < 200:
        got += [decode_from_engine(frame.payload) for frame in decoder.feed(server.recv(1 << 16))]
    for thread in threads:
        thread.join()
    for name in "abcd":
        assert [message.done for message in got if message.model[0] == name] == list(range(50))


def test_wake_ends_a_wait(pair: tuple[ServerChannel, socket.socket]) -> None:
    channel, _ = pair
    waiting = threading.Thread(target=channel.wake)
    waiting.start()
    assert channel.receive(FOREVER) == []
    waiting.join()
    assert channel.receive(0.0) == []


def test_the_end_of_the_stream_means_that_the_server_is_gone(pair: tuple[ServerChannel, socket.socket]) -> None:
    channel, server = pair
    server.sendall(encode(CancelRun(1)))
    server.close()
    assert receive(channel, 1) == [CancelRun(1)]
    with pytest.raises(ServerGone):
        channel.receive(FOREVER)


def test_a_server_that_exits_without_reading_is_gone(pair: tuple[ServerChannel, socket.socket]) -> None:
    channel, server = pair
    channel.send(Alive())
    server.close()
    with pytest.raises(ServerGone):
        channel.receive(FOREVER)


def test_a_broken_pipe_means_that_the_server_is_gone(pair: tuple[ServerChannel, socket.socket]) -> None:
    channel, server = pair
    server.close()
    with pytest.raises(ServerGone):
        channel.send(Alive())


def test_invalid_bytes_are_an_error(pair: tuple[ServerChannel, socket.socket]) -> None:
    channel, server = pair
    server.sendall(b"this is no frame")
    with pytest.raises(ProtocolError):
        channel.receive(FOREVER)


def test_the_files_of_a_checkpoint_arrive_with_their_load(pair: tuple[ServerChannel, socket.socket]) -> None:
    channel, server = pair
    fds = [os.memfd_create(f"{number}") for number in range(MAX_FDS)]
    names = [f"{number}.safetensors" for number in range(MAX_FDS)]
    sent = encode(Load(1, "m", "/m", files=names), fds=len(fds))
    socket.send_fds(server, [sent + encode(CancelRun(2))], fds)
    load, cancel = receive(channel, 2)
    assert isinstance(load, Load) and load.files == names and cancel == CancelRun(2)
    assert [os.fstat(fd).st_ino for fd in load.fds] == [os.fstat(fd).st_ino for fd in fds]
    for fd in [*fds, *load.fds]:
        os.close(fd)
