from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from djinnd.text.encoder import Encoder
from djinnd.text.segments import Segments
from tests.support.toy_tokenizers import byte_level, llama

PIECES = ("<s>", "</s>", "<tool>", "x<s>", " <mask> ", "word", "a b", " ", "\n\n", "größer", "<", "s>", "日本")


def tokenizer() -> Tokenizer:
    made = Tokenizer.from_str(byte_level().to_str())
    made.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("x<s>", normalized=False), "a b"])
    made.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    return made


TOKENIZER = tokenizer()


@given(st.lists(st.lists(st.sampled_from(PIECES)).map("".join), max_size=4))
def test_tokens_are_the_tokenizer_s_own(texts: list[str]) -> None:
    segments = Segments(TOKENIZER, most=20)
    for text in [*texts, *texts]:
        assert segments.encode(text) == TOKENIZER.encode(text, add_special_tokens=False).ids


def test_the_least_recently_used_text_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    segments = Segments(TOKENIZER, most=10)
    for text in ("aaaa", "bbbb", "aaaa", "cccc", "d" * 100):
        segments.encode(text)
        assert sum(map(len, segments._remembered)) == segments._characters <= 10
    for text in ("aaaa", "bbbb", "aaaa", "cccc"):
        segments.encode(text)
    assert [*segments._remembered] == ["aaaa", "cccc"]


def test_where_a_cut_matters_nothing_is_remembered() -> None:
    of_words = Tokenizer.from_str(byte_level().to_str())
    of_words.add_tokens([AddedToken("word", single_word=True)])
    for made, remembers in ((byte_level(), True), (llama(), False), (of_words, False)):
        encoder = Encoder(made)
        encoder.remember()
        assert (encoder._segments is not None) is remembers
