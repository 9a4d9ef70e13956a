"""docs/families.md: complete, and true."""

from __future__ import annotations

import pytest
import transformers

from tests.families.configurations import causal_types, wrapper_types
from tests.families.page import read_page, run

VERSION, OUTCOMES = read_page()
TYPES = [*causal_types(), *wrapper_types()]


def test_the_page_has_every_model_type_of_transformers() -> None:
    """Rerun `python -m tests.families.page` after an update of transformers."""
    if transformers.__version__ == VERSION:
        assert sorted(OUTCOMES) == sorted(set(TYPES))
    else:  # an older release may have fewer types
        assert len(set(TYPES) & set(OUTCOMES)) > 0.8 * len(set(TYPES))


@pytest.mark.long
@pytest.mark.skipif(transformers.__version__ != VERSION, reason=f"the page is of transformers {VERSION}")
@pytest.mark.parametrize(
    "model_type",
    # In groups, as a file of this length would keep one worker busy to the end.
    [pytest.param(each, marks=pytest.mark.xdist_group(f"families {index % 8}")) for index, each in enumerate(TYPES)],
)
def test_the_page_is_true(model_type: str) -> None:
    assert run(model_type) == OUTCOMES[model_type]
