"""Functions of clients that run at breakpoints, for users that the configuration names.

They run in a process of the user. The server keeps no code: a function exists as long as the process that has it. If it
is gone, the client is told, and sends it again.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Collection, Iterable

from djinn_client import protocol
from djinn_client.errors import FunctionNotFound, InvalidRequest, NotPermitted
from djinn_client.transport.shm import SEALS
from djinn_client.whitebox.functions import MAX_CODE, PYTHON
from djinnd import config
from djinnd.jobs.sandbox import CallFunctions, Key, LoadFunction
from djinnd.server.engines.commands import python_module
from djinnd.server.loading.models import ModelTable
from djinnd.server.sessions.session import SessionRecord
from djinnd.server.sessions.sessions import SessionTable
from djinnd.server.whitebox.edit_requests import EditRequests
from djinnd.server.whitebox.function_process import FunctionProcess
from djinnd.server.wire.call import ClientCall
from djinnd.server.wire.request_handler import handles

_COMMAND = python_module("djinnd.functions")


class FunctionRequests:
    """Owns the intervention processes, at most one per user."""

    def __init__(
        self,
        rules: config.Functions,
        sessions: SessionTable,
        models: ModelTable,
        groups_of: Callable[[int], Collection[int]],
    ) -> None:
        self._rules = rules
        self._allowed: dict[int, bool] = {}  # a cache: groups may be known to a distant server only
        self._sessions = sessions
        self._editing = EditRequests(sessions, models)
        self._groups_of = groups_of
        self._processes: dict[int, FunctionProcess] = {}  # by user; accept functions
        self._ending: set[FunctionProcess] = set()  # accept no functions any more, and have not ended yet

    @handles(protocol.AddFunction, is_new_work=True)
    async def add(self, call: ClientCall, request: protocol.AddFunction) -> None:
        session = self._permitted(call, request.session)
        point = _point_of(request, session)
        with session.in_use(call):
            process = self._process_of(session.user)
            function = (session.id, request.breakpoint)
            process.functions.add(function)
            try:
                await process.ask(LoadFunction(function, point, request.code), self._rules.seconds)
            except BaseException:
                self._forget({function})
                raise

    @handles(protocol.RunFunctions, is_new_work=True, journal="grows")
    async def run(self, call: ClientCall, request: protocol.RunFunctions) -> None:
        """Runs functions at the session's hit. Their edits are checked as if the client had sent them."""
        session = self._permitted(call, request.session)
        with session.in_use(call):
            hit = session.breakpoints.hit
            if hit is None:
                raise InvalidRequest("the session is at no hit, at which functions could run", field="session")
            _expect_sealed(call.fds)
            functions = [(session.id, number) for number in request.breakpoints]
            process = self._process_that_has(functions, session)
            run, room = CallFunctions(functions, hit, request.captured), self._sessions.limits.edit_bytes_per_session
            for edit in await process.ask(run, self._rules.seconds, call.fds[0], room):
                await self._editing.admit(session, edit)

    def follow(self, rules: config.Functions) -> None:
        """Applies new rules, and looks up the users' groups again."""
        self._rules = rules
        self._allowed.clear()

    def breakpoints_ended(self, session: SessionRecord, numbers: Iterable[int]) -> None:
        self._forget({(session.id, number) for number in numbers})

    def session_closed(self, session: SessionRecord) -> None:
        process = self._processes.get(session.user)
        if process is not None:
            self._forget({function for function in process.functions if function[0] == session.id})

    async def close(self) -> None:
        """Ends all processes, and returns when they are gone."""
        for process in [*self._processes.values(), *self._ending]:
            await process.end()

    # --- permissions and processes ------------------------------------------------------------------------------------

    def _permitted(self, call: ClientCall, session_id: str) -> SessionRecord:
        """The session, if its user may run functions in it. Raises NotPermitted, SessionNotFound."""
        session = self._sessions.lookup(session_id, call.client)
        if session.user != call.client.user:
            raise NotPermitted(f"session {session.id} is another user's: only that user's functions run in it")
        rules, user = self._rules, session.user
        if user not in self._allowed:
            groups = self._groups_of(user) if rules.groups else ()
            self._allowed[user] = user in rules.users or not set(rules.groups).isdisjoint(groups)
        if self._allowed[user]:
            return session
        raise NotPermitted(
            f"the daemon runs functions only of Unix users that its configuration names, and user {user} is not in "
            "functions.users, nor in a group of functions.groups: ask its administrator to add you, and to reload; or "
            "use intervene(point, function, local=True), which runs it in this process",
            setting="functions.users",
            user=user,
        )

    def _process_of(self, user: int) -> FunctionProcess:
        process = self._processes.get(user)
        if process is None:
            process = FunctionProcess(_COMMAND, user, self._rules.memory, self._ended)
            self._processes[user] = process
        return process

    def _process_that_has(self, functions: list[Key], session: SessionRecord) -> FunctionProcess:
        """The process that has all these functions. Raises FunctionNotFound."""
        process = self._processes.get(session.user)
        if process is None or not functions or not process.functions.issuperset(functions):
            raise FunctionNotFound(
                f"session {session.id} has no functions at breakpoints {[number for _, number in functions]}, or has "
                "none any more: their process has ended, or the daemon was restarted: intervene again",
                session=session.id,
            )
        return process

    def _forget(self, functions: set[Key]) -> None:
        """Drops functions. A process that has none left is killed."""
        for process in list(self._processes.values()):
            process.forget(functions)
            if not process.functions:
                process.kill()

    def _ended(self, process: FunctionProcess) -> None:
        del self._processes[process.user]
        self._ending.add(process)
        process.gone.add_done_callback(lambda _: self._ending.discard(process))


def _point_of(request: protocol.AddFunction, session: SessionRecord) -> str:
    """The point of the function's breakpoint. Raises InvalidRequest if the code is too large or of another Python."""
    if len(request.code) > MAX_CODE:
        told = f"the function takes {len(request.code):,} bytes, and the limit is {MAX_CODE:,}"
        raise InvalidRequest(told, field="code", bytes=len(request.code), limit=MAX_CODE)
    if request.python != PYTHON:
        raise InvalidRequest(
            f"the function was pickled by {request.python[:64]}, and the daemon runs {PYTHON}: byte code fits one "
            "version: run the client in the same, or intervene with local=True",
            field="python",
        )
    for breakpoint in session.breakpoints.breakpoints:
        if breakpoint.number == request.breakpoint:
            return breakpoint.point
    raise InvalidRequest(f"the session has no breakpoint {request.breakpoint}", field="breakpoint")


def _expect_sealed(fds: list[int]) -> None:
    """Checks that there is one descriptor, of sealed memory: the process must get no access to anything else. Raises
    InvalidRequest."""
    try:
        (fd,) = fds
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
    except (ValueError, OSError):
        sealed = False
    if not sealed:
        raise InvalidRequest("this request needs one descriptor: the window that came with the hit", field="fds")
