"""The engine of the daemon before this one, which may still be ending.

It has been killed, but the kernel takes up to ten seconds to free 100 GB of pinned memory. Only the next engine has to
wait for that, because it needs the device's memory. Clients attach to sessions meanwhile.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence

from djinnd.server.handover.pidfds import end_of
from djinnd.server.handover.succession import Inherited

log = logging.getLogger("djinnd.server")

ENGINE_FD = "djinnd-engine"  # name of its pidfd among the descriptors that a predecessor hands over


class PreviousEngine:
    """Owns the ending engine's pidfd, if there is one."""

    def __init__(self, given: Sequence[Inherited]) -> None:
        self._given = list(given)

    async def gone(self) -> None:
        """Returns when the engine has ended. For one caller at a time."""
        began = time.monotonic()
        for _, pidfd in self._given:
            await end_of(pidfd)
            os.close(pidfd)
            log.info("last_engine_gone seconds=%.3f", time.monotonic() - began)
        self._given = []

    def hand_over(self) -> list[Inherited]:
        """The descriptors for the successor. This object must not be used after that."""
        return self._given
