"""One gateway for the clients that others wrote."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.gateway import Gateway, gateway_with_tools


@pytest.fixture(scope="session")
def gateway() -> Iterator[Gateway]:
    with gateway_with_tools() as running:
        yield running
