from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from djinn_client.errors import TextFailed
from djinnd.text.token_bytes import TokenBytes
from tests.support import toy_tokenizers

TEXTS = ["def f(n): return n", "größer 日本語 😀👍🏽", "  spaces   and\n\ttabs", "\N{NO-BREAK SPACE}"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", toy_tokenizers.ALL)
def test_the_bytes_of_a_text_s_tokens_are_its_own(name: str, text: str) -> None:
    tokenizer = toy_tokenizers.ALL[name]()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    found = TokenBytes(tokenizer).of(ids)
    joined = b"".join(found[id_] for id_ in ids).decode()
    assert joined in (text, " " + text), "some put a space before it"


def test_special_tokens_are_their_text_and_unknown_ones_are_nothing() -> None:
    tokenizer = toy_tokenizers.byte_level()
    end = tokenizer.token_to_id("</s>")
    assert TokenBytes(tokenizer).of([end, 10_000]) == {end: b"</s>", 10_000: b""}


def test_a_tokenizer_of_another_kind_is_asked_for_its_text() -> None:
    tokenizer = Tokenizer(models.WordLevel({"hello": 0, "world": 1}, "hello"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    assert TokenBytes(tokenizer).of([0, 1]) == {0: b"hello", 1: b"world"}


def test_tokens_that_are_longer_than_any_honest_ones() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a" * 5000: 0}, "a" * 5000))
    with pytest.raises(TextFailed, match="5,000 characters of 1 tokens"):
        TokenBytes(tokenizer).of([0])
