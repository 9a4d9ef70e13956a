"""Daemons for one module of tests, and reduced models that are loaded for a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import DaemonStarter
from tests.support.daemon import Daemon


@pytest.fixture(scope="module")
def roomy_daemon() -> Iterator[Daemon]:
    """A daemon for models that its tests load."""
    with DaemonStarter() as start:
        yield start()


@pytest.fixture
def family(request: pytest.FixtureRequest, roomy_daemon: Daemon) -> Iterator[Path]:
    """The folder of a family's reduced model, loaded in the daemon. `parametrize("family", …, indirect=True)` chooses
    the family."""
    yield from _loaded(roomy_daemon, request.param)


@pytest.fixture
def llama(roomy_daemon: Daemon) -> Iterator[Path]:
    yield from _loaded(roomy_daemon, "llama-3.1")


def _loaded(daemon: Daemon, family: str) -> Iterator[Path]:
    from tests.support.edited import loaded  # imports torch, which takes seconds and which many files here do not need

    with loaded(daemon, family) as folder:
        yield folder
