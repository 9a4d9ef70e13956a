"""Invalid values in calls get a typed error that names them, and change nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest

import djinn_client as djinn
from djinn_client.errors import DjinnError, InvalidRequest, PromptTooLong, TokenOutOfRange
from djinn_client.protocol import Forward, Generate, Generated, Logits, Sampling, Truncate
from djinn_client.transport.connection import Connection, connect
from djinn_client.transport.steps import run

from .conftest import MODEL, OpenSession

PROMPT = "def fibonacci("


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": math.nan},
        {"temperature": -0.1},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": math.nan},
        {"top_k": -1},
        {"repetition_penalty": 0.0},
        {"presence_penalty": math.inf},
        {"seed": -1},
        {"max_tokens": -1},
        {"max_tokens": 1 << 20},
        {"frequency_penalty": math.nan},
        {"logit_bias": {5: 101.0}},
        {"logit_bias": {1 << 30: 1.0}},
        {"logit_bias": dict.fromkeys(range(1025), 1.0)},
        {"min_tokens": 65, "max_tokens": 64},
        {"logprobs": -1},
        {"logprobs": 1 << 40},
        {"stop": [""]},
        {"stop": ["x"] * 1000},
        {"temperature": "warm"},
        {"max_tokens": 1 << 80},
    ],
    ids=str,
)
async def test_an_option_out_of_its_range(session: OpenSession, options: dict[str, Any]) -> None:
    async with session() as s:
        await s.generate(PROMPT, max_tokens=2)
        before = await s.token_ids()
        with pytest.raises(InvalidRequest):
            await s.generate("more", **options)
        with pytest.raises(InvalidRequest):
            await anext(s.stream("more", **options))
        assert await s.token_ids() == before
        assert len((await s.generate(max_tokens=1)).token_ids) == 1


async def test_a_token_out_of_range(session: OpenSession, model: djinn.ModelInfo) -> None:
    async with session() as s:
        for tokens in ([model.vocab], [1, 2, -1], [1, 1 << 31], [1 << 80]):
            for call in (s.generate(tokens), s.forward(tokens), s.generate(PROMPT, stop_token_ids=tokens)):
                with pytest.raises(TokenOutOfRange):
                    await call
        assert await s.token_ids() == []
        assert (await s.forward([model.vocab - 1])).shape == (1, model.vocab)


async def test_a_prompt_longer_than_the_model(session: OpenSession, model: djinn.ModelInfo) -> None:
    async with session() as s:
        with pytest.raises(PromptTooLong) as caught:
            await s.generate([1] * model.max_context)  # no room for one more
        assert caught.value.data["max_context"] == model.max_context
        with pytest.raises(PromptTooLong):
            await s.forward([1] * (model.max_context + 1))
        with pytest.raises(PromptTooLong):
            await s.generate("x = 1\n" * model.max_context)
        assert await s.token_ids() == []
        assert len((await s.generate(PROMPT, max_tokens=2, ignore_eos=True)).token_ids) == 2


async def test_the_context_ends_an_output(session: OpenSession, model: djinn.ModelInfo) -> None:
    async with session() as s:
        r = await s.generate([1] * (model.max_context - 3), max_tokens=None, ignore_eos=True)
        assert r.finish_reason == "length"
        assert 3 <= len(r.token_ids) <= 4  # the last one needs no room for KV
        with pytest.raises(PromptTooLong):
            await s.generate([1], max_tokens=1)
        await s.truncate(5)
        assert len((await s.generate(max_tokens=1)).token_ids) == 1


async def test_nothing_to_go_on_from(session: OpenSession) -> None:
    async with session() as s:
        for prompt in (None, []):
            with pytest.raises(InvalidRequest):
                await s.generate(prompt)
        with pytest.raises(InvalidRequest):
            await s.forward([])


@pytest.mark.parametrize("length", [-1, 1000, 1 << 40])
async def test_truncating_to_what_is_not_there(session: OpenSession, length: int) -> None:
    async with session() as s:
        await s.forward([1, 2, 3])
        with pytest.raises(InvalidRequest):
            await s.truncate(length)
        assert await s.token_ids() == [1, 2, 3]


@pytest.fixture
def connection(daemon_address: str) -> Any:
    opened = run(connect(daemon_address))
    yield opened
    opened.close()


def test_the_daemon_does_not_rely_on_its_clients(connection: Connection, daemon_address: str) -> None:
    """Values that our own client would have refused."""
    with djinn.Session(MODEL, address=daemon_address) as s:
        for request, reply in (
            (Generate(id=0, session=s.id, token_ids=[-1]), Generated),
            (Generate(id=0, session=s.id, text="x", max_tokens=-(1 << 63)), Generated),
            (Generate(id=0, session=s.id, text="x", sampling=Sampling(temperature=math.nan)), Generated),
            (Generate(id=0, session=s.id, text="x", token_ids=[1]), Generated),
            (Generate(id=0, session=s.id, text="x", sampling=Sampling(seed=(1 << 64) - 1)), Generated),
            (Forward(id=0, session=s.id, token_ids=[1 << 62]), Logits),
            (Truncate(id=0, session=s.id, length=-(1 << 63)), Generated),
        ):
            with pytest.raises(DjinnError) as caught:
                run(connection.call(request, reply))  # type: ignore[type-var]
            assert isinstance(caught.value, InvalidRequest), (request, caught.value)
        assert s.token_ids() == []
        assert len(s.generate(PROMPT, max_tokens=1).token_ids) == 1
