from __future__ import annotations

import pytest

from djinn_client.errors import NotAuthenticated
from djinnd.gateway.daemon import refused_tokens
from djinnd.gateway.daemon.refused_tokens import KEPT, SECONDS, RefusedTokens


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(refused_tokens.time, "monotonic", lambda: now[0])
    return now


def test_a_refused_token_is_refused_for_a_while(clock: list[float]) -> None:
    refused = RefusedTokens()
    refused.check("a")
    refused.add("a")
    refused.check("b")
    with pytest.raises(NotAuthenticated, match="holds no longer"):
        refused.check("a")
    clock[0] += SECONDS
    refused.check("a")


def test_the_token_that_was_refused_first_is_forgotten_for_a_new_one(clock: list[float]) -> None:
    refused = RefusedTokens()
    for number in range(KEPT):
        refused.add(f"{number}")
    refused.add("0")
    refused.add("new")
    refused.check("1")
    for kept in ("0", "2", "new"):
        with pytest.raises(NotAuthenticated):
            refused.check(kept)
