from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer

from djinn_client.errors import ModelRejected
from djinnd.gguf.header import Header
from djinnd.gguf.tokenizer import make_tokenizer, tokenizer_settings
from tests.support.gguf_files import gguf_bytes, vocabulary
from tests.support.models import tiny_model


def header_of(metadata: dict[str, Any]) -> Header:
    data = gguf_bytes(metadata)
    return Header(lambda offset, count: data[offset : offset + count], len(data))


def tokenizer_of(metadata: dict[str, Any]) -> Tokenizer:
    made = make_tokenizer(header_of(metadata))
    assert made is not None
    return made


TEXTS = ["def main():\n\treturn 12345  # ü 漢字", "<|endoftext|> a  b", ""]


def test_a_vocabulary_of_bytes_gives_the_tokens_of_its_tokenizer_json() -> None:
    made, own = tokenizer_of(vocabulary(tiny_model())), Tokenizer.from_file(str(tiny_model() / "tokenizer.json"))
    for text in TEXTS:
        assert made.encode(text).ids == own.encode(text).ids
        assert made.decode(made.encode(text).ids) == own.decode(own.encode(text).ids)


def test_digits_are_words_where_the_file_says_so() -> None:
    plain = vocabulary(tiny_model())
    tokens, merges = [*plain["tokenizer.ggml.tokens"], "12"], [*plain["tokenizer.ggml.merges"], "1 2"]
    told = plain | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges}
    assert tokenizer_of(told).encode("12").tokens == ["12"]
    assert tokenizer_of(told | {"tokenizer.ggml.pre": "smollm"}).encode("12").tokens == ["1", "2"]


SENTENCES = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "<0x21>", "\u2581", "h", "i", "\u2581h", "hi", "\u2581hi"],
    "tokenizer.ggml.scores": [0.0, 0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0],
    "tokenizer.ggml.token_type": [2, 3, 3, 6, 1, 1, 1, 1, 1, 1],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes() -> None:
    made = tokenizer_of(SENTENCES)
    assert made.encode("hi!").tokens == ["<s>", "\u2581hi", "<0x21>"]
    assert made.decode(made.encode("hi!").ids) == "hi!"
    without = tokenizer_of(
        SENTENCES | {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    )
    assert without.encode("hi hi").tokens == ["hi", "\u2581hi"]


def test_templates_and_special_tokens_are_settings() -> None:
    told = {"tokenizer.chat_template": "A", "tokenizer.chat_template.tool_use": "B"}
    settings = tokenizer_settings(header_of(SENTENCES | told | {"tokenizer.chat_templates": ["tool_use"]}))
    assert settings == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "chat_template": [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}],
    }


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"tokenizer.ggml.pre": "klingon"}, "by the rule klingon"),
        ({"tokenizer.ggml.model": "bert"}, "of the kind bert; served are gpt2 and llama"),
        ({"tokenizer.ggml.merges": ["nowhere else"]}, "cannot be made"),
    ],
)
def test_a_tokenizer_that_is_not_served_is_refused(told: dict[str, Any], why: str) -> None:
    with pytest.raises(ModelRejected, match=why):
        tokenizer_of(vocabulary(tiny_model()) | told)


def test_a_file_without_a_vocabulary_has_no_tokenizer() -> None:
    assert make_tokenizer(header_of({"general.architecture": "llama"})) is None
