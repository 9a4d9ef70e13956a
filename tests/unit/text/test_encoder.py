"""A call's rules decide about special tokens, control strings and the space before a text."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from djinn_client.errors import InvalidRequest
from djinnd.text.encoder import Encoder, TextRules

WORDS = ["<unk>", "<s>", "▁foot", "foot", "ball", "▁ball", "<|end|>", "▁", *"<|end>"]


def made(kind: str) -> Tokenizer:
    """A tokenizer that puts a space before every text, told so in one of three ways."""
    scores = [(word, -1.0 if len(word) > 1 else -9.0) for word in dict.fromkeys(WORDS)]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=False))
    if kind == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    elif kind == "metaspace in a sequence":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme="first")])
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.add_special_tokens(["<s>", "<|end|>"])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $0", special_tokens=[("<s>", 1)])
    return tokenizer


@pytest.fixture(params=["metaspace", "metaspace in a sequence", "prepend"])
def encoder(request):
    tokenizer = made(request.param)
    return lambda text, **rules: [tokenizer.id_to_token(i) for i in Encoder(tokenizer).encode(text, TextRules(**rules))]


def test_a_text_that_goes_on_continues_the_word(encoder):
    assert encoder("foot", starts=True) == ["<s>", "▁foot"]
    assert encoder("ball", starts=False) == ["ball"]


def test_the_space_can_be_chosen(encoder):
    assert encoder("ball", starts=False, prefix_space=True) == ["▁ball"]
    assert encoder("foot", starts=True, prefix_space=False) == ["<s>", "foot"]


def test_control_strings_can_stay_text(encoder):
    assert "<|end|>" in encoder("foot<|end|>", starts=False)
    tokens = encoder("foot<|end|>", starts=False, parse_special=False)
    assert "<|end|>" not in tokens
    assert "".join(tokens).startswith("foot<")


def test_a_tokenizer_without_a_space_is_not_copied():
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, "a"))
    encoder = Encoder(tokenizer)
    assert encoder.encode("a", TextRules(starts=False)) == encoder.encode("a", TextRules(starts=True)) == [0]


def test_threads_may_ask_at_once():
    encoder = Encoder(made("metaspace"))
    rules = [
        TextRules(starts, parse, space)
        for starts in (False, True)
        for parse in (False, True)
        for space in (None, True, False)
    ]
    alone = [Encoder(made("metaspace")).encode("foot<|end|> ball", each) for each in rules]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda each: encoder.encode("foot<|end|> ball", each), rules * 20))
    assert together == alone * 20


def test_a_control_string_that_is_a_word_of_its_own_is_cut():
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "<|end|>": 1, "a": 2, "<": 3}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<|end|>"])
    encoder = Encoder(tokenizer)
    assert encoder.encode("a <|end|> a", TextRules(starts=True)) == [2, 1, 2]
    assert encoder.encode("a <|end|> a", TextRules(starts=True, parse_special=False)) == [2, 3, 0, 2]


def test_a_control_string_of_one_character_cannot_stay_text():
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "$": 1}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["$"])
    with pytest.raises(InvalidRequest, match=r"'\$'"):
        Encoder(tokenizer).encode("x $", TextRules(starts=True, parse_special=False))
