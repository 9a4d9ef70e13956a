from __future__ import annotations

from collections.abc import Iterator

import pytest

from djinn_client.protocol import CloseSession, Done
from tests.support.served import Served, wait_for
from tests.support.serving import calm, daemon, folder, opened, serve, tiny, wire
from tests.support.steered import Steered, serving_story

__all__ = ["calm", "daemon", "folder", "opened", "serve", "tiny", "wire"]  # fixtures


@pytest.fixture(scope="module")
def storyteller() -> Iterator[Served]:
    """A daemon for tests that leave it as it was. A prompt that begins with 66 kills its engine, one with 77 fails."""
    with serving_story(on_token={"66": "die", "77": "fail"}) as served:
        yield served


@pytest.fixture
def tenant(storyteller: Served) -> Iterator[Steered]:
    """A session of its own. In the end nothing is left of it."""
    with Steered(storyteller.address) as tenant:
        yield tenant
        assert tenant.ask(CloseSession(id=99, session=tenant.session)) == Done(id=99)
        with storyteller.client() as client:
            wait_for(lambda: client.status().state == "ready")
            assert client.status(check=True).integrity == []
        wait_for(lambda: storyteller.memfds() == 0)
