"""An engine that a module's tests share. Files that want another one have an `engine` of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.whitebox import WhiteBoxEngine


@pytest.fixture(scope="module", params=["llama-2"])
def shared(request: pytest.FixtureRequest) -> Iterator[WhiteBoxEngine]:
    """With a family's reduced model as "m"; of another one where a test is parametrized so, indirectly."""
    from tests.support.models import reduced_model  # these take seconds to import, and some files here do without
    from tests.support.whitebox import WhiteBoxEngine

    with WhiteBoxEngine() as engine:
        engine.family = request.param
        engine.loaded(reduced_model(request.param))
        yield engine


@pytest.fixture
def engine(shared: WhiteBoxEngine) -> Iterator[WhiteBoxEngine]:
    """Without sessions, and for a tenant who has none of its pages."""
    shared.tenant += 1
    yield shared
    shared.check_idle()
