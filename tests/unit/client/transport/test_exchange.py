from __future__ import annotations

import os

import pytest

from djinn_client.errors import FrameTooLarge, InvalidRequest, NotPermitted, ProtocolError, VersionMismatch
from djinn_client.protocol import (
    HEADER,
    MAGIC,
    MAX_REQUEST,
    Cancel,
    Done,
    Failure,
    FrameDecoder,
    Generate,
    Generated,
    Logits,
    Piece,
    Ping,
    Timings,
    Usage,
    decode_request,
    encode,
)
from djinn_client.transport.exchange import Exchange


def opened(frame: bytes) -> object:
    (only,) = FrameDecoder(MAX_REQUEST).feed(frame)
    return decode_request(only.payload)


def generated(id: int) -> Generated:
    return Generated(id=id, text="", token_ids=[], finish_reason="length", usage=Usage(), timings=Timings())


@pytest.fixture
def descriptor() -> int:
    read, write = os.pipe()
    os.close(write)
    return read


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_ids_count_up_from_one() -> None:
    exchange = Exchange()
    for expected in (1, 2):
        assert opened(exchange.start(Ping(id=0))) == Ping(id=expected)
        exchange.receive(encode(Done(id=expected)), [])
        delivery = exchange.next_reply()
        assert delivery is not None
        assert delivery.message == Done(id=expected)


def test_only_the_final_reply_settles() -> None:
    exchange = Exchange()
    exchange.start(Ping(id=0))
    exchange.receive(encode(Piece(id=1, text="a")) + encode(generated(1)), [])
    assert exchange.next_reply() is not None
    assert not exchange.settled
    assert exchange.next_reply() is not None
    assert exchange.settled
    assert exchange.next_reply() is None


def test_replies_in_single_bytes() -> None:
    exchange = Exchange()
    exchange.start(Ping(id=0))
    data = encode(Piece(id=1, text="né")) + encode(Done(id=1))
    replies = []
    for byte in data:
        exchange.receive(bytes([byte]), [])
        while (delivery := exchange.next_reply()) is not None:
            replies.append(delivery.message)
    assert replies == [Piece(id=1, text="né"), Done(id=1)]


def test_giving_up_is_one_cancel_and_the_rest_is_thrown_away() -> None:
    exchange = Exchange()
    exchange.start(Ping(id=0))
    assert opened(exchange.give_up()) == Cancel(target=1)
    assert exchange.give_up() == b""
    exchange.receive(encode(Piece(id=1, text="late")), [])
    assert exchange.next_reply() is None
    assert not exchange.settled
    exchange.receive(encode(generated(1)), [])
    assert exchange.next_reply() is None
    assert exchange.settled


def test_the_request_after_one_that_was_given_up_has_its_own_replies() -> None:
    exchange = Exchange()
    exchange.start(Ping(id=0))
    exchange.give_up()
    exchange.receive(encode(generated(1)), [])
    exchange.next_reply()
    exchange.start(Ping(id=0))
    exchange.receive(encode(Done(id=2)), [])
    delivery = exchange.next_reply()
    assert delivery is not None
    assert delivery.message.id == 2


def test_nothing_to_give_up_after_the_final_reply() -> None:
    exchange = Exchange()
    exchange.start(Ping(id=0))
    exchange.receive(encode(Done(id=1)), [])
    exchange.next_reply()
    assert exchange.give_up() == b""


def test_a_reply_to_nobody() -> None:
    exchange = Exchange()
    exchange.start(Ping(id=0))
    exchange.receive(encode(Done(id=7)), [])
    with pytest.raises(ProtocolError, match="a reply to request 7 came, but 1 is in flight"):
        exchange.next_reply()


def test_a_failure_of_the_connection_is_raised_as_what_it_says() -> None:
    exchange = Exchange()
    exchange.start(Ping(id=0))
    exchange.receive(encode(Failure(id=0, code="not_permitted", message="no")), [])
    with pytest.raises(NotPermitted, match="no"):
        exchange.next_reply()


def test_a_frame_of_another_version_is_refused() -> None:
    with pytest.raises(VersionMismatch, match="speaks protocol version 9"):
        Exchange().receive(HEADER.pack(MAGIC, 9, 0, 0), [])


def test_too_large_a_request_is_not_sent() -> None:
    exchange = Exchange()
    with pytest.raises(FrameTooLarge, match="the limit is 16,777,216"):
        exchange.start(Generate(id=0, session="s", text="x" * MAX_REQUEST))
    assert exchange.settled


def test_a_number_that_the_wire_cannot_carry_is_not_sent() -> None:
    exchange = Exchange()
    with pytest.raises(InvalidRequest, match="too large"):
        exchange.start(Generate(id=0, session="s", max_tokens=1 << 70))
    assert exchange.settled


def test_a_text_that_is_no_unicode_is_not_sent() -> None:
    exchange = Exchange()
    with pytest.raises(InvalidRequest, match=r"lone surrogate, '\\ud800' at position 1, .* a question mark") as caught:
        exchange.start(Generate(id=0, session="s", text="x\ud800"))
    assert caught.value.data == {"position": 1}
    assert exchange.settled


def test_descriptors_are_delivered_with_their_frame(descriptor: int) -> None:
    exchange = Exchange()
    exchange.start(Ping(id=0))
    frame = encode(Logits(id=1, tokens=1, vocab=1, timings=Timings()), fds=1)
    exchange.receive(frame[:3], [descriptor])
    assert exchange.next_reply() is None
    exchange.receive(frame[3:], [])
    delivery = exchange.next_reply()
    assert delivery is not None
    assert delivery.fds == [descriptor]
    os.close(descriptor)


def test_descriptors_of_a_reply_that_nobody_wants_are_closed(descriptor: int) -> None:
    exchange = Exchange()
    exchange.start(Ping(id=0))
    exchange.give_up()
    exchange.receive(encode(Logits(id=1, tokens=1, vocab=1, timings=Timings()), fds=1), [descriptor])
    assert exchange.next_reply() is None
    assert not is_open(descriptor)


def test_descriptors_that_were_never_delivered_are_closed_with_the_exchange(descriptor: int) -> None:
    exchange = Exchange()
    exchange.receive(b"", [descriptor])
    exchange.close()
    assert not is_open(descriptor)


def test_descriptors_that_did_not_come() -> None:
    exchange = Exchange()
    exchange.start(Ping(id=0))
    exchange.receive(encode(Logits(id=1, tokens=1, vocab=1, timings=Timings()), fds=1), [])
    with pytest.raises(ProtocolError, match="announces 1 file descriptors, 0 came"):
        exchange.next_reply()


def test_descriptors_where_they_have_no_meaning(descriptor: int) -> None:
    exchange = Exchange()
    exchange.start(Ping(id=0))
    exchange.receive(encode(Done(id=1), fds=1), [descriptor])
    with pytest.raises(ProtocolError, match="Done brings file descriptors"):
        exchange.next_reply()
    exchange.close()
    assert not is_open(descriptor)
