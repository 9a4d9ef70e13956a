"""How much of a session's KV is of use, and where the keys of its pages begin."""

from __future__ import annotations

from djinnd.core.session import Session
from djinnd.core.stops import next_stop
from djinnd.kvcache.prefixes import Key, root


def origin(session: Session) -> Key:
    """The key at which the chain of its pages' keys begins."""
    return root(session.tenant, session.salt)


def possible_ends(session: Session) -> tuple[int, ...]:
    """Where the session's KV may have ended when its pages left. For a session of this engine process, that is
    `left_at`. For one of an earlier process, it is after a prompt, or before the last generated token."""
    first = len(session.tokens) if session.request is None else session.request.first
    return (session.left_at, first, first - 1)


def is_an_earlier_engine_s(session: Session) -> bool:
    """True if an earlier engine process wrote this session's KV; its pages may still be on the host or on disk."""
    request = session.request
    return request is not None and request.first > 0 and session.computed == session.left_at == 0


def of_use(session: Session) -> int:
    """How many first tokens have KV that can be used. For a request, at least the last token is run again to sample the
    next one, and so is every token of which more than KV is wanted, or that stops at a breakpoint."""
    request = session.request
    if request is None:
        return len(session.tokens)
    most = min(len(session.tokens) - 1, request.seen_from)
    stop = next_stop(request.stops, len(session.tokens))
    return most if stop is None else min(most, stop.position)


def of_use_elsewhere(session: Session) -> int:
    """The same for pages in lower tiers. KV that a client imported is brought back whole, although the last token is
    run again."""
    request = session.request
    if request is None or not session.foreign_tokens:
        return of_use(session)
    return min(request.first, request.seen_from)
