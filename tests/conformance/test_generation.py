"""A session generates the same tokens by every call, and beside any other session."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from msgspec.structs import replace

import djinn_client as djinn

from .conftest import OpenSession, Session

PROMPT = "def fibonacci("
NO_END = 1900  # tokens: nearly the whole context, which takes seconds
OTHER = "import os\n\n\nclass "


async def collected(stream: object) -> tuple[str, list[int]]:
    """Text and tokens of the pieces."""
    pieces = [piece async for piece in stream]  # type: ignore[attr-defined]
    return "".join(piece.text for piece in pieces), [token for piece in pieces for token in piece.token_ids]


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"temperature": 0.8, "seed": 7}, marks=pytest.mark.long),
        {"temperature": 1.2, "seed": 7, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
        pytest.param(
            {"temperature": 0.8, "seed": 7, "repetition_penalty": 1.3, "presence_penalty": 0.5}, marks=pytest.mark.long
        ),
        {"frequency_penalty": 0.8, "logit_bias": {5: 2.0}, "min_tokens": 9},
        pytest.param({"stop": ["\n"]}, marks=pytest.mark.long),
        {"stop": ["\n", " "], "min_tokens": 12},
    ],
    ids=["greedy", "sampled", "limited", "penalties", "frequency", "stop", "late stop"],
)
async def test_a_stream_is_what_generate_returns(session: OpenSession, options: dict[str, object]) -> None:
    async with session() as a, session() as b:
        whole = await a.generate(PROMPT, max_tokens=24, **options)
        stream = b.stream(PROMPT, max_tokens=24, **options)
        text, tokens = await collected(stream)
        assert (text, tokens) == (whole.text, whole.token_ids)
        assert (stream.result.text, stream.result.token_ids) == (whole.text, whole.token_ids)
        assert stream.result.finish_reason == whole.finish_reason
        guesses = {"guessed_tokens": 0, "kept_tokens": 0}  # may differ, as the times of steps do
        assert replace(stream.result.usage, **guesses) == replace(whole.usage, **guesses)
        assert await a.token_ids() == await b.token_ids()


async def test_a_session_holds_prompt_and_output_and_counts_them(session: OpenSession) -> None:
    async with session() as s:
        r = await s.generate(PROMPT, max_tokens=8, ignore_eos=True)
        tokens = await s.token_ids()
        assert tokens[-8:] == r.token_ids
        assert (r.finish_reason, r.usage.generated_tokens, r.usage.session_tokens) == ("length", 8, len(tokens))
        assert r.usage.prompt_tokens == len(tokens) - 8
        assert 0 <= r.timings.queued <= r.timings.first_token <= r.timings.total


async def test_a_bias_bans_and_forces_tokens(session: OpenSession) -> None:
    async with session() as a, session() as b:
        plain = await a.generate(PROMPT, max_tokens=8)
        banned = await b.generate(PROMPT, max_tokens=8, logit_bias=dict.fromkeys(plain.token_ids, -100.0))
        assert not {*plain.token_ids} & {*banned.token_ids}
        assert (await a.generate(max_tokens=4, logit_bias={9: 100.0}, ignore_eos=True)).token_ids == [9] * 4
        assert (await b.generate(max_tokens=4, logit_bias={9: 100.0}, frequency_penalty=100.0)).token_ids[:2] != [9, 9]


async def test_nothing_ends_an_output_before_min_tokens(session: OpenSession) -> None:
    async with session() as a, session() as b:
        plain = await a.generate(PROMPT, max_tokens=16, ignore_eos=True)
        stops = {"stop_token_ids": plain.token_ids[:1], "stop": [plain.text[:1]]}
        assert (await b.generate(PROMPT, max_tokens=16, **stops)).usage.generated_tokens == 1
        await b.truncate(0)
        late = await b.generate(PROMPT, max_tokens=16, min_tokens=6, **stops)
        assert late.usage.generated_tokens >= 6
        assert plain.token_ids[0] not in late.token_ids[:6]


async def test_max_tokens_has_its_room_or_is_refused_with_the_figures(
    session: OpenSession, model: djinn.ModelInfo
) -> None:
    async with session() as s:
        prompt = [5] * (model.max_context - 6)
        with pytest.raises(djinn.InvalidRequest, match="max_tokens is 7, and there is room for 6"):
            await s.generate(prompt, max_tokens=7)
        assert await s.token_ids() == []
        computed = await s.generate(prompt, max_tokens=0)
        assert (computed.token_ids, computed.finish_reason) == ([], "length")
        assert computed.usage.session_tokens == len(prompt)
        rest = await s.generate(max_tokens=None, ignore_eos=True)
        assert (len(rest.token_ids), rest.finish_reason) == (6, "length")


async def test_text_and_its_tokens_are_the_same_prompt(session: OpenSession) -> None:
    async with session() as a, session() as b:
        from_text = await a.generate(PROMPT, max_tokens=8)
        prompt = (await a.token_ids())[: from_text.usage.prompt_tokens]
        assert (await b.generate(prompt, max_tokens=8)).token_ids == from_text.token_ids


async def test_going_on_is_as_if_it_had_never_stopped(session: OpenSession) -> None:
    async with session() as a, session() as b:
        whole = await a.generate(PROMPT, max_tokens=18, ignore_eos=True)
        parts = [await b.generate(PROMPT if n == 0 else None, max_tokens=6, ignore_eos=True) for n in range(3)]
        assert [token for part in parts for token in part.token_ids] == whole.token_ids
        assert [part.usage.prompt_tokens for part in parts[1:]] == [0, 0]
        assert parts[2].usage.computed_tokens < parts[2].usage.session_tokens  # KV was kept


async def test_a_second_prompt_extends_the_session(session: OpenSession) -> None:
    async with session() as s:
        await s.generate(PROMPT, max_tokens=4)
        before = await s.token_ids()
        r = await s.generate([5, 6, 7], max_tokens=4)
        tokens = await s.token_ids()
        assert tokens[: len(before) + 3] == [*before, 5, 6, 7]
        assert tokens[len(before) + 3 :] == r.token_ids


async def test_truncating_goes_back(session: OpenSession) -> None:
    async with session() as s:
        first = await s.generate(PROMPT, max_tokens=12, ignore_eos=True)
        tokens = await s.token_ids()
        await s.truncate(len(tokens) - 8)
        assert await s.token_ids() == tokens[:-8]
        again = await s.generate(max_tokens=8, ignore_eos=True)
        assert again.token_ids == first.token_ids[-8:]
        await s.truncate(0)
        assert await s.token_ids() == []
        assert (await s.generate(PROMPT, max_tokens=12, ignore_eos=True)).token_ids == first.token_ids


async def test_forward(session: OpenSession, model: djinn.ModelInfo) -> None:
    async with session() as a, session() as b:
        first = await a.forward([1, 2, 3])
        second = await a.forward([4])
        whole = await b.forward([1, 2, 3, 4])
        assert (first.shape, second.shape, whole.shape) == ((3, model.vocab), (1, model.vocab), (4, model.vocab))
        assert whole.dtype == np.float32
        assert np.isfinite(whole).all()
        np.testing.assert_allclose(np.concatenate([first, second]), whole, atol=1e-3)
        assert await a.token_ids() == [1, 2, 3, 4]


async def test_the_likeliest_logit_is_the_greedy_token(session: OpenSession) -> None:
    async with session() as a, session() as b:
        logits = await a.forward([100, 200, 300])
        assert (await b.generate([100, 200, 300], max_tokens=1)).token_ids == [int(logits[-1].argmax())]
        assert (await a.generate(max_tokens=1)).token_ids == [int(logits[-1].argmax())]


async def test_logits_belong_to_the_caller(session: OpenSession) -> None:
    async with session() as s:
        first = await s.forward([1, 2])
        kept = first.copy()
        await s.forward([3, 4])
        np.testing.assert_array_equal(first, kept)
        first[:] = 0
    assert not first.any()


async def test_prompt_logprobs_are_those_of_the_logits(session: OpenSession) -> None:
    async with session() as a, session() as b:
        tokens = [(7 * n) % 500 + 5 for n in range(40)]
        logits = await a.forward(tokens)
        wanted = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
        first, rest = tokens[:25], tokens[25:]
        told = []
        for part, most in ((first, 0), (rest, 2)):
            reply = await b.generate(part, max_tokens=most, prompt_logprobs=3)
            assert reply.prompt_logprobs is not None and len(reply.prompt_logprobs) == len(part)
            told += reply.prompt_logprobs
        assert told[0] is None
        for place in range(1, 40):
            entry, row = told[place], wanted[place - 1]
            assert entry is not None and abs(entry.token - row[tokens[place]]) < 1e-4
            likeliest = np.argsort(-row, kind="stable")[:3]
            assert [*entry.top] == likeliest.tolist()
            assert np.allclose([*entry.top.values()], row[likeliest], atol=1e-4)


async def test_token_bytes_are_those_of_the_text(session: OpenSession) -> None:
    async with session() as a, session() as b:
        options = {"max_tokens": 6, "logprobs": 2, "token_bytes": True, "ignore_eos": True}
        r = await a.generate(PROMPT, prompt_logprobs=1, **options)
        tokens = await a.token_ids()
        assert b"".join(r.token_bytes[token] for token in tokens) == (PROMPT + r.text).encode()
        assert r.prompt_logprobs is not None
        for entry in (*r.logprobs, *r.prompt_logprobs):
            assert entry is None or r.token_bytes.keys() >= entry.top.keys()
        stream = b.stream(PROMPT, **options)
        told = [piece async for piece in stream]
        assert sum(len(piece.token_bytes) for piece in told) == len(stream.result.token_bytes)
        assert b"".join(stream.result.token_bytes[token] for token in r.token_ids) == r.text.encode()


async def test_n_outputs_of_one_prompt_that_is_computed_once(session: OpenSession, daemon_address: str) -> None:
    options = {"max_tokens": 8, "temperature": 1.0, "logprobs": 0}
    async with session() as s, session() as alone:
        before = {each.id for each in djinn.sessions(address=daemon_address)}
        reply = await s.generate(PROMPT, n=3, seed=7, **options)
        assert {each.id for each in djinn.sessions(address=daemon_address)} == before, "forks are closed"
        tokens = await s.token_ids()
        prompt = tokens[: reply.usage.prompt_tokens]
        assert len(reply.choices) == 3 and reply.choices[0] is reply
        assert tokens == [*prompt, *reply.token_ids], "the first one is the session's"
        for number, choice in enumerate(reply.choices):
            await alone.truncate(0)
            assert choice.token_ids == (await alone.generate(PROMPT, seed=7 + number, **options)).token_ids
            assert len(choice.logprobs) == len(choice.token_ids)
            assert choice.usage.prompt_tokens == len(prompt)
            assert choice.usage.computed_tokens <= (len(prompt) + 1 if number == 0 else 1)
        more = await s.generate(n=2, **options)
        assert more.usage.prompt_tokens == 0 and len(more.choices) == 2
        assert (await s.generate(max_tokens=1)).choices[0].usage.session_tokens == len(await s.token_ids())


async def test_n_that_cannot_be_leaves_the_session_as_it_was(session: OpenSession) -> None:
    async with session() as s:
        await s.generate(PROMPT, max_tokens=2)
        before = await s.token_ids()
        for options in (
            {"n": 0},
            {"n": 129},
            {"n": True},
            {"n": 2, "max_tokens": 1 << 20},
            {"n": 2, "min_tokens": 500},
        ):
            with pytest.raises(djinn.InvalidRequest):
                await s.generate("more", **options)
            assert await s.token_ids() == before
        with pytest.raises(djinn.InvalidRequest, match="n is for generate and chat of a session"):
            s.stream("more", n=2)


async def test_logprobs(session: OpenSession) -> None:
    async with session() as a, session() as b:
        r = await a.generate(PROMPT, max_tokens=5, logprobs=3, ignore_eos=True)
        assert [len(entry.top) for entry in r.logprobs] == [3] * 5
        for token, entry in zip(r.token_ids, r.logprobs, strict=True):
            assert entry.top[token] == pytest.approx(entry.token, abs=1e-4)
            assert entry.token == max(entry.top.values())  # greedy
        stream = b.stream(PROMPT, max_tokens=5, logprobs=3, ignore_eos=True)
        await collected(stream)
        assert [entry.top.keys() for entry in stream.result.logprobs] == [entry.top.keys() for entry in r.logprobs]


async def test_a_stop_string_ends_the_output_and_is_no_part_of_it(session: OpenSession) -> None:
    async with session() as a, session() as b:
        text = (await a.generate(PROMPT, max_tokens=40, ignore_eos=True)).text
        stop = text[6:9]
        r = await b.generate(PROMPT, max_tokens=40, ignore_eos=True, stop=stop)
        assert (r.text, r.finish_reason) == (text[: text.index(stop)], "stop")


async def test_a_stop_token_ends_the_output(session: OpenSession) -> None:
    async with session() as a, session() as b:
        tokens = (await a.generate(PROMPT, max_tokens=20, ignore_eos=True)).token_ids
        r = await b.generate(PROMPT, max_tokens=20, ignore_eos=True, stop_token_ids=[tokens[5]])
        assert r.finish_reason == "stop"
        assert r.token_ids == tokens[: tokens.index(tokens[5]) + 1]


async def test_the_seed_decides(session: OpenSession) -> None:
    async def sampled(seed: int | None) -> list[int]:
        async with session() as s:
            return (await s.generate(PROMPT, max_tokens=24, temperature=1.5, seed=seed, ignore_eos=True)).token_ids

    assert await sampled(1) == await sampled(1)
    assert await sampled(1) != await sampled(2)
    assert await sampled(None) != await sampled(None)


async def test_two_streams_read_in_turn(session: OpenSession) -> None:
    async with session() as alone:
        expected = [(await alone.generate(PROMPT, max_tokens=16)).text]
        await alone.truncate(0)
        expected.append((await alone.generate(OTHER, max_tokens=16)).text)
    async with session() as a, session() as b:
        streams = [a.stream(PROMPT, max_tokens=16), b.stream(OTHER, max_tokens=16)]
        texts = ["", ""]
        live = {0, 1}
        while live:
            for place in sorted(live):
                try:
                    texts[place] += (await anext(streams[place])).text
                except StopAsyncIteration:
                    live.remove(place)
        assert texts == expected


async def test_many_at_once_each_as_if_alone(session: OpenSession) -> None:
    prompts = [PROMPT, OTHER, "x = ", "class A:\n    def __init__(self", "# comment\n", "return "]

    async def one(prompt: str) -> list[int]:
        async with session() as s:
            return (await s.generate(prompt, max_tokens=16, temperature=0.7, seed=3)).token_ids

    alone = [await one(prompt) for prompt in prompts]
    assert await asyncio.gather(*map(one, prompts)) == alone


async def consistent(s: Session, prompt_tokens: list[int], whole: list[int]) -> None:
    """The session holds the prompt and a beginning of the output, which did not come to its end, and goes on with the
    rest, as far as that is known."""
    tokens = await s.token_ids()
    done = tokens[len(prompt_tokens) :]
    assert tokens[: len(prompt_tokens)] == prompt_tokens
    assert 1 <= len(done) < NO_END
    known = min(len(done), len(whole) - 4)
    assert done[:known] == whole[:known]
    await s.truncate(len(prompt_tokens) + known)
    r = await s.generate(max_tokens=4, ignore_eos=True)
    assert r.token_ids == whole[known : known + 4]


async def test_leaving_a_stream_stops_the_work_and_leaves_the_session_usable(session: OpenSession) -> None:
    async with session() as alone, session() as s:
        whole = await alone.generate(PROMPT, max_tokens=40, ignore_eos=True)
        prompt = (await alone.token_ids())[: whole.usage.prompt_tokens]
        stream = s.stream(PROMPT, max_tokens=NO_END, ignore_eos=True)
        await anext(stream)
        stream.close()
        await consistent(s, prompt, whole.token_ids)


async def test_a_cancelled_task_leaves_the_session_usable(daemon_address: str) -> None:
    async with (
        djinn.AsyncSession("djinn-tiny", address=daemon_address) as alone,
        djinn.AsyncSession("djinn-tiny", address=daemon_address) as s,
    ):
        whole = await alone.generate(PROMPT, max_tokens=40, ignore_eos=True)
        prompt = (await alone.token_ids())[: whole.usage.prompt_tokens]
        running = asyncio.create_task(collected(s.stream(PROMPT, max_tokens=NO_END, ignore_eos=True)))
        while not await asyncio.to_thread(tokens_of, s.id, daemon_address):
            pass
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await consistent(s, prompt, whole.token_ids)


def tokens_of(session: str, address: str) -> int:
    """How many tokens the session has beyond its prompt's, seen from outside."""
    (info,) = [info for info in djinn.sessions(address=address) if info.id == session]
    return max(0, info.tokens - 10)
