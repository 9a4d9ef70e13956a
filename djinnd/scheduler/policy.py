"""Who goes first and who gives way: small pure functions of what the scheduler holds. First come, first served."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from djinn_client.protocol import CLASSES
from djinnd.core.session import Session


def serving_order(active: Iterable[Session]) -> list[Session]:
    """`active` comes in order of arrival, and is served so."""
    return list(active)


QUIET_S = 10.0  # after which a session whose client says nothing leaves the device
CROWDED_QUIET_S = 1.0  # the same while pages are scarce
SCARCE = 0.1  # of the pool: fewer are free


def has_gone_quiet(seconds: float, free: float) -> bool:
    """Whether an idle session leaves, of which nobody has heard for so long; `free`: share of the pool. Its pages stay
    where they are as long as nobody else needs them, so coming back costs little."""
    return seconds >= (CROWDED_QUIET_S if free < SCARCE else QUIET_S)


def eviction_order(
    idle: Iterable[Session], held: Iterable[Session], order: list[Session], served: Session | None
) -> Iterator[Session]:
    """Whose pages make room for `served`, first to last: the idle, those first whose client waits for something else,
    then the lowest class, least recently touched first; then those whose client reads too slowly or who are paused,
    least recently touched first; then of the serving `order` the last, but nobody who stands before `served`. So the
    first of the order can have every page there is, and always goes on. None: room for nobody in particular."""
    yield from sorted(idle, key=_worth)
    yield from sorted(held, key=_touched)
    for session in reversed(order):
        if session is served:
            return
        yield session


def _worth(session: Session) -> tuple[bool, bool, int, int]:
    """KV that a client gave goes last: it cannot be computed."""
    rank = -CLASSES.index(session.klass)  # the lowest class is the last of them
    return bool(session.foreign_tokens), not session.waits, rank, session.touched


def _touched(session: Session) -> int:
    return session.touched


class Budget:
    """What a step can still take, in tokens and rows. All sessions that need one token decode together; chunks of
    prefill get what is left. One row and one token are kept for the first of the order, so that no crowd of decoding
    sessions can stop its prefill."""

    def __init__(self, order: list[Session], max_tokens: int, max_rows: int) -> None:
        decoding = sum([session.remaining == 1 for session in order])
        kept = order[0].remaining > 1
        self._decode_rows = min(decoding, min(max_tokens, max_rows) - kept)
        self._chunk_rows = max_rows - self._decode_rows
        self._chunk_tokens = max_tokens - self._decode_rows

    def share(self, remaining: int) -> int:
        """Tokens that this step has room for, of a session that needs `remaining`; 0 where it has none."""
        if remaining == 1:
            return 1 if self._decode_rows else 0
        return min(remaining, self._chunk_tokens) if self._chunk_rows else 0

    def take(self, remaining: int, count: int) -> None:
        """Uses up `count` tokens, of those that `share` answered for `remaining`."""
        if remaining == 1:
            self._decode_rows -= 1
        else:
            self._chunk_tokens -= count
            self._chunk_rows -= 1
