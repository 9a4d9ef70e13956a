"""How much of a session's KV is of use, and by what its pages are known."""

from __future__ import annotations

from djinnd.core.session import Session
from djinnd.core.stops import next_stop
from djinnd.kvcache.prefixes import Key, root


def origin(session: Session) -> Key:
    """At which the keys of its pages begin."""
    return root(session.tenant, session.salt)


def possible_ends(session: Session) -> tuple[int, ...]:
    """Where the session's KV may have ended when its pages left: as this engine remembers; for an earlier one's, after
    a prompt, or before the last token that was generated."""
    first = len(session.tokens) if session.request is None else session.request.first
    return (session.left_at, first, first - 1)


def is_an_earlier_engine_s(session: Session) -> bool:
    """Its KV is, if it is anywhere."""
    request = session.request
    return request is not None and request.first > 0 and session.computed == session.left_at == 0


def of_use(session: Session) -> int:
    """Tokens whose KV is of use. For a request, one token at least is run, to choose the next one, and all of which
    more is wanted or that stops."""
    request = session.request
    if request is None:
        return len(session.tokens)
    most = min(len(session.tokens) - 1, request.seen_from)
    stop = next_stop(request.stops, len(session.tokens))
    return most if stop is None else min(most, stop.position)


def of_use_elsewhere(session: Session) -> int:
    """The same in lower tiers: KV that a client gave is brought back to its end, though the last token is run again."""
    request = session.request
    if request is None or not session.foreign_tokens:
        return of_use(session)
    return min(request.first, request.seen_from)
