"""Handlers of requests that compute: Generate and Forward.

Nothing is awaited between finding the engine and creating the run, which sends to it. So the engine is alive, and has
the session as it is here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass

from djinn_client.errors import DjinnError, InvalidRequest
from djinn_client.protocol import Forward, Generate, Generated
from djinn_client.protocol.fields.bounds import pack
from djinn_client.protocol.fields.conversations import Conversation
from djinnd.messages import Resume, Truncate
from djinnd.server.adapters.table import AdapterTable
from djinnd.server.admission import admission
from djinnd.server.admission.captures import capture_of
from djinnd.server.loading.models import ModelTable
from djinnd.server.models.model import ServedModel
from djinnd.server.models.text import ModelText, TokenizedPrompt
from djinnd.server.quotas.queueing import Queue, QueuePlace
from djinnd.server.requests.conversations import ConversationRequests
from djinnd.server.requests.notes import notes_of, notes_on
from djinnd.server.runs.failover import RunFailover
from djinnd.server.runs.generate_run import GenerateRun
from djinnd.server.runs.runs import ForwardRun
from djinnd.server.sessions.common_prefix import common_prefix
from djinnd.server.sessions.records import RecordTable
from djinnd.server.sessions.session import TOKEN_BYTES, SessionRecord
from djinnd.server.sessions.sessions import SessionTable
from djinnd.server.text.formats import Formats, Guide, expect_no_stops
from djinnd.server.text.texts import Texts
from djinnd.server.whitebox.call_breakpoints import breakpoints_of
from djinnd.server.wire.call import ClientCall, FinalReply
from djinnd.server.wire.request_handler import handles


@dataclass(eq=False)
class WorkRequests:
    """The requests that an engine computes for a session."""

    _sessions: SessionTable
    _models: ModelTable
    _adapters: AdapterTable
    _texts: Texts
    _queue: Queue
    _failover: RunFailover
    records: InitVar[RecordTable]

    def __post_init__(self, records: RecordTable) -> None:
        self._formats = Formats(self._texts)
        self._conversations = ConversationRequests(self._sessions, self._models, self._adapters, records)

    @handles(Generate, is_new_work=True, journal="grows")
    async def generate(self, call: ClientCall, request: Generate) -> FinalReply:
        if request.conversation is not None:
            return await self._converse(call, request, request.conversation)
        if not request.session:
            raise InvalidRequest("a call needs a session, or a conversation", field="session")
        session = self._sessions.lookup(request.session, call.client)
        with self._admitted(call, session) as place:
            model = await self._models.once_ready(session)
            prompt = await self._prompt(session.user, request, model, len(session.tokens))
            kept = len(session.tokens)
            if request.chat is not None:
                kept = common_prefix(session.tokens, prompt.tokens)
                prompt = prompt._replace(tokens=prompt.tokens[kept:])
            guide = await self._formats.guide(model.described[1], session.user, request, prompt)
            return await self._run(call, session, place, request, model, prompt, kept, guide)

    async def _converse(self, call: ClientCall, request: Generate, conversation: Conversation) -> FinalReply:
        """Generates for a conversation. The daemon chooses the session when the prompt is in tokens."""
        if request.session:
            raise InvalidRequest("give a session or a conversation, not both", field="conversation")
        with self._placed(call) as place:
            model, adapter = await self._conversations.model(call, conversation)
            before = self._conversations.before(call, request, conversation, model, adapter)
            prompt = await self._prompt(call.client.user, request, model, len(before))
            prompt = prompt._replace(tokens=[*before, *prompt.tokens])
            guide = await self._formats.guide(model.described[1], call.client.user, request, prompt)
            _, chosen = await self._adapters.chosen(model, adapter)
            model = self._models.find_open(model.name, call.client)
            is_scored, tokens = request.prompt_logprobs is not None, prompt.tokens
            with self._conversations.session(call, conversation, model, chosen, tokens, is_scored) as (session, kept):
                rest = prompt._replace(tokens=prompt.tokens[kept:])
                answer = await self._run(call, session, place, request, model, rest, kept, guide)
                return self._conversations.told(session, conversation, len(prompt.tokens), answer)

    async def _prompt(self, user: int, request: Generate, model: ServedModel, before: int) -> TokenizedPrompt:
        """Tokenises the request's prompt, for a session that has `before` tokens. For a chat, these are all tokens of
        the session. Raises the request's faults."""
        info, text = model.described
        admission.check_generate(request, info, text.lacking)
        least = 0 if request.max_tokens == 0 else 1
        if request.chat is not None:
            before, ends, room = 0, text.turn_ends, info.max_context - least
            prompt = await self._texts.prepare_chat(text, user, request.chat, request.stop, room)
        else:
            ends, room = text.eos, max(0, info.max_context - before - least)
            prompt = await self._texts.prepare(text, user, request, starts=not before, room=room)
        is_text = request.text is not None or request.chat is not None
        admission.check_prompt(prompt.tokens, before, info, room=least, is_text=is_text)
        request.max_tokens = admission.most_tokens(request, len(prompt.tokens), before, info)
        stop_tokens = frozenset(request.stop_token_ids) | (frozenset() if request.ignore_eos else ends)
        return prompt._replace(stop_tokens=prompt.stop_tokens | stop_tokens)

    async def _run(
        self,
        call: ClientCall,
        session: SessionRecord,
        place: QueuePlace,
        request: Generate,
        model: ServedModel,
        prompt: TokenizedPrompt,
        kept: int,
        guide: Guide | None,
    ) -> FinalReply:
        """Runs the call behind the first `kept` tokens of the session. The other tokens are cut when an engine is
        ready."""
        (info, text), count = model.described, len(prompt.tokens)
        self._sessions.make_room(session.user, TOKEN_BYTES * count)
        self._sessions.expect_journal(session.tenant, TOKEN_BYTES * count)
        breakpoints = breakpoints_of(request, count, session, info, kept)
        if request.prompt_logprobs is not None:
            request.prompt_logprobs = min(request.prompt_logprobs, info.vocab)
            admission.check_scored(request.prompt_logprobs, count, bool(breakpoints.stops))
        expect_no_stops(request, guide, has_breakpoints=bool(breakpoints.stops))
        capture = capture_of(request, count, session, info, kept)
        if capture is not None:
            call.reserve_window(capture.nbytes)
        engine = await self._adapters.engine_for(session)
        session.expect_model()
        worker = self._texts.reading_worker(text, session.user)
        if request.resume and session.is_paused:
            session.is_paused = False
            engine.send(Resume(session.id))
        if kept < len(session.tokens):
            session.cut(kept)
            engine.send(Truncate(session.id, kept))
        run = GenerateRun(
            call, session, engine, place, request, prompt, text, worker, capture, breakpoints, guide, notes_of(info)
        )
        try:
            answer = await self._failover.answer(call, run)
        except DjinnError as error:
            model.calls.failed(session.user, error.code)
            raise
        reply = answer.message
        if isinstance(reply, Generated):
            model.calls.ended(session.user, reply)
            if request.token_bytes and request.prompt_logprobs is not None:
                await self._name_prompt(reply, text, session, prompt.tokens)
            ends = text.eos | text.turn_ends
            reply.notes = notes_on(request, reply, session.tokens, ends, text.told.has_chat, info)
        return answer

    async def _name_prompt(
        self, reply: Generated, text: ModelText, session: SessionRecord, prompt: Sequence[int]
    ) -> None:
        """Adds to the reply the bytes of the prompt's tokens, and of the tokens in its log probabilities. Raises
        TextFailed, QuotaExceeded; then the session is as it was before the call."""
        ids = b"" if reply.prompt_logprobs is None else reply.prompt_logprobs.ids
        try:
            reply.token_bytes = await self._texts.name(text, session.user, pack([*prompt]) + ids) | reply.token_bytes
        except DjinnError:
            length = reply.usage.session_tokens - reply.usage.generated_tokens - len(prompt)
            session.cut(length)
            self._models.tell(session, Truncate(session.id, length))
            raise

    @handles(Forward, is_new_work=True, journal="grows")
    async def forward(self, call: ClientCall, request: Forward) -> FinalReply:
        session = self._sessions.lookup(request.session, call.client)
        with self._admitted(call, session) as place:
            info, _ = (await self._models.once_ready(session)).described
            admission.check_forward(request, len(session.tokens), info)
            call.reserve_window(len(request.token_ids) * info.vocab * 4)
            self._sessions.expect_journal(session.tenant, TOKEN_BYTES * len(request.token_ids))
            engine = await self._adapters.engine_for(session)
            session.expect_model()
            run = ForwardRun(call, session, engine, place, request)
            return await self._failover.answer(call, run)

    @contextmanager
    def _admitted(self, call: ClientCall, session: SessionRecord) -> Iterator[QueuePlace]:
        """Reserves the session and a place in the queue before any work is done. Raises SessionBusy, QuotaExceeded,
        Busy."""
        call.client.expect_class(session.priority)
        with session.in_use(call), self._placed(call, session) as place:
            yield place

    @contextmanager
    def _placed(self, call: ClientCall, session: SessionRecord | None = None) -> Iterator[QueuePlace]:
        """Takes a place in the queue, for the session's user, or without a session for the caller. Raises
        QuotaExceeded, Busy."""
        tenant = call.client.tenant if session is None else session.tenant
        tenant.expect_tokens(call.received)
        with self._queue.place(tenant.user, call.received) as place:
            yield place
