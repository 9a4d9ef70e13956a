"""What an engine is to compute for a session: an output, or logits.

Between finding the engine and sending to it, which making the run does, nothing is awaited: the engine lives, and has
the session as it is here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from djinn_client.protocol import Forward, Generate
from djinnd.messages import Resume
from djinnd.server import admission
from djinnd.server.call_breakpoints import breakpoints_of
from djinnd.server.capturing import capturing_of
from djinnd.server.client import Answer, Call
from djinnd.server.models import Models
from djinnd.server.queueing import Place, Queue
from djinnd.server.runs import ForwardRun, GenerateRun
from djinnd.server.sessions import TOKEN_BYTES, SessionRecord, SessionTable
from djinnd.text.encoder import TextRules
from djinnd.text.vocabulary import Vocabulary

LONG_TEXT = 2 << 10  # characters; such a prompt takes a millisecond and is tokenised in a thread


class WorkRequests:
    def __init__(self, sessions: SessionTable, models: Models, queue: Queue) -> None:
        self._sessions = sessions
        self._models = models
        self._queue = queue

    async def generate(self, call: Call, request: Generate) -> Answer:
        session = self._sessions.lookup(request.session, call.client)
        with self._admitted(call, session) as place:
            info, vocabulary = (await self._models.once_ready(session)).described
            admission.check_generate(request, info, vocabulary.lacking)
            prompt = await _prompt(request, vocabulary, first=not session.tokens)
            admission.check_prompt(prompt, len(session.tokens), info, room=min(request.max_tokens, 1))
            self._sessions.expect_journal(session.tenant, TOKEN_BYTES * len(prompt))
            breaking = breakpoints_of(request, len(prompt), session, info)
            capturing = capturing_of(request, len(prompt), session, info)
            stop_tokens = _stop_tokens(request, vocabulary)
            engine = await self._models.ready(session.model)
            session.expect_model()
            if request.resume and session.is_paused:
                session.is_paused = False
                engine.send(Resume(session.id))
            run = GenerateRun(
                call, session, engine, place, request, prompt, stop_tokens, vocabulary, capturing, breaking
            )
            call.client.started(call, run)
            return await run.done

    async def forward(self, call: Call, request: Forward) -> Answer:
        session = self._sessions.lookup(request.session, call.client)
        with self._admitted(call, session) as place:
            info, _ = (await self._models.once_ready(session)).described
            admission.check_forward(request, len(session.tokens), info)
            self._sessions.expect_journal(session.tenant, TOKEN_BYTES * len(request.token_ids))
            engine = await self._models.ready(session.model)
            session.expect_model()
            run = ForwardRun(call, session, engine, place, request)
            call.client.started(call, run)
            return await run.done

    @contextmanager
    def _admitted(self, call: Call, session: SessionRecord) -> Iterator[Place]:
        """Before any work is done for it. Raises SessionBusy, QuotaExceeded, Busy."""
        with session.in_use(call):
            session.tenant.expect_tokens(call.received)
            with self._queue.place(session.user, call.received) as place:
                yield place


async def _prompt(request: Generate, vocabulary: Vocabulary, first: bool) -> list[int]:
    if request.text is None:
        return request.token_ids or []
    rules = TextRules(first, request.parse_special, request.prefix_space)
    if len(request.text) > LONG_TEXT:
        return await asyncio.to_thread(vocabulary.encode, request.text, rules)
    return vocabulary.encode(request.text, rules)


def _stop_tokens(request: Generate, vocabulary: Vocabulary) -> frozenset[int]:
    """Raises InvalidRequest."""
    stops = frozenset(request.stop_token_ids)
    if request.stop:
        stops |= vocabulary.stop_tokens(request.stop, request.skip_special_tokens)
    return stops if request.ignore_eos else stops | vocabulary.eos
