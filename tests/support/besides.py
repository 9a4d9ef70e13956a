"""Observes what an engine does while its device runs a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from djinnd.engine.engine import Engine
from djinnd.engine.io.idle_work import Part


def in_steps(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> Callable[[], bool]:
    """→ a function that returns True while the device runs a step."""
    running, run = list[bool](), engine._idle_work.run

    def noted() -> bool:
        running.append(True)
        try:
            return run()
        finally:
            running.pop()

    monkeypatch.setattr(engine._idle_work, "run", noted)
    return lambda: bool(running)


def on_message(monkeypatch: pytest.MonkeyPatch, engine: Engine, act: Callable[[Any], None]) -> None:
    """Calls `act` with each message before the engine handles it."""
    handle = engine._dispatcher._handle

    def noted(message: Any) -> None:
        act(message)
        handle(message)

    monkeypatch.setattr(engine._dispatcher, "_handle", noted)


def add_part(monkeypatch: pytest.MonkeyPatch, engine: Engine, part: Part) -> None:
    """Calls `part` during each step, just before the work on pages."""
    parts = engine._idle_work._parts
    at = parts.index(engine._tiers.work_during_step)
    monkeypatch.setattr(engine._idle_work, "_parts", [*parts[:at], part, *parts[at:]])
