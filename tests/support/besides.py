"""Observes what an engine does while its device runs a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from djinnd.engine.engine import Engine
from djinnd.engine.io.idle_work import Part


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


def add_part(monkeypatch: pytest.MonkeyPatch, engine: Engine, part: Part) -> None:
    """Calls `part` during each step, just before the work on pages."""
    parts = engine._idle_work._parts
    at = parts.index(engine._tiers.work_during_step)
    monkeypatch.setattr(engine._idle_work, "_parts", [*parts[:at], part, *parts[at:]])
