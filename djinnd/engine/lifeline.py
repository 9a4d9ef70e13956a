"""A process that must not outlive the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def tie_to(parent: int) -> None:
    """The kernel kills this process when its parent dies, however that happens. Raises SystemExit where the parent is
    not `parent` any more."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit("the server is gone already")
