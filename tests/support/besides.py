"""Detects whether one function runs inside another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def watched(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> Callable[[], bool]:
    """Wraps a method of an object. → a function that returns True while the method runs."""
    running, method = list[bool](), getattr(owner, name)

    def wrapped(*arguments: Any) -> Any:
        running.append(True)
        try:
            return method(*arguments)
        finally:
            running.pop()

    monkeypatch.setattr(owner, name, wrapped)
    return lambda: bool(running)
