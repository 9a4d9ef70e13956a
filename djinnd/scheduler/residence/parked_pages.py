"""The pages of a session that is parked at a breakpoint, when it leaves the device with its stage.

positions  0 ─────────────────────── computed ──────────────── end
pages      │ full of KV │ full of KV │ full in part │ of some blocks │
           └ keys made from tokens ──┘└ staged: random keys that no other session finds ┘
"""

from __future__ import annotations

from djinnd.core.session import Session
from djinnd.core.stops import LeftStage
from djinnd.kvcache.manager import KvManager
from djinnd.kvcache.prefixes import Key, unshared_keys
from djinnd.scheduler.residence.reusable_kv import origin


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
    """How many tokens need not be run if the pages come back to a session with `computed` tokens of KV. Tokens of the
    stage count by the share of the blocks that they have passed."""
    share = left.stage.first / (left.stage.last - 1)
    return left.computed - computed + round(share * (left.length - left.computed))
