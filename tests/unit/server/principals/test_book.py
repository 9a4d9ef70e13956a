from __future__ import annotations

import pytest

from djinn_client.errors import InvalidRequest, NotFound, QuotaExceeded
from djinnd.config.principals import number_of
from djinnd.server.principals import book
from djinnd.server.principals.book import TokenBook, TokenFileContent, new_token


def book_with(*names: str) -> tuple[TokenBook, list[str]]:
    """Returns a book with these tokens, and their secrets."""
    made, secrets = TokenBook(TokenFileContent()), []
    for name in names:
        token, secret = new_token(name, None, None, 1.0, None)
        made.add(token)
        secrets.append(secret)
    return made, secrets


def test_a_secret_has_256_bits_and_is_not_kept() -> None:
    made, (one, two) = book_with("a", "b")
    assert one.startswith("djn_") and len(one) == 4 + 43 and one != two
    assert one not in repr(made.content())
    assert made.find(one, 2.0) == made.get("a")
    assert made.find(one[:-1], 2.0) is None and made.find("", 2.0) is None


def test_an_expired_token_is_not_found() -> None:
    made = TokenBook(TokenFileContent())
    token, secret = new_token("a", None, None, now=1.0, expires=5.0)
    made.add(token)
    assert made.find(secret, 4.9) is not None and made.find(secret, 5.0) is None


def test_a_token_is_its_unix_user_s_or_its_name_s() -> None:
    assert new_token("a", 1000, None, 1.0, None)[0].principal == 1000
    assert new_token("a", None, None, 1.0, None)[0].principal == number_of("a")


def test_revoked_names_keep_their_numbers() -> None:
    made, (secret,) = book_with("a")
    made.revoke("a")
    assert made.find(secret, 2.0) is None and made.name_of(number_of("a")) == "a"
    with pytest.raises(NotFound):
        made.revoke("a")
    token, again = new_token("a", None, None, 3.0, None)
    made.add(token)
    assert (
        made.content() == TokenFileContent([token], [])
        and made.find(secret, 4.0) is None
        and made.find(again, 4.0) == token
    )


def test_revoked_names_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book, "MAX_RETIRED", 2)
    made, _ = book_with("a", "b", "c")
    for name in "abc":
        made.revoke(name)
    assert made.content().retired == ["b", "c"]
    assert [made.name_of(number_of(name)) for name in "abc"] == [None, "b", "c"]


def test_a_book_made_from_its_content_is_equal() -> None:
    made, (secret, _) = book_with("a", "b")
    token = made.get("a")
    assert token is not None
    made.used(token, 7.0)
    made.revoke("b")
    again = TokenBook(made.content())
    found = again.find(secret, 8.0)
    assert found is not None and found.used == 7.0
    assert again.content() == made.content() and again.name_of(number_of("b")) == "b"


def test_content_can_have_a_token_that_is_about_to_be_added() -> None:
    made, _ = book_with("a", "b")
    made.revoke("b")
    token, _ = new_token("b", None, None, 3.0, None)
    assert made.content(token) == TokenFileContent([*made, token], [])
    assert made.get("b") is None


def test_names_that_cannot_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = book_with("a", "b")
    made.revoke("b")
    made.expect_new("b", most=2)
    made.expect_new("c", most=2)
    with pytest.raises(InvalidRequest, match="there is a token a"):
        made.expect_new("a", most=2)
    with pytest.raises(InvalidRequest, match="is no name"):
        made.expect_new("a b", most=2)
    with pytest.raises(QuotaExceeded, match=r"1 tokens, and limits\.tokens is 1"):
        made.expect_new("c", most=1)
    monkeypatch.setattr(book, "number_of", lambda name: number_of("b"))
    with pytest.raises(InvalidRequest, match="the same number as b"):
        made.expect_new("c", most=2)
