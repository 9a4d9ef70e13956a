"""What clients have done to activations of their sessions: edits are added, ended and told.

An edit is the session's, as its tokens are: the record has it, the journal hears of it, and the engine that has the
session is told. A model that has been ready need not be now: the next engine is told the session as it is.
"""

from __future__ import annotations

import logging

from djinn_client import protocol
from djinn_client.protocol import Done, EditAdded, Edits
from djinnd.core.edits import now
from djinnd.messages import AddEdit, EndEdits
from djinnd.server import edit_admission
from djinnd.server.client import Answer, Call
from djinnd.server.edit_list import nbytes_of
from djinnd.server.models import Models
from djinnd.server.sessions import SessionRecord, SessionTable

log = logging.getLogger("djinnd.server")


class Editing:
    """Between finding the engine and sending to it nothing is awaited: see handlers.py."""

    def __init__(self, sessions: SessionTable, models: Models) -> None:
        self._sessions = sessions
        self._models = models

    async def add(self, call: Call, request: protocol.AddEdit) -> Answer:
        session = self._sessions.lookup(request.session, call.client)
        with session.in_use(call):
            return Answer(EditAdded(id=call.id, edit=await self.admit(session, request)))

    async def admit(self, session: SessionRecord, request: protocol.AddEdit) -> int:
        """The edit's number. For who has the session in use; which session the request names is not looked at. Raises
        InvalidRequest, QuotaExceeded, and what getting the model ready raises."""
        edit_admission.check_form(request)
        info, _ = (await self._models.once_ready(session)).described
        edit = edit_admission.edit_of(request, session.edits, len(session.tokens), session.fixed, info)
        names = list(dict.fromkeys(request.points))
        replaced = session.edits.replaced_by(edit)
        edit_admission.check_room(edit, names, session.edits.without(replaced), self._sessions.limits)
        if not session.salt:
            self._sessions.expect_journal(session.tenant, nbytes_of(edit, names))
        session.add_edit(edit, names)
        self._models.tell(session, AddEdit(session.id, edit))
        if replaced:  # from its first position on, and so altogether
            session.end_edits(replaced, edit.first)
            self._models.tell(session, EndEdits(session.id, replaced, edit.first))
        log.debug("edit_added session=%s edit=%d op=%s points=%d", session.id, edit.number, edit.op, len(edit.points))
        return edit.number

    async def end(self, call: Call, request: protocol.EndEdits) -> Answer:
        session = self._sessions.lookup(request.session, call.client)
        session.expect_idle()
        numbers = edit_admission.numbers_to_end(request, session.edits)
        if numbers:
            at = now(len(session.tokens))
            session.end_edits(numbers, at)
            self._models.tell(session, EndEdits(session.id, numbers, at))
            log.debug("edits_ended session=%s edits=%d at=%d", session.id, len(numbers), at)
        return Answer(Done(id=call.id))

    async def list_edits(self, call: Call, request: protocol.ListEdits) -> Answer:
        session = self._sessions.lookup(request.session, call.client)
        return Answer(Edits(id=call.id, edits=session.edits.infos()))
