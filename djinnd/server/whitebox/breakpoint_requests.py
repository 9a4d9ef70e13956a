"""Handlers that add, end and list breakpoints of sessions. The session and the journal store them. Each call brings the
engine the breakpoints that it may reach: see breakpoint_list.py."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from djinn_client import protocol
from djinn_client.protocol import BreakpointAdded, Breakpoints
from djinnd.server.admission import admission
from djinnd.server.admission import breakpoints as breakpoint_admission
from djinnd.server.loading.models import ModelTable
from djinnd.server.probe_lists.edit_list import PART_BYTES
from djinnd.server.sessions.sessions import SessionTable
from djinnd.server.whitebox.functions import FunctionRequests
from djinnd.server.wire.call import ClientCall
from djinnd.server.wire.request_handler import handles

log = logging.getLogger("djinnd.server")


@dataclass(eq=False)
class BreakpointRequests:
    _sessions: SessionTable
    _models: ModelTable
    _functions: FunctionRequests

    @handles(protocol.AddBreakpoint, is_new_work=True, journal="grows")
    async def add(self, call: ClientCall, request: protocol.AddBreakpoint) -> BreakpointAdded:
        session = self._sessions.lookup(request.session, call.client)
        with session.in_use(call):
            info, _ = (await self._models.once_ready(session)).described
            added = breakpoint_admission.breakpoint_of(request, session.breakpoints, info)
            breakpoint_admission.check_room(added, session.breakpoints, self._sessions.limits)
            if not session.salt:
                self._sessions.expect_journal(session.tenant, PART_BYTES * added.count)
            session.add_breakpoint(added)
        log.debug("breakpoint_added session=%s breakpoint=%d block=%d", session.id, added.number, added.block)
        return BreakpointAdded(id=call.id, breakpoint=added.number)

    @handles(protocol.EndBreakpoints, journal="changes")
    async def end(self, call: ClientCall, request: protocol.EndBreakpoints) -> None:
        session = self._sessions.lookup(request.session, call.client)
        session.expect_idle()
        there = [each.number for each in session.breakpoints.breakpoints]
        numbers = admission.numbers_to_end(request.breakpoints, there, session.breakpoints.given, "breakpoint")
        if numbers:
            session.end_breakpoints(numbers)
            self._functions.breakpoints_ended(session, numbers)

    @handles(protocol.ListBreakpoints)
    async def list_breakpoints(self, call: ClientCall, request: protocol.ListBreakpoints) -> Breakpoints:
        session = self._sessions.lookup(request.session, call.client)
        infos = [each.info for each in session.breakpoints.breakpoints]
        return Breakpoints(id=call.id, breakpoints=infos)
