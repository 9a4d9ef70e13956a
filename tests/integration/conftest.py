"""Daemons that a module of tests has for itself, and reduced models, loaded for a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import DaemonStarter
from tests.support.daemon import Daemon


@pytest.fixture(scope="module")
def roomy_daemon() -> Iterator[Daemon]:
    """For models that its tests load."""
    with DaemonStarter() as start:
        yield start()


@pytest.fixture
def family(request: pytest.FixtureRequest, roomy_daemon: Daemon) -> Iterator[Path]:
    """The folder of a family's reduced model, which the daemon has loaded; of which, says
    `parametrize("family", …, indirect=True)`."""
    yield from _loaded(roomy_daemon, request.param)


@pytest.fixture
def llama(roomy_daemon: Daemon) -> Iterator[Path]:
    yield from _loaded(roomy_daemon, "llama-3.1")


def _loaded(daemon: Daemon, family: str) -> Iterator[Path]:
    from tests.support.edited import loaded  # torch takes seconds to import, and many files here do without

    with loaded(daemon, family) as folder:
        yield folder
