"""The engine of the daemon that this one succeeds, which may still be ending.

It has nothing more to do and is killed, but the kernel takes up to ten seconds to let go of 100 GB of pinned memory.
Only the next engine has to wait for that, for the device's memory: sessions are attached to meanwhile.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence

from djinnd.server.pidfds import end_of
from djinnd.server.succession import Inherited

log = logging.getLogger("djinnd.server")

ENGINE_FD = "djinnd-engine"  # its pidfd, of the descriptors that a predecessor leaves


class LastEngine:
    """Owns the descriptor, if there is one."""

    def __init__(self, given: Sequence[Inherited]) -> None:
        self._given = list(given)

    async def gone(self) -> None:
        """Returns when nothing is left of it. For one caller at a time."""
        began = time.monotonic()
        for _, pidfd in self._given:
            await end_of(pidfd)
            os.close(pidfd)
            log.info("last_engine_gone seconds=%.3f", time.monotonic() - began)
        self._given = []

    def hand_over(self) -> list[Inherited]:
        """For the successor; this object is of no use then."""
        return self._given
