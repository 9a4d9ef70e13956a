"""Finds the session for a call without one, cuts it to the prefix that it shares with the prompt, and keeps it
afterwards.

sessions/conversations.py chooses the session; this module changes the session table and the engine. Nothing is awaited
between the choice and the call's `in_use`, so that no two calls get the same session.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from djinn_client.errors import InvalidRequest
from djinn_client.protocol import CLASSES, Class, Generate, Generated
from djinn_client.protocol.fields.conversations import Conversation
from djinn_client.protocol.fields.signals import MAX_TOOL_NAME
from djinnd.messages import SetClass, Signal, Truncate
from djinnd.server.adapters.adapter import Adapter
from djinnd.server.adapters.table import AdapterTable
from djinnd.server.admission import edits as edit_admission
from djinnd.server.loading.loader import open_in
from djinnd.server.loading.models import ModelTable
from djinnd.server.models.model import ServedModel
from djinnd.server.sessions.common_prefix import common_prefix
from djinnd.server.sessions.conversations import kept_again
from djinnd.server.sessions.records import RecordTable, tokens_of
from djinnd.server.sessions.session import SessionRecord
from djinnd.server.sessions.session_adapter import SessionAdapter
from djinnd.server.sessions.sessions import SessionTable
from djinnd.server.wire.call import ClientCall, FinalReply


class ChosenSession(NamedTuple):
    """The session, and the number of its first tokens that the prompt begins with; its other tokens must be cut."""

    session: SessionRecord
    kept: int


@dataclass(eq=False)
class ConversationRequests:
    _sessions: SessionTable
    _models: ModelTable
    _adapters: AdapterTable
    _records: RecordTable

    async def model(self, call: ClientCall, conversation: Conversation) -> tuple[ServedModel, Adapter | None]:
        """Finds the conversation's model and adapter, and loads the model if need be. Raises as for a session that is
        opened."""
        conversation.validate()
        call.client.tenant.expect_class(call.client.class_for(conversation.priority))
        model = await self._models.once_loaded(conversation.model, call)
        _, adapter = self._models.split(conversation.model)
        return model, await self._adapters.named(model, adapter, call.client)

    def before(
        self,
        call: ClientCall,
        request: Generate,
        conversation: Conversation,
        model: ServedModel,
        adapter: Adapter | None,
    ) -> list[int]:
        """Returns the tokens before a text or token prompt: the tokens of the record from which the call continues. A
        chat has none before it, because it brings all messages. Raises NotFound, InvalidRequest."""
        if not conversation.after:
            return []
        name = model.name if adapter is None else f"{model.name}:{adapter.name}"
        record = self._records.of_model(call.client.user, conversation.after, name)
        if request.chat is not None:
            return []
        if not record.tokens:
            told = f"record {conversation.after} has no tokens: go on from it with a chat of all its messages"
            raise InvalidRequest(told, field="conversation.after")
        return tokens_of(record)

    @contextmanager
    def session(
        self,
        call: ClientCall,
        conversation: Conversation,
        model: ServedModel,
        adapter: SessionAdapter | None,
        prompt: list[int],
        is_scored: bool,
    ) -> Iterator[ChosenSession]:
        """Puts a session in use by the call. Model and adapter are ready. `is_scored`: the call wants log probabilities
        of the whole prompt, so all of it is computed. Raises as for a session that is opened."""
        sessions = self._sessions
        at = self._at_record(call, conversation) if conversation.after else None
        key, user = conversation.key, call.client.user
        chosen, kept = sessions.conversations.choose(user, model.name, key, prompt, at, adapter)
        session = chosen or self._open(call, conversation, model, adapter)
        try:
            with session.in_use(call):
                sessions.keep(session, kept)
                with self._kept_as_it_is_left(session):
                    self._reclassify(call, session, conversation)
                    common = common_prefix(session.tokens, prompt)
                    self._expect_fit(session, model, common)
                    yield ChosenSession(session, 0 if is_scored else common)
        finally:
            has_ended = model.share is not None and model.share.ended
            if has_ended or not session.tokens:
                sessions.close(session)

    @contextmanager
    def _kept_as_it_is_left(self, session: SessionRecord) -> Iterator[None]:
        """Updates the description of the session after a failure, which may leave fewer tokens than the prompt. So the
        next call, often a repetition, finds the session."""
        try:
            yield
        except BaseException:
            if session.kept is not None and not session.is_closed:
                self._sessions.keep(session, kept_again(session.kept.key, session.kept.prompt, session.tokens))
            raise

    def told(self, session: SessionRecord, conversation: Conversation, prompt: int, answer: FinalReply) -> FinalReply:
        """Completes the reply of a call that has ended: it names the session, and counts all tokens of the prompt."""
        reply = answer.message
        assert isinstance(reply, Generated)
        reply.session = session.id
        reply.usage = msgspec.structs.replace(reply.usage, prompt_tokens=prompt)
        self._wait(session, conversation, reply)
        return answer

    def _at_record(self, call: ClientCall, conversation: Conversation) -> SessionRecord | None:
        """The kept session that the record was made of, if it still is at that very point."""
        record = self._records.find(call.client.user, conversation.after)
        session = self._sessions.get(record.origin)
        if session is None or session.kept is None or not session.is_free:
            return None
        return session if session.tokens == tokens_of(record) else None

    def _open(
        self, call: ClientCall, conversation: Conversation, model: ServedModel, adapter: SessionAdapter | None
    ) -> SessionRecord:
        priority = call.client.class_for(conversation.priority)
        is_shared = model.share is not None
        session = self._sessions.open(call.client, model.name, priority, is_shared, attached=False, adapter=adapter)
        if model.engine is not None:
            open_in(model.engine, session)
        return session

    def _reclassify(self, call: ClientCall, session: SessionRecord, conversation: Conversation) -> None:
        """Sets the session's class: the class that the call asks for, or else the class it had, if the caller may use
        it."""
        highest = call.client.class_for(conversation.priority)
        kept: Class = max(session.priority, highest, key=CLASSES.index)
        priority = conversation.priority or kept
        if priority != session.priority:
            self._sessions.set_class(session, priority)
            self._models.tell(session, SetClass(session.id, session.priority))

    def _expect_fit(self, session: SessionRecord, model: ServedModel, kept: int) -> None:
        """Checks a session that an earlier daemon has left, perhaps with another checkpoint: it keeps the prompt's
        tokens only. Raises InvalidRequest for edits that do not fit."""
        if session.is_restored:
            edit_admission.check_fit(session.edits, model.described[0])
            session.cut(kept)
            self._models.tell(session, Truncate(session.id, kept))
            session.is_restored = False

    def _wait(self, session: SessionRecord, conversation: Conversation, reply: Generated) -> None:
        """Lets the session's pages leave the device if its next call comes later: the caller says so, or has functions
        to call first. The wait is learnt by the key, or else by the function."""
        calls = [] if reply.message is None else reply.message.tool_calls
        if not conversation.expected_wait_s and not calls:
            return
        learnt = f"key {conversation.key}" if conversation.key else f"function {calls[0].name}" if calls else ""
        session.woken_at = 0.0
        self._models.tell(session, Signal(session.id, True, conversation.expected_wait_s, learnt[:MAX_TOOL_NAME]))
