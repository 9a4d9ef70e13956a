"""A Connection over a socket pair, with its steps driven by hand: sending, waiting, and closing."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from djinn_client.errors import ConnectionLost, InvalidRequest, ProtocolError, SessionNotFound
from djinn_client.protocol import (
    MAX_REQUEST,
    Cancel,
    Done,
    Failure,
    FrameDecoder,
    Generate,
    Logits,
    ModelReply,
    Ping,
    Progress,
    Signal,
    Timings,
    decode_request,
    encode,
)
from djinn_client.transport.connection import Connection
from djinn_client.transport.exchange import close_all
from djinn_client.transport.shm import new_window
from djinn_client.transport.steps import run
from djinn_client.transport.unix_channel import UnixChannel
from tests.support.descriptors import open_descriptors


class Interrupt(BaseException):
    """Stands for Ctrl-C."""


class Pair:
    def __init__(self, kind: type[socket.socket] = socket.socket) -> None:
        ours, self.daemon = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket = kind(fileno=ours.detach())
        self.connection = Connection(UnixChannel(self.socket, "/test"))
        self.daemon.settimeout(60)
        self._decoder = FrameDecoder(MAX_REQUEST)

    def arrived(self) -> list[object]:
        """The messages that lie in the daemon's end."""
        self.daemon.setblocking(False)
        messages: list[object] = []
        while True:
            try:
                data = self.daemon.recv(1 << 16)
            except BlockingIOError:
                return messages
            if not data:
                return [*messages, "end"]
            messages += [decode_request(frame.payload) for frame in self._decoder.feed(data)]

    def reply(self, *messages: Any) -> None:
        self.daemon.sendall(b"".join(map(encode, messages)))


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.connection.close()
    made.daemon.close()


def test_a_call_sends_its_request_and_returns_the_reply(pair: Pair) -> None:
    steps = pair.connection.call(Ping(id=0), Done)
    assert next(steps).what == "read"
    assert pair.arrived() == [Ping(id=1)]
    pair.reply(Done(id=1))
    with pytest.raises(StopIteration) as end:
        next(steps)
    assert end.value.value.message == Done(id=1)


def test_a_failure_is_raised_and_the_connection_goes_on(pair: Pair) -> None:
    pair.reply(Failure(id=1, code="session_not_found", message="gone", data={"session": "x"}))
    with pytest.raises(SessionNotFound, match="gone") as caught:
        run(pair.connection.call(Ping(id=0), Done))
    assert caught.value.data == {"session": "x"}
    pair.reply(Done(id=2))
    assert run(pair.connection.call(Ping(id=0), Done)).message == Done(id=2)


def test_a_message_that_cannot_be_encoded_leaves_the_connection_usable(pair: Pair) -> None:
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        run(pair.connection.call(Generate(id=0, session="s", text="\ud800"), Done))
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        run(pair.connection.tell(Signal("s", "IO_WAIT", tool="\ud800")))
    assert pair.arrived() == []
    pair.reply(Done(id=1))
    assert run(pair.connection.call(Ping(id=0), Done)).message == Done(id=1)


def test_a_connection_that_was_closed_says_so(pair: Pair) -> None:
    begun = pair.connection.call(Ping(id=0), Done)
    next(begun)
    pair.connection.close()
    for steps in (begun, pair.connection.call(Ping(id=0), Done), pair.connection.receive()):
        with pytest.raises(ConnectionLost, match="the connection to /test was closed here"):
            run(steps)


def test_progress_is_told(pair: Pair) -> None:
    told: list[Progress] = []
    pair.reply(Progress(id=1, model="m", stage="read", done=1, total=2), Done(id=1))
    run(pair.connection.call(Ping(id=0), Done, told.append))
    assert told == [Progress(id=1, model="m", stage="read", done=1, total=2)]


