"""The daemon waits for a client that does not read, within bounds, and other clients do not."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import djinn_client as djinn
from djinn_client.protocol import Failure, Generate, Generated, OpenSession, Piece, SessionOpened
from tests.conftest import MODEL
from tests.support.bystander import Bystander
from tests.support.daemon import Daemon, wait_for
from tests.support.models import tiny_model
from tests.support.served import Wire

SESSIONS = 8
TOKENS = 400  # with their logprobs about twice the room in the sockets and the daemon's queue for a connection
PROMPTS = [f"def function_{n}(" for n in range(SESSIONS)]


async def all_of(address: str, tokens: int) -> list[list[int]]:
    """The continuation of each prompt, through clients that read."""

    async def one(prompt: str) -> list[int]:
        async with djinn.AsyncSession(MODEL, address=address) as s:
            return (await s.generate(prompt, max_tokens=tokens, ignore_eos=True)).token_ids

    return await asyncio.gather(*map(one, PROMPTS))


def test_a_stream_that_is_not_read_is_held(daemon: Daemon) -> None:
    expected = asyncio.run(all_of(daemon.address, TOKENS))
    with daemon.client() as client, Wire(daemon.address) as slow:
        slow.send(*(OpenSession(id=n, model=MODEL) for n in range(SESSIONS)))
        opened = [slow.reply() for _ in PROMPTS]
        mine = {reply.id: reply.session.id for reply in opened if isinstance(reply, SessionOpened)}
        for n, prompt in enumerate(PROMPTS):
            request = Generate(id=n, session=mine[n], text=prompt, max_tokens=TOKENS, ignore_eos=True)
            request.logprobs, request.stream = 20, True
            slow.send(request)

        def infos() -> list[djinn.SessionInfo]:
            return [info for info in client.sessions() if info.id in mine.values()]

        wait_for(lambda: all(info.state == "held" for info in infos()))
        held = {info.id: info.tokens for info in infos()}
        with Bystander(daemon.address):
            assert asyncio.run(all_of(daemon.address, 32)) == [tokens[:32] for tokens in expected]
        assert {info.id: info.tokens for info in infos()} == held
        assert all(info.state == "held" for info in infos())

        texts: dict[int, str] = defaultdict(str)
        tokens: dict[int, list[int]] = defaultdict(list)
        ended = 0
        while ended < SESSIONS:
            reply = slow.reply()
            assert isinstance(reply, Piece | Generated), reply
            assert len(reply.logprobs) == len(reply.token_ids)
            texts[reply.id] += reply.text
            tokens[reply.id] += reply.token_ids
            ended += isinstance(reply, Generated)
        assert [tokens[n] for n in range(SESSIONS)] == expected
        tokenizer = Tokenizer.from_file(str(Path(tiny_model()) / "tokenizer.json"))
        for n, prompt in enumerate(PROMPTS):
            assert prompt + texts[n] == tokenizer.decode(tokenizer.encode(prompt).ids + tokens[n])
        for session in mine.values():
            client.close_session(session)


@pytest.mark.smoke
def test_a_held_client_that_disconnects(daemon: Daemon) -> None:
    with daemon.client() as client:
        with Wire(daemon.address) as slow:
            opened = slow.ask(OpenSession(id=1, model=MODEL))
            assert isinstance(opened, SessionOpened)
            others = [slow.ask(OpenSession(id=n, model=MODEL)) for n in range(2, SESSIONS + 1)]
            assert not any(isinstance(reply, Failure) for reply in others)
            mine = [reply.session.id for reply in [opened, *others] if isinstance(reply, SessionOpened)]
            for n, session in enumerate(mine):
                request = Generate(id=100 + n, session=session, text=PROMPTS[n], max_tokens=1900, ignore_eos=True)
                request.logprobs, request.stream = 20, True
                slow.send(request)
            wait_for(lambda: {i.state for i in client.sessions() if i.id in mine} == {"held"})
        wait_for(lambda: {i.state for i in client.sessions() if i.id in mine} == {"detached"})
        for session in mine:
            with djinn.Session.attach(session, address=daemon.address) as s:
                assert len(s.generate(max_tokens=2, ignore_eos=True).token_ids) == 2
