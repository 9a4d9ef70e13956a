"""Makes sure that descriptors 0 to 2 are open.

The kernel gives the lowest free number to the next file. If a parent has closed standard input, an event loop or a
client's connection would become descriptor 0: libuv aborts when it closes such a loop, and a child process would read
the connection as its standard input.
"""

from __future__ import annotations

import os
import sys


def open_standard_streams() -> None:
    """Opens /dev/null in the place of each closed one. Call it before anything else is opened."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)  # by children, and by the successor that takes this process's place
    os.close(fd)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
