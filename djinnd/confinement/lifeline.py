"""Ends a process with its parent."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def tie_to(parent: int) -> None:
    """Makes the kernel kill this process when its parent dies; a change of user cancels this. Raises SystemExit if the
    parent is no longer `parent`."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit("the server is gone already")