def test_memory_that_passes_as_a_descriptor_is_told_of_once(pair: Pair) -> None:
    told: list[tuple[str, int, int]] = []
    sent, came = new_window("sent", 8192), new_window("came", 4096)
    socket.send_fds(pair.daemon, [encode(Logits(id=1, tokens=1, vocab=1, timings=Timings()), fds=1)], [came])
    folder = os.open("/", os.O_RDONLY)
    answer = run(
        pair.connection.call(
            Ping(id=0), Logits, lambda now: told.append((now.stage, now.done, now.total)), [sent, folder]
        )
    )
    close_all([sent, came, folder, *answer.fds])
    assert told == [("sending", 8192, 8192), ("receiving", 4096, 4096)]
    again = new_window("later", 4096)
    pair.reply(Done(id=2))
    run(pair.connection.call(Ping(id=0), Done, fds=[again]))
    os.close(again)
    assert len(told) == 2, "a call without on_progress tells nothing"


def test_an_error_in_the_callback_gives_the_call_up(pair: Pair) -> None:
    def fail(progress: Progress) -> None:
        raise ZeroDivisionError

    pair.reply(Progress(id=1, model="m", stage="read"))
    with pytest.raises(ZeroDivisionError):
        run(pair.connection.call(Ping(id=0), Done, fail))
    assert pair.arrived() == [Ping(id=1), Cancel(target=1)]
    assert not pair.connection.closed


def test_memory_that_comes_is_not_kept_open_when_the_callback_raises(pair: Pair) -> None:
    def fail(progress: Progress) -> None:
        raise ZeroDivisionError

    came = new_window("came", 4096)
    socket.send_fds(pair.daemon, [encode(Logits(id=1, tokens=1, vocab=1, timings=Timings()), fds=1)], [came])
    os.close(came)
    before = open_descriptors()
    with pytest.raises(ZeroDivisionError):
        run(pair.connection.call(Ping(id=0), Logits, fail))
    assert pair.connection.closed
    assert open_descriptors() == before - 1  # the connection's


def test_stopping_to_wait_gives_the_call_up_and_the_next_one_awaits_its_end(pair: Pair) -> None:
    steps = pair.connection.call(Ping(id=0), Done)
    next(steps)
    steps.close()
    assert pair.arrived() == [Ping(id=1), Cancel(target=1)]

    steps = pair.connection.call(Ping(id=0), Done)
    next(steps)
    assert pair.arrived() == []  # not before the last reply of the first
    pair.reply(Progress(id=1, model="m", stage="late"), Done(id=1))
    next(steps)
    assert pair.arrived() == [Ping(id=2)]
    pair.reply(Done(id=2))
    assert run(steps).message == Done(id=2)


def test_the_wait_for_that_end_may_be_given_up_too(pair: Pair) -> None:
    for _ in range(3):
        steps = pair.connection.call(Ping(id=0), Done)
        next(steps)
        steps.close()
    assert pair.arrived() == [Ping(id=1), Cancel(target=1)]
    steps = pair.connection.call(Ping(id=0), Done)
    next(steps)
    pair.reply(Done(id=1))
    next(steps)
    pair.reply(Done(id=2))
    assert run(steps).message == Done(id=2)


def test_an_interrupt_while_bytes_are_taken_closes() -> None:
    class Interrupted(socket.socket):
        def recvmsg(self, *args: Any) -> Any:
            super().recvmsg(*args)
            raise Interrupt

    pair = Pair(Interrupted)
    pair.reply(Done(id=1))
    with pytest.raises(Interrupt):
        run(pair.connection.call(Ping(id=0), Done))
    assert pair.connection.closed
    assert pair.arrived() == [Ping(id=1), "end"]
    pair.daemon.close()


def test_a_large_request_waits_for_room_and_is_whole(pair: Pair) -> None:
    steps = pair.connection.call(Generate(id=0, session="s", text="x" * (4 << 20)), Done)
    arrived: list[object] = []
    while (wait := next(steps)).what == "write":
        arrived += pair.arrived()
    arrived += pair.arrived()
    (request,) = arrived
    assert isinstance(request, Generate)
    assert request.text == "x" * (4 << 20)
    assert wait.what == "read"
    steps.close()


