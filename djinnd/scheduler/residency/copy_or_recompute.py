"""Decides whether a session's pages are copied back from a lower tier or its tokens are run again."""

from __future__ import annotations

from dataclasses import dataclass

from djinnd.kvcache.paging import Found
from djinnd.scheduler.tuning import STEP


@dataclass(slots=True)
class Costs:
    """Measured rates of copying pages and of prefill. A rate of 0 is unknown; copying then counts as cheaper."""

    bus: float = 0.0  # bytes a second
    disk: float = 0.0  # bytes a second
    prefill: float = 0.0  # tokens a second, in steps with at least STEP.least_chunk tokens

    def prefer_copy(self, found: Found, computed: int, beside: int, page_bytes: int) -> bool:
        """True if copying the pages that were `found` takes no longer than running their tokens. `computed`: tokens
        with KV on the device. `beside`: tokens after the found pages, which the device runs in both cases; a single one
        is no prefill."""
        if not self.prefill or not self.bus:
            return True
        copying = len(found.keys) * page_bytes / self.bus
        if found.on_disk:
            if not self.disk:
                return True
            copying += found.on_disk * page_bytes / self.disk
        anyway = max(beside, STEP.least_chunk) if beside > 1 else 0
        more = max(found.tokens - computed + beside, STEP.least_chunk) - anyway
        return copying <= more / self.prefill
