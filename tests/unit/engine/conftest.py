"""A real engine that the tests of a module share. A file that needs a different one overrides the fixture `engine`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.whitebox import WhiteBoxEngine


@pytest.fixture(scope="module", params=["llama-2"])
def shared(request: pytest.FixtureRequest) -> Iterator[WhiteBoxEngine]:
    """Serves a family's reduced model as "m". A test chooses another family by indirect parametrization."""
    from tests.support.models import reduced_model  # takes seconds to import, and some files here do not need it
    from tests.support.whitebox import WhiteBoxEngine

    with WhiteBoxEngine() as engine:
        engine.family = request.param
        engine.loaded(reduced_model(request.param))
        yield engine


@pytest.fixture
def engine(shared: WhiteBoxEngine) -> Iterator[WhiteBoxEngine]:
    """The shared engine without sessions, for a new tenant that owns no pages."""
    shared.tenant += 1
    yield shared
    shared.check_idle()
