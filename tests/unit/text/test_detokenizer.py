from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from djinnd.text.detokenizer import BROKEN, MAX_PENDING, Detokenizer, TextStream
from tests.support import toy_tokenizers


@pytest.fixture(params=toy_tokenizers.ALL.values(), ids=toy_tokenizers.ALL.keys())
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.param()


@pytest.fixture(params=[toy_tokenizers.llama, toy_tokenizers.metaspace], ids=["llama", "metaspace"])
def byte_fallback(request: pytest.FixtureRequest) -> Tokenizer:
    return request.param()


def byte_tokens(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token a byte, for tokenizers with byte fallback."""
    tokens = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in data]
    assert None not in tokens
    return tokens


def letter_tokens(data: bytes) -> list[int]:
    """One token a byte of the byte-level tokenizer, whose first 256 letters are those of GPT-2's table."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    tokens = [toy_tokenizers.byte_level().token_to_id(letters[byte]) for byte in data]
    assert None not in tokens
    return tokens


def pieces(tokenizer: Tokenizer, tokens: list[int], context: list[int] | None = None) -> list[str]:
    """The text of each token, and the rest at the end."""
    stream = Detokenizer(tokenizer).stream(context or [])
    return [*(stream.feed(token) for token in tokens), stream.finish()]


def test_text_comes_with_its_tokens(tokenizer: Tokenizer):
    encoding = tokenizer.encode("the lazy dog", add_special_tokens=False)
    told = pieces(tokenizer, encoding.ids)
    assert "".join(told) == "the lazy dog"
    assert told[-1] == "" and all(told[:-1])


def test_many_tokens_take_as_many_windows_as_one(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    def windows(tokens: list[int]) -> int:
        detokenizer, decoded = Detokenizer(tokenizer), []
        stream, decode = detokenizer.stream(), detokenizer.decode
        monkeypatch.setattr(detokenizer, "decode", lambda some: decoded.append(1) or decode(some))
        assert stream.feed_all(tokens) == tokenizer.decode(tokens)
        return len(decoded)

    tokens = tokenizer.encode("the lazy dog", add_special_tokens=False).ids
    assert len(tokens) > 1 and windows(tokens) == windows(tokens[:1])


def test_a_character_comes_whole_with_its_last_byte(byte_fallback: Tokenizer):
    assert pieces(byte_fallback, byte_tokens(byte_fallback, "€😀".encode())) == ["", "", "€", "", "", "", "😀", ""]


def test_a_character_comes_whole_with_its_last_byte_at_byte_level():
    told = pieces(toy_tokenizers.byte_level(), letter_tokens("a€😀b".encode()))
    assert told == ["a", "", "", "€", "", "", "", "😀", "b", ""]


@pytest.mark.parametrize("text", ["the lazy dog", "größer", "日本語 😀 the", "ends in €"])
@pytest.mark.parametrize("cut", range(30))
def test_going_on_anywhere_keeps_the_spacing(tokenizer: Tokenizer, text: str, cut: int):
    """A first request ends after `cut` tokens, maybe within a character; a second goes on."""
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    before, after = tokens[:cut], tokens[cut:]
    first = "".join(pieces(tokenizer, before))
    second = "".join(pieces(tokenizer, after, before))
    if BROKEN in first:  # the character comes whole with the second, the first has told it broken
        first = first.rstrip(BROKEN)
        assert BROKEN not in second
    assert first + second == text


def test_only_text_counts_as_context(byte_fallback: Tokenizer):
    x, dog, end = (byte_fallback.token_to_id(piece) for piece in ("x", "▁dog", "</s>"))
    assert "".join(pieces(byte_fallback, [dog], [x, *[end] * 100])) == " dog"
    assert "".join(pieces(byte_fallback, [dog], [end, 1 << 30])) == "dog"  # the first of the text: no space


def test_special_and_unknown_tokens_have_no_text(tokenizer: Tokenizer):
    tokens = tokenizer.encode("the dog", add_special_tokens=False).ids
    silent = [tokenizer.token_to_id("</s>"), tokenizer.get_vocab_size(), (1 << 31) - 1]
    stream = Detokenizer(tokenizer).stream()
    told = ""
    for token in tokens:
        assert [stream.feed(id_) for id_ in silent] == ["", "", ""]
        told += stream.feed(token)
    assert told + stream.finish() == "the dog"


def test_special_tokens_that_are_shown_have_text(tokenizer: Tokenizer):
    tokens = [*tokenizer.encode("the dog", add_special_tokens=False).ids, tokenizer.token_to_id("</s>")]
    detokenizer = Detokenizer(tokenizer)
    for shown, text in ((["</s>", "unknown"], "the dog</s>"), (["unknown"], "the dog")):
        stream = detokenizer.stream(shown=shown)
        assert stream.feed_all(tokens).replace(" </s>", "</s>") + stream.finish() == text


def test_special_tokens_within_a_character(byte_fallback: Tokenizer):
    first, second, third = byte_tokens(byte_fallback, "€".encode())
    end = byte_fallback.token_to_id("</s>")
    assert "".join(pieces(byte_fallback, [first, end, second, end, end, third])) == "€"


def test_the_end_tells_what_is_incomplete():
    assert pieces(toy_tokenizers.byte_level(), letter_tokens("ok €".encode()[:-1])) == ["o", "k", " ", "", "", BROKEN]


def test_nothing_more_comes_after_the_end(tokenizer: Tokenizer):
    stream = Detokenizer(tokenizer).stream()
    stream.feed(tokenizer.encode("€", add_special_tokens=False).ids[0])
    stream.finish()
    assert stream.finish() == ""


def test_broken_bytes_break_no_text_around_them():
    told = pieces(toy_tokenizers.byte_level(), letter_tokens(b"a\xe2b\xff\xfe!" + "€".encode()))
    assert "".join(told) == f"a{BROKEN}b{BROKEN}{BROKEN}!€"


def test_broken_bytes_after_a_whole_character(byte_fallback: Tokenizer):
    """Where the decoder takes back the character before them."""
    letter = byte_fallback.token_to_id("x")
    assert (
        "".join(pieces(byte_fallback, [*byte_tokens(byte_fallback, "€".encode() + b"\xe2"), letter])) == f"€{BROKEN}x"
    )


@pytest.mark.parametrize("tail", [b"", b"\xe2\x82"], ids=["whole", "unfinished"])
def test_broken_bytes_of_the_context_are_not_repeated(tail: bytes):
    tokenizer = toy_tokenizers.byte_level()
    context = letter_tokens(b"ab" + b"\xff" + tail)
    assert "".join(pieces(tokenizer, letter_tokens(b"c"), context)) == "c"


def test_replacement_characters_that_are_meant(tokenizer: Tokenizer):
    text = "a" + BROKEN * 40 + "é" + BROKEN * 20
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    assert "".join(pieces(tokenizer, tokens)) == text
    for cut in range(len(tokens)):
        before = len("".join(pieces(tokenizer, tokens[:cut])))
        told = "".join(pieces(tokenizer, tokens[cut:], tokens[:cut]))
        assert text.endswith(told)
        assert len(text) <= before + len(told) <= len(text) + 2  # where the cut goes through a character


class Decodes(Detokenizer):
    """Records how many tokens were decoded."""

    decoded = 0

    def decode(self, tokens: list[int]) -> str:
        self.decoded += len(tokens)
        return super().decode(tokens)


@pytest.mark.parametrize("byte", [b"\xff", b"\xe2", b"\x80"], ids=["never valid", "always first", "always later"])
def test_a_run_of_broken_bytes_is_told_in_time_and_with_bounded_work(byte: bytes):
    detokenizer = Decodes(toy_tokenizers.byte_level())
    stream = detokenizer.stream()
    told = 0
    for fed, token in enumerate(letter_tokens(byte) * 500, start=1):
        before = detokenizer.decoded
        told += len(stream.feed(token))
        assert detokenizer.decoded - before <= 6 * 3 * MAX_PENDING
        assert fed - told < MAX_PENDING
    assert told + len(stream.finish()) == 500


def test_a_run_of_broken_bytes_with_byte_fallback(byte_fallback: Tokenizer):
    told = pieces(byte_fallback, [*byte_tokens(byte_fallback, b"\xff" * 500), byte_fallback.token_to_id("x")])
    assert "".join(told) == BROKEN * 500 + "x"


def test_streams_are_apart(tokenizer: Tokenizer):
    detokenizer = Detokenizer(tokenizer)
    texts = ["日本語 text", "größer 😀"]
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    streams: list[TextStream] = [detokenizer.stream() for _ in texts]
    told = ["", ""]
    for step in range(max(map(len, ids))):
        for number, stream in enumerate(streams):
            if step < len(ids[number]):
                told[number] += stream.feed(ids[number][step])
    assert [text + stream.finish() for text, stream in zip(told, streams, strict=True)] == texts
