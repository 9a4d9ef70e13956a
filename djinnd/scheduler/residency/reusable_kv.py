"""Computes how much of a session's KV can be reused, and the keys of its pages.

A session that is parked at a breakpoint may leave the device with its stage:

    positions  0 ─────────────────────── computed ──────────────── end
    pages      │ full of KV │ full of KV │ full in part │ of some blocks │
               └ keys made from tokens ──┘└ staged: random keys that no other session finds ┘
"""

from __future__ import annotations

from djinnd.core.session import Session
from djinnd.core.stops import LeftStage, next_stop
from djinnd.kvcache.manager import KvManager
from djinnd.kvcache.prefixes import Key, root, unshared_keys


def origin(session: Session) -> Key:
    """The key at which the chain of its pages' keys begins."""
    return root(session.tenant, session.page_salt)


def possible_ends(session: Session) -> tuple[int, ...]:
    """Where the session's KV may have ended when its pages left. For a session of this engine process, that is
    `left_at`. For one of an earlier process, it is after a prompt, or before the last generated token."""
    first = len(session.tokens) if session.request is None else session.request.first
    return (session.left_at, first, first - 1)


def comes_from_an_earlier_engine(session: Session) -> bool:
    """True if an earlier engine process wrote this session's KV; its pages may still be on the host or on disk."""
    request = session.request
    return request is not None and request.first > 0 and session.computed == session.left_at == 0


def usable_tokens(session: Session) -> int:
    """The number of first tokens with usable KV. For a request, at least the last token is run again to sample the next
    one, and so is every token with a captured or returned result, or that stops at a breakpoint."""
    request = session.request
    if request is None:
        return len(session.tokens)
    most = min(len(session.tokens) - 1, request.seen_from)
    stop = next_stop(request.stops, len(session.tokens))
    return most if stop is None else min(most, stop.position)


def usable_in_tiers(session: Session) -> int:
    """How much of the session's KV is brought back from lower tiers, in tokens from its beginning. It is
    `usable_tokens`; but KV that a client imported is brought back whole, although the last token is run again."""
    request = session.request
    if request is None or not session.foreign_tokens:
        return usable_tokens(session)
    return min(request.first, request.seen_from)


def staged_keys(session: Session, kv: KvManager) -> list[Key]:
    """New keys for the pages of a parked session that are not full of KV. Returns none if no block has been run for
    these pages. Also returns none if one of them holds KV that a client imported: that must be found even without the
    stage."""
    if session.stage is None or session.request is not None or not session.stage.first:
        return []
    if session.foreign_tokens > full_tokens(session, kv):
        return []
    return unshared_keys(kv.pages_held(session.id) - session.computed // kv.page_size)


def full_tokens(session: Session, kv: KvManager) -> int:
    """How many tokens are in pages that are full of KV."""
    return session.computed // kv.page_size * kv.page_size


def keys_with(session: Session, staged: list[Key], kv: KvManager) -> list[Key]:
    """The keys of all pages of the session."""
    return kv.keys_of(session.id, origin(session), session.names, full_tokens(session, kv)) + staged


def spared(left: LeftStage, computed: int) -> int:
    """How many tokens need not be run again if the pages of the stage that `left` come back to a session with
    `computed` tokens of KV. A token of the stage counts as the share of the blocks that it has passed."""
    share = left.stage.first / (left.stage.last - 1)
    return left.computed - computed + round(share * (left.length - left.computed))
