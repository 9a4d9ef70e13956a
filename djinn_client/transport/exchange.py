"""One connection as the client sees it, without I/O: requests out, bytes and descriptors in, replies to the caller.

At most one request is in flight. One that was given up stays in flight until its final reply has come; until then its
replies are thrown away here.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

from djinn_client.errors import FrameTooLarge, InvalidRequest, ProtocolError, from_code
from djinn_client.protocol import (
    HEADER,
    MAX_REPLY,
    MAX_REQUEST,
    Cancel,
    Failure,
    Frame,
    FrameDecoder,
    Generated,
    Logits,
    Partial,
    Reply,
    Request,
    SessionExported,
    Signal,
    decode_reply,
    encode,
    packed,
)

R_co = TypeVar("R_co", bound=Reply, covariant=True)


class Delivery(NamedTuple, Generic[R_co]):
    """A reply and the descriptors that came with it, which the receiver owns."""

    message: R_co
    fds: list[int]


class Exchange:
    def __init__(self) -> None:
        self._decoder = FrameDecoder(MAX_REPLY)
        self._frames: deque[Frame] = deque()
        self._fds: deque[int] = deque()  # owned here until delivered
        self._last_id = 0  # the daemon uses 0 where it could not read an id
        self._in_flight: int | None = None
        self._given_up = False

    @property
    def settled(self) -> bool:
        """No final reply is owed: the next request may start."""
        return self._in_flight is None

    @property
    def truncated(self) -> bool:
        """The bytes so far end in the middle of a frame."""
        return self._decoder.pending > 0

    def start(self, request: Request, fds: int = 0) -> bytes:
        """Gives the request its id and returns its frame, with which `fds` descriptors travel.

        Raises InvalidRequest for what the wire cannot carry, FrameTooLarge.
        """
        assert self.settled, "a request is in flight"
        request.id = self._last_id + 1
        frame = frame_of(request, fds)
        length = len(frame) - HEADER.size
        if length > MAX_REQUEST:
            raise FrameTooLarge(
                f"this call takes {length:,} bytes, the limit is {MAX_REQUEST:,}: send the prompt in parts",
                length=length,
                limit=MAX_REQUEST,
            )
        self._last_id = self._in_flight = request.id
        return frame

    def give_up(self) -> bytes:
        """The frame that ends the request in flight; empty if there is none or it was given up before."""
        if self._in_flight is None or self._given_up:
            return b""
        self._given_up = True
        return encode(Cancel(target=self._in_flight))

    def receive(self, data: bytes, fds: Iterable[int]) -> None:
        """Takes what the socket brought. Raises what FrameDecoder.feed raises; the connection must then be closed."""
        self._fds.extend(fds)
        self._frames.extend(self._decoder.feed(data))

    def next_reply(self) -> Delivery[Reply] | None:
        """The next reply to the request in flight, or None until more bytes have come.

        Raises ProtocolError for a reply without a request, or the error of a Failure that is about the connection
        rather than a request; the connection must then be closed.
        """
        while self._frames:
            delivery = self._open(self._frames.popleft())
            given_up = self._given_up
            if not isinstance(delivery.message, Partial):
                self._in_flight, self._given_up = None, False
            if not given_up:
                return delivery
            close_all(delivery.fds)
        return None

    def close(self) -> None:
        close_all(self._fds)
        self._fds.clear()
        self._frames.clear()

    def _open(self, frame: Frame) -> Delivery[Reply]:
        message = decode_reply(frame.payload)
        if message.id != self._in_flight:
            if isinstance(message, Failure):
                raise from_code(message.code, message.message, message.data)
            raise ProtocolError(f"a reply to request {message.id} came, but {self._in_flight} is in flight")
        if frame.fds > len(self._fds):
            raise ProtocolError(f"a reply announces {frame.fds} file descriptors, {len(self._fds)} came")
        if frame.fds and not isinstance(message, Logits | Generated | SessionExported):
            raise ProtocolError(f"a {type(message).__name__} brings file descriptors that have no meaning in it")
        return Delivery(message, [self._fds.popleft() for _ in range(frame.fds)])


def frame_of(message: Request | Signal, fds: int = 0) -> bytes:
    """Its frame. Raises InvalidRequest for a number or a text that the wire cannot carry."""
    try:
        return encode(packed(message), fds)
    except OverflowError as error:
        raise InvalidRequest(f"a number in this call is too large: {error}") from error
    except UnicodeEncodeError as error:
        surrogate = error.object[error.start]
        raise InvalidRequest(
            f"a text here has a lone surrogate, {surrogate!r} at position {error.start:,}, which is no Unicode; "
            'text.encode("utf-8", "replace").decode() has a question mark in its place',
            position=error.start,
        ) from error


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
