"""Hostile input, and deaths of processes. These tests start and end many daemons, so `make test` runs the ones that are
marked `smoke`, and `make test-long` all others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.serving import calm, folder, serve, tiny

__all__ = ["calm", "folder", "serve", "tiny"]  # fixtures

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE and item.get_closest_marker("smoke") is None:
            item.add_marker(pytest.mark.long)
