"""Host pages that are all pinned."""

from __future__ import annotations

from djinnd.engine.memory.host_pages import HostPages


def pinned(pages: HostPages | None) -> HostPages:
    """Waits until the pinning thread has ended."""
    assert pages is not None
    pages._thread.join(60)
    return pages
