"""Ends a process with its parent."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def tie_to(parent: int, end: signal.Signals = signal.SIGKILL) -> None:
    """Makes the kernel send this process the signal `end` when its parent dies. A change of user cancels this. Raises
    SystemExit if the parent is no longer `parent`."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, end, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit("the server is gone already")