def test_giving_up_in_the_middle_of_a_request_closes(pair: Pair) -> None:
    steps = pair.connection.call(Generate(id=0, session="s", text="x" * (4 << 20)), Done)
    assert next(steps).what == "write"
    steps.close()
    assert pair.connection.closed


def test_giving_up_where_the_cancel_finds_no_room_closes(pair: Pair) -> None:
    size = 0
    pair.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    steps = pair.connection.call(Ping(id=0), Done)
    next(steps)
    try:
        while True:
            size += pair.socket.send(b"\0" * 1024)
    except BlockingIOError:
        steps.close()
    assert pair.connection.closed


def test_the_daemon_hangs_up(pair: Pair) -> None:
    pair.daemon.close()
    with pytest.raises(ConnectionLost, match="/test closed the connection before it had answered"):
        run(pair.connection.call(Ping(id=0), Done))
    assert pair.connection.closed


def test_the_daemon_hangs_up_in_the_middle_of_a_message(pair: Pair) -> None:
    pair.daemon.sendall(encode(Done(id=1))[:-1])
    pair.daemon.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionLost, match="in the middle of a message"):
        run(pair.connection.call(Ping(id=0), Done))


def test_the_reason_that_came_before_the_hang_up_is_told(pair: Pair) -> None:
    pair.reply(Failure(id=0, code="session_not_found", message="the reason"))
    pair.daemon.close()  # the request cannot even be sent any more
    with pytest.raises(SessionNotFound, match="the reason"):
        run(pair.connection.call(Ping(id=0), Done))


def test_garbage_from_the_daemon_is_a_protocol_error(pair: Pair) -> None:
    pair.daemon.sendall(b"HTTP/1.1 400 Bad Request\r\n")
    with pytest.raises(ProtocolError, match="not djinnd's protocol"):
        run(pair.connection.call(Ping(id=0), Done))
    assert pair.connection.closed


def test_a_reply_of_the_wrong_kind_closes_with_its_descriptors(pair: Pair) -> None:
    fd = os.memfd_create("test")
    before = open_descriptors()
    socket.send_fds(pair.daemon, [encode(Logits(id=1, tokens=1, vocab=1, timings=Timings()), fds=1)], [fd])
    with pytest.raises(ProtocolError, match="unexpected Logits"):
        run(pair.connection.call(Ping(id=0), ModelReply))
    assert pair.connection.closed
    assert open_descriptors() == before - 1  # the connection's own
    os.close(fd)


def test_descriptors_arrive_with_their_frames_and_not_inherited(pair: Pair) -> None:
    fd = os.memfd_create("test")
    frame = encode(Logits(id=1, tokens=1, vocab=1, timings=Timings()), fds=1)
    socket.send_fds(pair.daemon, [frame[:5]], [fd])
    pair.daemon.sendall(frame[5:])
    answer = run(pair.connection.call(Ping(id=0), Logits))
    (received,) = answer.fds
    assert os.fstat(received).st_ino == os.fstat(fd).st_ino
    assert not os.get_inheritable(received)
    os.close(received)
    os.close(fd)


def test_no_room_for_a_descriptor(pair: Pair) -> None:
    fd = os.memfd_create("test")
    socket.send_fds(pair.daemon, [encode(Logits(id=1, tokens=1, vocab=1, timings=Timings()), fds=1)], [fd])
    steps = pair.connection.call(Ping(id=0), Logits)
    next(steps)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(ConnectionLost, match="this process may open 3"):
            next(steps)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(fd)


def test_a_full_backlog_is_waited_for(directory: str) -> None:
    from djinn_client.transport.connection import connect

    path = os.path.join(directory, "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(0)
        fillers = [connect(path) for _ in range(2)]
        waits = [next(filler).what for filler in fillers]
        assert waits == ["read", "pause"]  # the second finds no room
        listener.accept()[0].close()
        assert next(fillers[1]).what == "read"
        for filler in fillers:
            filler.close()
