"""The limits of what the links of a token hold in the gateway."""

from __future__ import annotations

import pytest

from djinn_client.errors import Busy, QuotaExceeded
from djinnd.config import Remote
from djinnd.gateway.daemon.refused_tokens import RefusedTokens
from djinnd.gateway.remote.accounts import Accounts
from djinnd.gateway.remote.figures import Figures


@pytest.fixture
def accounts() -> Accounts:
    refused = RefusedTokens()
    limits = Remote(connections_per_token=2, window_bytes=100, window_bytes_per_token=60)
    return Accounts(limits, refused, Figures(refused))


def test_a_token_has_so_many_connections(accounts: Accounts) -> None:
    accounts.open("a")
    accounts.open("a")
    accounts.open("b")
    with pytest.raises(Busy, match="2 connections"):
        accounts.open("a")
    accounts.close("a")
    accounts.open("a")


def test_a_token_sends_so_many_bytes_at_once(accounts: Accounts) -> None:
    accounts.charge("a", 40)
    with pytest.raises(QuotaExceeded, match="sending 61 bytes; the gateway takes 60"):
        accounts.charge("a", 21)
    accounts.release("a", 40)
    accounts.charge("a", 60)


def test_all_tokens_together_send_so_many_bytes(accounts: Accounts) -> None:
    accounts.charge("a", 60)
    with pytest.raises(Busy, match=r"remote\.window_bytes"):
        accounts.charge("b", 41)
    accounts.charge("b", 40)


def test_a_new_limit_holds_at_once(accounts: Accounts) -> None:
    accounts.limits = Remote(window_bytes=10, window_bytes_per_token=10)
    with pytest.raises(QuotaExceeded):
        accounts.charge("a", 11)


@pytest.mark.parametrize("wrong", [{"grace": 0}, {"window_bytes": 1, "window_bytes_per_token": 2}])
def test_limits_that_contradict_each_other_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Remote(**wrong)
