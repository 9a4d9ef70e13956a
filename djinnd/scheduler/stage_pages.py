"""The pages with which a session that is parked inside the model leaves the device, and has its stage again.

positions  0 ─────────────────────── computed ──────────────── end
pages      │ full of KV │ full of KV │ full in part │ of some blocks │
           └ known by their tokens ──┘└ staged: by keys that nobody else finds ┘
"""

from __future__ import annotations

from djinnd.core.session import Session
from djinnd.core.stops import LeftStage
from djinnd.kvcache.manager import KvManager
from djinnd.kvcache.prefixes import Key, unshared_keys
from djinnd.scheduler.useful_kv import origin


def staged_keys(session: Session, kv: KvManager) -> list[Key]:
    """New ones, for the pages of a parked session that are not full of KV. None where nothing has been run for them, or
    a client has given KV in one of them: that is to be found by all means, also without the stage."""
    if session.stage is None or session.request is not None or not session.stage.first:
        return []
    if session.foreign_tokens > full_tokens(session, kv):
        return []
    return unshared_keys(kv.pages_held(session.id) - session.computed // kv.page_size)


def full_tokens(session: Session, kv: KvManager) -> int:
    """Of the pages that are full of KV."""
    return session.computed // kv.page_size * kv.page_size


def keys_with(session: Session, staged: list[Key], kv: KvManager) -> list[Key]:
    """Of all its pages."""
    return kv.keys_of(session.id, origin(session), session.names, full_tokens(session, kv)) + staged


def spared(left: LeftStage, computed: int) -> int:
    """Tokens that need not be run, if the pages come back to who has KV of `computed`; those of the stage by the share
    of the blocks that they have been through."""
    share = left.stage.first / (left.stage.last - 1)
    return left.computed - computed + round(share * (left.length - left.computed))
