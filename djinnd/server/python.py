"""How the daemon starts a Python process of its own."""

from __future__ import annotations

import sys


def python_module(name: str, *options: str) -> list[str]:
    """The command for `name`, a module that is installed.

    `-m` alone puts the working directory before all that is installed: a file there by the name of a library would run
    with the daemon's rights, whoever put it there. With `-P` Python leaves it out.
    """
    return [sys.executable, "-P", "-m", name, *options]
