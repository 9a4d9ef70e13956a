"""Handlers that add, end and list edits of the activations of sessions.

An edit belongs to its session, as tokens do: the session and the journal store it, and the session's engine is told. If
no engine has the model, the next engine receives the edits when it opens the session.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from djinn_client import protocol
from djinn_client.protocol import EditAdded, Edits
from djinnd.core.edits import now
from djinnd.messages import AddEdit, EndEdits
from djinnd.server.admission import admission
from djinnd.server.admission import edits as edit_admission
from djinnd.server.loading.models import ModelTable
from djinnd.server.probe_lists.edit_list import nbytes_of
from djinnd.server.sessions.session import SessionRecord
from djinnd.server.sessions.sessions import SessionTable
from djinnd.server.wire.call import ClientCall
from djinnd.server.wire.request_handler import handles

log = logging.getLogger("djinnd.server")


@dataclass(eq=False)
class EditRequests:
    """The requests about edits. Nothing is awaited between finding the engine and sending to it: see handlers.py."""

    _sessions: SessionTable
    _models: ModelTable

    @handles(protocol.AddEdit, is_new_work=True, journal="grows")
    async def add(self, call: ClientCall, request: protocol.AddEdit) -> EditAdded:
        session = self._sessions.lookup(request.session, call.client)
        with session.in_use(call):
            return EditAdded(id=call.id, edit=await self.admit(session, request))

    async def admit(self, session: SessionRecord, request: protocol.AddEdit) -> int:
        """Adds an edit to a session that the caller has in use, and returns its number. Ignores the session that the
        request names. Raises InvalidRequest, QuotaExceeded, and the errors of getting the model ready."""
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
        if replaced:  # from its first position on, and so completely
            session.end_edits(replaced, edit.first)
            self._models.tell(session, EndEdits(session.id, replaced, edit.first))
        log.debug("edit_added session=%s edit=%d op=%s points=%d", session.id, edit.number, edit.op, len(edit.points))
        return edit.number

    @handles(protocol.EndEdits, journal="changes")
    async def end(self, call: ClientCall, request: protocol.EndEdits) -> None:
        session = self._sessions.lookup(request.session, call.client)
        session.expect_idle()
        numbers = admission.numbers_to_end(request.edits, session.edits.unended, session.edits.given, "edit")
        if numbers:
            at = now(len(session.tokens))
            session.end_edits(numbers, at)
            self._models.tell(session, EndEdits(session.id, numbers, at))
            log.debug("edits_ended session=%s edits=%d at=%d", session.id, len(numbers), at)

    @handles(protocol.ListEdits)
    async def list_edits(self, call: ClientCall, request: protocol.ListEdits) -> Edits:
        session = self._sessions.lookup(request.session, call.client)
        return Edits(id=call.id, edits=session.edits.infos())
