"""The output of sessions on the shipped model, compared with transformers and the tokenizer themselves."""

from __future__ import annotations

import asyncio
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

import djinn_client as djinn
from tests.conftest import MODEL
from tests.support import reference
from tests.support.daemon import Daemon
from tests.support.models import tiny_model
from tests.support.parameters import long_except

HARD_PROMPT = "# Größe: 日本語 👩‍👩‍👧"  # of characters that several tokens share
PROMPTS = ["def fibonacci(", "class Tree:\n    ", "'''\n"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(Path(tiny_model()) / "tokenizer.json"))


@pytest.fixture
def open_session(daemon: Daemon) -> Any:
    return lambda: djinn.Session(MODEL, address=daemon.address)


@pytest.mark.parametrize("prompt", long_except((HARD_PROMPT,), (HARD_PROMPT, *PROMPTS)))
def test_greedy_output_equals_that_of_transformers(open_session: Any, tokenizer: Tokenizer, prompt: str) -> None:
    with open_session() as s:
        r = s.generate(prompt, max_tokens=64, ignore_eos=True)
        prompt_tokens = s.token_ids()[:-64]
    assert prompt_tokens == tokenizer.encode(prompt).ids
    assert r.token_ids == reference.greedy(tiny_model(), prompt_tokens, 64, r.token_ids)


@pytest.mark.parametrize("temperature", long_except((3.0,), (0.0, 1.0, 3.0)), ids="temperature {}".format)
@pytest.mark.parametrize("prompt", long_except((HARD_PROMPT,), (HARD_PROMPT, *PROMPTS)))
def test_streamed_text_is_complete(open_session: Any, tokenizer: Tokenizer, prompt: str, temperature: float) -> None:
    """At temperature 3 tokens are nearly random: bytes that begin a character, continue none, or are one."""
    options = {"max_tokens": 60, "temperature": temperature, "seed": 11, "ignore_eos": True}
    with open_session() as a, open_session() as b:
        at_once = a.generate(prompt, **options)
        stream = b.stream(prompt, **options)
        pieces = list(stream)
        tokens = b.token_ids()
    assert stream.result.token_ids == at_once.token_ids
    assert "".join(piece.text for piece in pieces) == stream.result.text == at_once.text
    assert prompt + at_once.text == tokenizer.decode(tokens, skip_special_tokens=True)
    so_far = [prompt + text for text in accumulate(piece.text for piece in pieces)]
    assert all(at_once.text.startswith(text[len(prompt) :]) for text in so_far)
    assert sum("\N{REPLACEMENT CHARACTER}" in piece.text for piece in pieces) <= at_once.text.count(
        "\N{REPLACEMENT CHARACTER}"
    )


def test_stop_strings(open_session: Any) -> None:
    with open_session() as s:
        text = s.generate(PROMPTS[0], max_tokens=40, ignore_eos=True).text
    for stop in (text[10:11], text[15:22], text[5:40], text[-3:]):
        first = text.index(stop)
        with open_session() as s, open_session() as t:
            r = s.generate(PROMPTS[0], max_tokens=40, ignore_eos=True, stop=["@@@", stop])
            assert (r.text, r.finish_reason) == (text[:first], "stop")
            stream = t.stream(PROMPTS[0], max_tokens=40, ignore_eos=True, stop=stop)
            assert "".join(piece.text for piece in stream) == text[:first]
            assert s.token_ids() == t.token_ids()
            assert len(s.generate(max_tokens=3, ignore_eos=True).token_ids) == 3
    with open_session() as s:
        r = s.generate(PROMPTS[0], max_tokens=40, ignore_eos=True, stop="\N{SNOWMAN}")
        assert (r.text, r.finish_reason) == (text, "length")


@pytest.mark.long
def test_a_seed_gives_the_same_tokens_beside_other_sessions(daemon: Daemon) -> None:
    options = {"max_tokens": 40, "temperature": 1.2, "top_p": 0.95, "ignore_eos": True}

    async def one(prompt: str, seed: int | None) -> list[int]:
        async with djinn.AsyncSession(MODEL, address=daemon.address) as s:
            return (await s.generate(prompt, seed=seed, **options)).token_ids  # type: ignore[arg-type]

    async def scenario() -> None:
        alone = [await one(prompt, seed) for prompt in PROMPTS for seed in (1, 2)]
        crowd = [asyncio.create_task(one(f"x = {n}", None)) for n in range(8)]
        together = await asyncio.gather(*(one(prompt, seed) for prompt in PROMPTS for seed in (1, 2)))
        assert together == alone
        unseeded = await asyncio.gather(*(one(PROMPTS[0], None) for _ in range(4)))
        assert len({tuple(tokens) for tokens in [*unseeded, *alone[:2]]}) == 6
        await asyncio.gather(*crowd)

    asyncio.run(scenario())


def test_logprobs_equal_those_of_the_model(open_session: Any) -> None:
    with open_session() as s:
        r = s.generate(PROMPTS[0], max_tokens=16, temperature=1.5, seed=5, logprobs=5, ignore_eos=True)
        tokens = s.token_ids()
    logits = reference.logits(tiny_model(), tokens[:-1])[-16:].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for token, told, row in zip(r.token_ids, r.logprobs, expected, strict=True):
        assert told.token == pytest.approx(row[token], abs=1e-3)
        assert len(told.top) == 5
        for likely, logprob in told.top.items():
            assert logprob == pytest.approx(row[likely], abs=1e-3)
        assert min(told.top.values()) >= np.sort(row)[-5] - 1e-3


def test_truncating_and_continuing(open_session: Any) -> None:
    with open_session() as s:
        s.generate([5 + 7 * n % 1000 for n in range(252)], max_tokens=40, ignore_eos=True)
        tokens = s.token_ids()
        for length in (290, 257, 256, 255, 3, 1):  # pages have 256 tokens
            s.truncate(length)
            s.generate([50, 60, 70], max_tokens=8, ignore_eos=True)
            told = s.token_ids()
            prompt = [*tokens[:length], 50, 60, 70]
            assert told == prompt + reference.greedy(tiny_model(), prompt, 8, told[length + 3 :])


def test_penalties_have_their_effect(open_session: Any) -> None:
    """A repetition penalty keeps greedy output from repeating itself; an equally large presence penalty forbids
    repeats."""
    with open_session() as s:
        plain = s.generate("0 0 0 0 0 0 ", max_tokens=60, ignore_eos=True).token_ids
        s.truncate(0)
        once = s.generate("0 0 0 0 0 0 ", max_tokens=60, ignore_eos=True, presence_penalty=100.0).token_ids
    assert len(set(plain)) < len(plain)
    assert len(set(once)) == len(once)
