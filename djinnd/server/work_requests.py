"""What an engine is to compute for a session: an output, or logits.

Between finding the engine and sending to it, which making the run does, nothing is awaited: the engine lives, and has
the session as it is here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from djinn_client.bounds import pack
from djinn_client.errors import DjinnError
from djinn_client.protocol import Forward, Generate, Generated
from djinnd.messages import Resume, Truncate
from djinnd.server import admission
from djinnd.server.call_breakpoints import breakpoints_of
from djinnd.server.capturing import capturing_of
from djinnd.server.carrying import Carrying
from djinnd.server.client import Answer, Call
from djinnd.server.models import Models
from djinnd.server.queueing import Place, Queue
from djinnd.server.runs import ForwardRun, GenerateRun
from djinnd.server.sessions import TOKEN_BYTES, SessionRecord, SessionTable
from djinnd.server.texts import ModelText, Texts


class WorkRequests:
    def __init__(self, sessions: SessionTable, models: Models, texts: Texts, queue: Queue, carrying: Carrying) -> None:
        self._sessions = sessions
        self._models = models
        self._texts = texts
        self._queue = queue
        self._carrying = carrying

    async def generate(self, call: Call, request: Generate) -> Answer:
        session = self._sessions.lookup(request.session, call.client)
        with self._admitted(call, session) as place:
            info, text = (await self._models.once_ready(session)).described
            admission.check_generate(request, info, text.lacking)
            least = 0 if request.max_tokens == 0 else 1
            room = info.max_context - len(session.tokens) - least
            prompt, stop_tokens = await self._texts.prepare(
                text, session.user, request, starts=not session.tokens, room=max(0, room)
            )
            stop_tokens |= frozenset(request.stop_token_ids) | (frozenset() if request.ignore_eos else text.eos)
            is_text = request.text is not None
            admission.check_prompt(prompt, len(session.tokens), info, room=least, is_text=is_text)
            request.max_tokens = admission.most_tokens(request, len(prompt), len(session.tokens), info)
            self._sessions.expect_journal(session.tenant, TOKEN_BYTES * len(prompt))
            breaking = breakpoints_of(request, len(prompt), session, info)
            if request.prompt_logprobs is not None:
                request.prompt_logprobs = min(request.prompt_logprobs, info.vocab)
                admission.check_scored(request.prompt_logprobs, len(prompt), bool(breaking.stops))
            capturing = capturing_of(request, len(prompt), session, info)
            if capturing is not None:
                call.reserve_window(capturing.nbytes)
            engine = await self._models.ready(session.model)
            session.expect_model()
            worker = self._texts.reading_worker(text, session.user)
            if request.resume and session.is_paused:
                session.is_paused = False
                engine.send(Resume(session.id))
            run = GenerateRun(
                call, session, engine, place, request, prompt, stop_tokens, text, worker, capturing, breaking
            )
            answer = await self._carrying.answer(call, run)
            if request.token_bytes and request.prompt_logprobs is not None and isinstance(answer.message, Generated):
                await self._name_prompt(answer.message, text, session, prompt)
            return answer

    async def _name_prompt(
        self, reply: Generated, text: ModelText, session: SessionRecord, prompt: Sequence[int]
    ) -> None:
        """Says what the prompt's tokens stand for, and those that its log probabilities name. Raises TextFailed,
        QuotaExceeded, and then the session is as it was before the call."""
        ids = b"" if reply.prompt_logprobs is None else reply.prompt_logprobs.ids
        try:
            reply.token_bytes = await self._texts.name(text, session.user, pack([*prompt]) + ids) | reply.token_bytes
        except DjinnError:
            length = reply.usage.session_tokens - reply.usage.generated_tokens - len(prompt)
            session.cut(length)
            self._models.tell(session, Truncate(session.id, length))
            raise

    async def forward(self, call: Call, request: Forward) -> Answer:
        session = self._sessions.lookup(request.session, call.client)
        with self._admitted(call, session) as place:
            info, _ = (await self._models.once_ready(session)).described
            admission.check_forward(request, len(session.tokens), info)
            call.reserve_window(len(request.token_ids) * info.vocab * 4)
            self._sessions.expect_journal(session.tenant, TOKEN_BYTES * len(request.token_ids))
            engine = await self._models.ready(session.model)
            session.expect_model()
            run = ForwardRun(call, session, engine, place, request)
            return await self._carrying.answer(call, run)

    @contextmanager
    def _admitted(self, call: Call, session: SessionRecord) -> Iterator[Place]:
        """Before any work is done for it. Raises SessionBusy, QuotaExceeded, Busy."""
        call.client.expect_class(session.priority)
        with session.in_use(call):
            session.tenant.expect_tokens(call.received)
            with self._queue.place(session.user, call.received) as place:
                yield place
