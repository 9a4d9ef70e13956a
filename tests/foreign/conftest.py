"""A gateway in front of a daemon whose djinn-tiny has a chat template with tools, for clients that others wrote."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import MODEL, DaemonStarter
from tests.support.chat_families import TOOLS
from tests.support.gateway import Gateway


@pytest.fixture(scope="session")
def gateway() -> Iterator[Gateway]:
    with DaemonStarter() as start:
        daemon = start()
        with daemon.client() as client:
            client.load(MODEL, chat_template=TOOLS)
        with Gateway(start.folder(), daemon.address) as running:
            yield running
