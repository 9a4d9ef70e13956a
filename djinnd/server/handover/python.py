"""The command by which the daemon starts another Python process."""

from __future__ import annotations

import sys


def python_module(name: str, *options: str) -> list[str]:
    """The command that runs `name`, an installed module.

    With `-m` alone, Python imports from the working directory first: a file there with the name of a library would run
    with the daemon's rights. `-P` leaves the working directory out.
    """
    return [sys.executable, "-P", "-m", name, *options]
