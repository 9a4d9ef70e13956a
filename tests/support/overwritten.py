"""Makes the device's free pages hold nothing that a session could find."""

from __future__ import annotations

from djinnd.kvcache.manager import KvManager


def overwrite_free_pages(kv: KvManager) -> None:
    """Other sessions take every free page and give it up again, as in a busy pool."""
    others = [f"passing-{number}" for number in range(kv.pool.free)]
    for other in others:
        kv.reserve(other, tenant=4_000_000_000, tokens=1)
    for other in others:
        kv.drop(other)
