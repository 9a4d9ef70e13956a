"""Streaming does not change the text."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from djinnd.text.detokenizer import BROKEN, Detokenizer
from djinnd.text.stop_strings import StopMatcher
from tests.support import toy_tokenizers

texts = st.text() | st.text(alphabet="a é€😀\ufffd▁\n", max_size=60)
families = pytest.mark.parametrize("family", toy_tokenizers.ALL)


@families
@given(texts)
@example(BROKEN * 70)
@example("   the  ▁ end ")
def test_streamed_pieces_join_to_the_text(family: str, text: str) -> None:
    tokenizer = toy_tokenizers.ALL[family]()
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    stream = Detokenizer(tokenizer).stream()
    told = [stream.feed(token) for token in tokens]
    assert "".join(told) + stream.finish() == tokenizer.decode(tokens)
    if BROKEN not in text:
        assert BROKEN not in "".join(told)


@families
@given(texts, st.data())
def test_reading_many_tokens_at_once_does_not_change_the_text(family: str, text: str, data: st.DataObject) -> None:
    tokenizer = toy_tokenizers.ALL[family]()
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=5)))
    stream = Detokenizer(tokenizer).stream()
    told = [stream.feed_all(tokens[begin:end]) for begin, end in pairwise([0, *cuts, len(tokens)])]
    assert "".join(told) + stream.finish() == tokenizer.decode(tokens)
    if BROKEN not in text:
        assert BROKEN not in "".join(told)


@families
@given(texts, st.data())
def test_pieces_of_two_requests_join_to_the_text(family: str, text: str, data: st.DataObject) -> None:
    """The requests are cut at any token between two characters."""
    tokenizer = toy_tokenizers.ALL[family]()
    encoding = tokenizer.encode(text, add_special_tokens=False)
    tokens, offsets = encoding.ids, encoding.offsets
    cuts = [cut for cut in range(1, len(tokens)) if offsets[cut][0] >= offsets[cut - 1][1]]
    cut = data.draw(st.sampled_from([0, *cuts, len(tokens)]))
    stream = Detokenizer(tokenizer).stream(tokens[:cut])
    told = "".join(stream.feed(token) for token in tokens[cut:]) + stream.finish()
    assert tokenizer.decode(tokens[:cut]) + told == tokenizer.decode(tokens)


@families
@given(st.lists(st.integers(0, 600), max_size=80), st.lists(st.integers(0, 600), max_size=12))
def test_any_tokens_give_text(family: str, tokens: list[int], context: list[int]) -> None:
    """Models may generate invalid UTF-8."""
    tokenizer = toy_tokenizers.ALL[family]()
    detokenizer = Detokenizer(tokenizer)
    stream = detokenizer.stream(context)
    told = "".join(stream.feed(token) for token in tokens) + stream.finish()
    if not context and BROKEN not in tokenizer.decode(tokens):
        assert told == tokenizer.decode(tokens)


def first_match(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Start of the match and the stop string, found by trying every end."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return end - len(longest), longest
    return None


@given(
    st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4),
    st.lists(st.text(alphabet="abc", max_size=4), max_size=15),
)
def test_stop_strings_are_found_as_by_exhaustive_search(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    matcher = StopMatcher(stops)
    told = ""
    for number, piece in enumerate(pieces):
        told += matcher.feed(piece)
        seen = "".join(pieces[: number + 1])
        match = first_match(seen, stops)
        assert matcher.matched == (match[1] if match else None)
        if match is None:  # exactly the characters that may begin a match are held back
            begun = [n for n in range(len(seen) + 1) if any(stop.startswith(seen[n:]) for stop in [*stops, ""])]
            assert told == seen[: min(begun, default=len(seen))]
    match = first_match(text, stops)
    told += matcher.finish()
    assert told == (text[: match[0]] if match else text)
