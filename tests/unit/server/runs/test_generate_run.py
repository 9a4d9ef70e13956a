"""A run between the engine's events and the client's replies."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from djinn_client.errors import DjinnError
from djinn_client.protocol import Generate, Piece
from djinnd.config import Limits, Quota
from djinnd.messages import CancelRun, Finished, Truncate
from djinnd.server.models.text import TokenizedPrompt
from djinnd.server.probe_lists.breakpoint_list import BreakpointList, CallSpan
from djinnd.server.quotas.latency import Latencies, SessionLatency
from djinnd.server.quotas.queueing import Queue
from djinnd.server.quotas.quotas import Rule, Tenant
from djinnd.server.runs.generate_run import GenerateRun
from djinnd.server.sessions.session import SessionRecord
from djinnd.server.whitebox.call_breakpoints import CallBreakpoints
from djinnd.text.detokenizer import Detokenizer
from djinnd.text.reader import TextReader

PROMPT = [5, 6]


class Journal:
    """Records, at each change, how many tokens the session has."""

    def __init__(self) -> None:
        self.heard: list[int] = []

    def changed(self, session: SessionRecord) -> None:
        self.heard.append(len(session.tokens))


class Stage:
    """A run of a session that has had one call, with recorders of its effects."""

    def __init__(self, text: Any, calls: int = 1, runs: int = 1, **request: Any) -> None:
        """`calls` is the number of calls under way; the engine has `runs` of them, among them this one."""
        self.journal, self.sent, self.pieces = Journal(), [], []
        self.did: list[str] = []
        latency = SessionLatency({"agent": Latencies()})
        tenant = Tenant(1000, Rule("", Quota()), 0.0, Limits)
        self.session = SessionRecord("s", 1000, "m", "agent", 0.0, 0.0, self.journal, latency, tenant)  # type: ignore[arg-type]
        self.session.tokens += [7]
        client = SimpleNamespace(unfinished=calls)
        call = SimpleNamespace(received=0.0, send=self.pieces.append, client=client)
        engine = SimpleNamespace(
            run=lambda run, **fields: 1, send=self.sent.append, flush=lambda: self.did.append("flushed"), runs=runs
        )
        queue = Queue(8, 0.0)
        with queue.place(1000, 0.0) as place:
            message = Generate(id=9, session="s", token_ids=PROMPT, **request)
            reads = SimpleNamespace(
                reader=lambda tokens, rules: self.did.append("read text") or TextReader(text(tokens), rules.stops),
                answer=lambda *_: None,
            )
            self.run = GenerateRun(
                call,
                self.session,
                engine,
                place,
                message,
                TokenizedPrompt(PROMPT),
                reads,  # type: ignore[arg-type]
                None,
                None,
                CallBreakpoints([], None, CallSpan(1, 3, 3, 9), BreakpointList(), 8),
            )

    def end(self) -> None:
        generated = len(self.session.tokens) - 1 - len(PROMPT)
        self.run.finished(Finished(1, "length", len(self.session.tokens), generated, len(PROMPT)))


class Panic(BaseException):
    """Stands for a panic of the tokenizer's Rust code."""


class Panicking:
    """Text that fails at its beginning, at a token, or at the end."""

    def __init__(self, at: str) -> None:
        self.at = at
        if at == "beginning":
            raise Panic

    def feed_all(self, tokens: list[int]) -> str:
        if self.at == "token":
            raise Panic
        return "a"

    def finish(self) -> str:
        raise Panic


@pytest.mark.parametrize(
    ("calls", "runs", "did"),
    [(1, 1, ["flushed", "read text"]), (3, 3, ["flushed", "read text"]), (3, 2, ["read text"])],
)
def test_the_engine_gets_a_run_at_once_unless_others_are_about_to_follow(calls: int, runs: int, did: list[str]) -> None:
    async def main() -> None:
        assert Stage(lambda tokens: None, calls, runs).did == did

    asyncio.run(main())


def test_tokens_are_journalled_when_the_client_is_told_of_them(tiny: Any) -> None:
    async def play(**request: Any) -> Stage:
        stage = Stage(Detokenizer(tiny).stream, **request)
        for at, token in enumerate(tiny.encode("def greet(name)").ids):
            stage.run.token(token, None, float(at))
        return stage

    async def main() -> None:
        collected = await play()
        assert collected.journal.heard == []
        collected.end()
        assert collected.journal.heard == [len(collected.session.tokens)]
        assert collected.run.done.result().message.text == "def greet(name)"  # type: ignore[attr-defined]
        streamed = await play(stream=True)
        assert len(streamed.journal.heard) == len(streamed.pieces) > 2
        assert all(isinstance(piece, Piece) for piece in streamed.pieces)

    asyncio.run(main())


def test_the_last_token_is_journalled_and_read_before_the_engine_has_ended_the_run(tiny: Any) -> None:
    async def main() -> None:
        tokens = tiny.encode("def greet(name)").ids
        streams: list[Any] = []

        def text(session: list[int]) -> Any:
            streams.append(Detokenizer(tiny).stream(session))
            return streams[0]

        stage = Stage(text, max_tokens=len(tokens))
        for token in tokens[:-1]:
            stage.run.token(token, None, 0.0)
        assert stage.journal.heard == []
        stage.run.token(tokens[-1], None, 0.0)
        assert stage.journal.heard == [len(stage.session.tokens)]
        stage.session.journalled = len(stage.session.tokens)  # as at the end of this turn of the loop
        streams[0].feed_all = None
        stage.end()
        assert len(stage.journal.heard) == 1, "nothing is new"
        assert stage.run.done.result().message.text == "def greet(name)"  # type: ignore[attr-defined]

    asyncio.run(main())


@pytest.mark.parametrize("at", ["beginning", "token", "end"])
@pytest.mark.parametrize("stream", [False, True])
def test_failed_text_undoes_the_call_and_nothing_else(at: str, stream: bool) -> None:
    async def main() -> None:
        stage = Stage(lambda tokens: Panicking(at), stream=stream)
        stage.run.started(0.0, False)
        for number in range(3):
            stage.run.token(number, None, float(number))
        stage.end()
        with pytest.raises(DjinnError, match="the daemon failed to turn a token into text"):
            await stage.run.done
        assert stage.session.tokens == [7]
        assert Truncate("s", 1) in stage.sent
        assert at != "beginning" or CancelRun(1) in stage.sent

    asyncio.run(main())
