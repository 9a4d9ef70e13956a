"""Whether a session's pages are brought back from a lower tier, or its tokens are run again."""

from __future__ import annotations

from dataclasses import dataclass

from djinnd.kvcache.paging import Found
from djinnd.scheduler.policy import LEAST_CHUNK


@dataclass(slots=True)
class Costs:
    """What bringing a page back and computing it anew take, as measured. None: nobody knows yet, and copying is
    taken to be the cheaper."""

    bus: float = 0.0  # bytes a second
    disk: float = 0.0
    prefill: float = 0.0  # tokens a second, of a step with LEAST_CHUNK or more

    def prefer_copy(self, found: Found, computed: int, beside: int, page_bytes: int) -> bool:
        """`beside`: tokens that a step has to compute behind what was found; one is no prefill."""
        if not self.prefill or not self.bus:
            return True
        copying = len(found.keys) * page_bytes / self.bus
        if found.on_disk:
            if not self.disk:
                return True
            copying += found.on_disk * page_bytes / self.disk
        anyway = max(beside, LEAST_CHUNK) if beside > 1 else 0
        more = max(found.tokens - computed + beside, LEAST_CHUNK) - anyway
        return copying <= more / self.prefill
