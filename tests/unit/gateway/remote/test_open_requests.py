from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from djinn_client.protocol import (
    Cancel,
    ClientMessage,
    Done,
    Failure,
    Generate,
    Hello,
    Piece,
    Ping,
    Progress,
    ServerMessage,
    Signal,
    encode,
)
from djinnd.gateway.remote.open_requests import OpenRequests

REQUESTS: list[ClientMessage] = [Ping(id=1), Hello(id=1, token="t"), Generate(id=1, session="s", text="long" * 100)]
ONE_WAY: list[ClientMessage] = [Cancel(target=1), Signal(session="s", kind="COMPUTE")]
FINAL: list[ServerMessage] = [Done(id=1), Failure(id=1, code="busy", message="later" * 100)]
NOT_FINAL: list[ServerMessage] = [Piece(id=1, text="a" * 300), Progress(id=1, model="m", stage="weights")]


def feed(take: Callable[[bytes], None], data: bytes, size: int) -> None:
    for start in range(0, len(data), size):
        take(data[start : start + size])


@given(
    there=st.lists(st.sampled_from(REQUESTS + ONE_WAY), max_size=8),
    back=st.lists(st.sampled_from(FINAL + NOT_FINAL), max_size=8),
    size=st.integers(1, 600),
)
def test_requests_are_open_until_their_final_replies(
    there: list[ClientMessage], back: list[ServerMessage], size: int
) -> None:
    requests = OpenRequests()
    feed(requests.sent, b"".join(map(encode, there)), size)
    feed(requests.answered, b"".join(map(encode, back)), size)
    asked = sum(message in REQUESTS for message in there)
    answered = sum(message in FINAL for message in back)
    assert bool(requests) == (asked > answered)


@pytest.mark.parametrize("cut", [1, 7, 8, 9, 20, -1])
def test_a_reply_that_is_still_coming_is_not_over(cut: int) -> None:
    requests, reply = OpenRequests(), encode(FINAL[1])
    requests.sent(encode(REQUESTS[0]))
    requests.answered(reply[:cut])
    assert requests
    requests.answered(reply[cut:])
    assert not requests


def test_a_request_that_is_still_coming_has_begun() -> None:
    requests = OpenRequests()
    requests.sent(encode(REQUESTS[0])[:3])
    assert requests
