"""One call whose text comes in pieces: its steps, and the blocking iterator."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from djinn_client.errors import SessionBusy, SessionStateError
from djinn_client.protocol import Generate, Generated, Piece
from djinn_client.tensors.hits import Hit
from djinn_client.transport.connection import Connection
from djinn_client.transport.exchange import close_all
from djinn_client.transport.steps import Steps, run

if TYPE_CHECKING:
    from typing import Self

    from djinn_client.session.connected import ConnectedSession


class StreamSteps:
    """A Generate whose text comes in Pieces. The session belongs to it from the first piece that is asked for until
    the last has come, or it is closed, or its last reference is gone."""

    ended = False
    connection: Connection | None = None  # set when the request is about to be sent

    def __init__(
        self, session: ConnectedSession, request: Generate, on_result: Callable[[Generated], None] = lambda _: None
    ) -> None:
        """`on_result` is called with the result, when the last piece has come."""
        self.request = request
        self._on_result = on_result
        self._session = session
        self._pieces: list[Piece] = []
        self._result: Generated | None = None
        self.hit: Hit | None = None
        self._waiting = False

    @property
    def result(self) -> Generated:
        """The whole call's text, tokens, finish reason, usage and timings. Raises SessionStateError before the
        end."""
        if self._result is None:
            raise SessionStateError("the stream was not read to its end: it has no result")
        return self._result

    def next(self) -> Steps[Piece | None]:
        """The next piece with something in it, or None at the end."""
        if self._waiting:
            raise SessionBusy("another thread or task is waiting for this stream's next piece")
        if self.ended:
            return None
        try:
            self._waiting = True
            delivery = yield from self._session.next_of(self)
        except BaseException:
            self._give_up()
            raise
        finally:
            self._waiting = False
        match delivery.message:
            case Piece() as piece:
                self._pieces.append(piece)
                return piece
            case Generated() as last:
                rest = self._finish(last)
                if last.hit is None:
                    close_all(delivery.fds)
                else:
                    self.hit = self._session.hit = Hit(self.result, delivery.fds)
                return rest
            case _:
                self.ended = True
                assert self.connection is not None
                raise self.connection.unexpected(delivery)

    def close(self) -> None:
        """Ends the call; the session keeps the tokens so far. Raises SessionBusy in mid-wait."""
        if self._waiting:
            raise SessionBusy("another thread or task is waiting for this stream's next piece")
        self._give_up()

    def __del__(self) -> None:
        self._give_up()

    def _give_up(self) -> None:
        if not self.ended:
            self.ended = True
            if self.connection is not None:
                self.connection.give_up()

    def _finish(self, last: Generated) -> Piece | None:
        """Makes the last piece of the tokens in `last`, which no Piece has brought, and the result of all pieces."""
        fields = {name: getattr(last, name) for name in ("text", "token_ids", "logprobs", "token_bytes", "delta")}
        rest = Piece(id=last.id, **fields)
        self._pieces.append(rest)
        self._result = msgspec.structs.replace(
            last,
            text="".join(piece.text for piece in self._pieces),
            token_ids=[token for piece in self._pieces for token in piece.token_ids],
            logprobs=[entry for piece in self._pieces for entry in piece.logprobs],
            token_bytes={token: text for piece in self._pieces for token, text in piece.token_bytes.items()},
        )
        self.ended = True
        self._on_result(self._result)
        return rest if rest.text or rest.token_ids or rest.delta else None


class StreamState:
    """The common part of `Stream` and `AsyncStream`: members that wait for nothing."""

    def __init__(self, steps: StreamSteps) -> None:
        self._steps = steps

    @property
    def result(self) -> Generated:
        """The result of the call, as of `generate`. Raises SessionStateError before the stream was read to its end."""
        return self._steps.result

    @property
    def hit(self) -> Hit | None:
        """The breakpoint that has stopped the call; None if none has, and before the end."""
        return self._steps.hit

    def close(self) -> None:
        """One message to the daemon, which stops the work there."""
        self._steps.close()


class Stream(StreamState):
    """An iterator over the Pieces of one call. When it has ended, `result` is what `generate` would have returned.

    Closing it early (close(), the end of its `with` block, or dropping it as `break` does) stops the work in the daemon
    and leaves the session usable, with the tokens that were generated until then.
    """

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Piece:
        piece = run(self._steps.next())
        if piece is None:
            raise StopIteration
        return piece

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
