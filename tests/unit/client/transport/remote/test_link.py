"""Two ends of a link without a network: everything arrives once and in order, however often the connection breaks."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from djinn_client.errors import OutOfMemory, ProtocolError
from djinn_client.transport.remote.link import ACK_RECORDS, MAX_WINDOWS, Arrived, Link
from djinn_client.transport.remote.records import COUNT, MAX_PAYLOAD, Kind, Record
from djinn_client.transport.shm import map_window


def hand(link: Link, record: Record) -> Record | None:
    """Gives the link a record, as a carrier does."""
    return link.take(record.kind, bytes(record.payload))


def carry(sender: Link, receiver: Link, most: int = 1 << 30) -> int:
    """Carries up to `most` records. Returns how many."""
    for count in range(most):
        record = sender.next()
        if record is None:
            return count
        assert hand(receiver, record) is None
    return most


def reconnect(one: Link, other: Link) -> None:
    received = one.received, other.received
    one.resume(received[1])
    other.resume(received[0])


def collected(link: Link) -> Iterator[Arrived]:
    while (arrived := link.collect()) is not None:
        yield arrived


def content(fd: int) -> bytes:
    try:
        return bytes(map_window(fd, os.fstat(fd).st_size))
    finally:
        os.close(fd)


Message = tuple[bytes, list[bytes]]  # a frame and its windows
messages = st.lists(
    st.tuples(st.binary(min_size=1, max_size=40), st.lists(st.binary(min_size=1, max_size=40), max_size=2)), max_size=12
)


@settings(max_examples=150)
@given(there=messages, back=messages, breaks=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=10))
def test_all_arrives_once_and_in_order(
    there: list[Message], back: list[Message], breaks: list[tuple[int, int]]
) -> None:
    one, other = Link(), Link()
    for link, said in ((one, there), (other, back)):
        for frame, windows in said:
            for window in windows:
                link.put_window(memoryview(window))
            link.put_frames(frame)
    for sent, returned in breaks:
        carry(one, other, sent)
        carry(other, one, returned)
        for link in (one, other):  # these records are lost
            link.next()
        reconnect(one, other)
    while carry(one, other) + carry(other, one):
        pass
    for link, said in ((other, there), (one, back)):
        arrived = list(collected(link))
        assert b"".join(bytes(each.data) for each in arrived) == b"".join(frame for frame, _ in said)
        assert [content(fd) for each in arrived for fd in each.fds] == [w for _, windows in said for w in windows]


def test_windows_come_with_the_frame_after_them() -> None:
    one, other = Link(), Link()
    one.put_frames(b"first")
    one.put_window(memoryview(b"window"))
    one.put_frames(b"second")
    carry(one, other)
    first, second = collected(other)
    assert (bytes(first.data), first.fds, bytes(second.data)) == (b"first", [], b"second")
    assert content(second.fds[0]) == b"window"


def test_a_sealed_window_cannot_be_written() -> None:
    one, other = Link(), Link(is_sealed=True)
    one.put_window(memoryview(b"window"))
    one.put_frames(b"frame")
    carry(one, other)
    (arrived,) = collected(other)
    with pytest.raises(PermissionError):
        os.write(arrived.fds[0], b"x")
    assert fcntl.fcntl(arrived.fds[0], fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    assert content(arrived.fds[0]) == b"window"


def test_large_frames_and_windows_are_cut_into_records() -> None:
    one, other = Link(), Link()
    large = os.urandom(3 * MAX_PAYLOAD + 5)
    one.put_window(memoryview(large))
    one.put_frames(large)
    carry(one, other)
    (arrived,) = collected(other)
    assert bytes(arrived.data) == large
    assert content(arrived.fds[0]) == large


def test_acknowledged_frames_are_not_held_any_more() -> None:
    one, other = Link(), Link()
    for _ in range(ACK_RECORDS):
        one.put_frames(b"0123456789")
    carry(one, other)
    assert one.held == 10 * ACK_RECORDS
    carry(other, one)
    assert one.held == 0


def test_a_window_is_acknowledged_when_it_is_complete() -> None:
    one, other = Link(), Link()
    one.put_window(memoryview(b"window"))
    carry(one, other)
    acknowledgement = other.next()
    assert acknowledgement == Record(Kind.ACK, COUNT.pack(2))
    other.close_windows()


def test_sent_bytes_of_windows_count_once_they_are_acknowledged() -> None:
    one, other = Link(), Link()
    one.put_window(memoryview(bytes(2 * MAX_PAYLOAD)))
    one.put_frames(b"frame")
    carry(one, other, 2)  # the window's announcement, and its first half
    assert (other.receiving.done, other.receiving.total) == (MAX_PAYLOAD, 2 * MAX_PAYLOAD)
    assert (one.sending.done, one.sending.total) == (0, 2 * MAX_PAYLOAD)
    reconnect(one, other)
    assert one.sending.done == MAX_PAYLOAD
    carry(one, other)
    carry(other, one)
    assert (one.sending.done, other.receiving.done) == (2 * MAX_PAYLOAD, 2 * MAX_PAYLOAD)
    other.close_windows()


def test_bytes_on_their_way_stay_counted_when_counting_begins_again() -> None:
    one, other = Link(), Link()
    one.put_window(memoryview(bytes(2 * MAX_PAYLOAD)))
    carry(one, other, 2)
    reconnect(one, other)
    one.sending.begin()
    told: list[tuple[str, int, int]] = []
    one.sending.tell("sending", lambda *moved: told.append(moved))
    carry(one, other)
    carry(other, one)
    for _ in range(2):
        one.sending.tell("sending", lambda *moved: told.append(moved))
    assert told == [("sending", MAX_PAYLOAD, MAX_PAYLOAD)]
    other.close_windows()


def test_a_ping_is_answered() -> None:
    one, other = Link(), Link()
    one.put(Kind.PING)
    carry(one, other)
    assert other.next() == Record(Kind.PONG)


@pytest.mark.parametrize(
    ("records", "told"),
    [
        ([Record(Kind.WINDOW, COUNT.pack(0))], "none is empty"),
        ([Record(Kind.WINDOW, b"123")], "a count of 3 bytes"),
        ([Record(Kind.WINDOW, COUNT.pack(4)), Record(Kind.WINDOW, COUNT.pack(4))], "before the one before it"),
        ([Record(Kind.WINDOW, COUNT.pack(4)), Record(Kind.PART, b"12345")], "more than its 4 bytes"),
        ([Record(Kind.PART, b"1")], "no window was announced"),
        ([Record(Kind.ACK, COUNT.pack(1))], "1 records were acknowledged, of 0"),
    ],
    ids=["empty", "no count", "two at once", "too large", "unannounced", "never sent"],
)
def test_records_that_break_the_rules_are_refused(records: list[Record], told: str) -> None:
    link = Link()
    for record in records[:-1]:
        hand(link, record)
    with pytest.raises(ProtocolError, match=told):
        hand(link, records[-1])
    link.close_windows()


def test_a_frame_has_no_more_windows_than_it_may_bring() -> None:
    link = Link()
    for _ in range(MAX_WINDOWS):
        hand(link, Record(Kind.WINDOW, COUNT.pack(1)))
        hand(link, Record(Kind.PART, b"x"))
    with pytest.raises(ProtocolError, match=f"a frame may bring {MAX_WINDOWS}"):
        hand(link, Record(Kind.WINDOW, COUNT.pack(1)))
    link.close_windows()


@pytest.mark.parametrize("received", [3, 1 << 40])
def test_a_count_that_cannot_be_is_refused_when_a_link_continues(received: int) -> None:
    link = Link()
    link.put_frames(b"one")
    link.next()
    with pytest.raises(ProtocolError):
        link.resume(received)


def test_a_window_that_finds_no_memory_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str, nbytes: int, **options: bool) -> int:
        raise OSError(errno.ENOMEM, "no memory is left")

    monkeypatch.setattr("djinn_client.transport.remote.link.new_window", none)
    with pytest.raises(OutOfMemory, match="no memory for 1,024 bytes that the daemon sends: no memory is left"):
        hand(Link(), Record(Kind.WINDOW, COUNT.pack(1024)))


def test_a_window_that_outgrows_the_memory_is_a_typed_error_and_is_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none(fd: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.ENOMEM, "no memory is left")

    link = Link()
    hand(link, Record(Kind.WINDOW, COUNT.pack(1024)))
    monkeypatch.setattr(os, "pwrite", none)
    with pytest.raises(OutOfMemory, match="a window of 1,024 bytes, 0 of which have come: no memory is left"):
        hand(link, Record(Kind.PART, bytes(512)))
    with pytest.raises(ProtocolError, match="no window was announced"):
        hand(link, Record(Kind.PART, bytes(512)))


def test_a_link_that_has_ended_keeps_no_memory_of_windows_that_were_to_be_sent() -> None:
    ended, memory = Link(), bytearray(3 * MAX_PAYLOAD)
    ended.put_window(memoryview(memory))
    ended.next()
    ended.next()
    ended.close_windows()
    memory.clear()  # raises BufferError while a view of it exists
