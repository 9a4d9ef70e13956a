from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from djinnd.server.sessions.common_prefix import common_prefix


@given(st.integers(0, 700), st.integers(1, 700), st.integers(0, 700))
def test_it_is_as_long_as_it_can_be_and_leaves_a_token_to_compute(have: int, wanted: int, same: int) -> None:
    expected = min(have, wanted - 1, same)
    tokens = [*range(1000)]
    changed = [*tokens[:same], *(-1 - token for token in tokens[same:])]
    assert common_prefix(tokens[:have], changed[:wanted]) == expected
