from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.served import Served
from tests.support.serving import calm, daemon, folder, opened, serve, tiny, wire
from tests.support.steered import Steered, serving_story, tenant_of

__all__ = ["calm", "daemon", "folder", "opened", "serve", "tiny", "wire"]  # fixtures


@pytest.fixture(scope="module")
def storyteller() -> Iterator[Served]:
    """A daemon for tests that leave it as it was. A prompt that begins with 66 kills its engine, one with 77 fails."""
    with serving_story(on_token={"66": "die", "77": "fail"}) as served:
        yield served


@pytest.fixture
def tenant(storyteller: Served) -> Iterator[Steered]:
    with tenant_of(storyteller) as tenant:
        yield tenant
