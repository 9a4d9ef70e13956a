"""Whether something happens while something else does, in one thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def watched(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> Callable[[], bool]:
    """Of a method of an object. → whether it is running."""
    running, method = list[bool](), getattr(owner, name)

    def wrapped(*arguments: Any) -> Any:
        running.append(True)
        try:
            return method(*arguments)
        finally:
            running.pop()

    monkeypatch.setattr(owner, name, wrapped)
    return lambda: bool(running)
