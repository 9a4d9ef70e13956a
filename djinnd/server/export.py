"""Sessions that leave and come: their tokens, and their KV in windows, which the engine copies.

Where KV comes from a client, nobody can say what it is the KV of. Its session has a salt of its own, so that its pages
are found by no other session; it is not in the journal, and is lost with the engine that has it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Awaitable, Callable

from djinn_client.errors import Cancelled, DjinnError, InvalidRequest, ModelMismatch
from djinn_client.kv_layout import KvLayout
from djinn_client.protocol import ExportSession, ImportSession, ModelInfo, SessionExported, SessionOpened
from djinn_client.shm import FUTURE_WRITE, SEALS
from djinnd.messages import ExportKv, Finished, ImportKv, KvExported
from djinnd.server import admission
from djinnd.server.client import Answer, Call
from djinnd.server.engine_client import EngineClient
from djinnd.server.models import Model, Models, OnLoading, open_in
from djinnd.server.runs import SessionRun
from djinnd.server.sessions import SessionRecord, SessionTable
from djinnd.server.status import Status

SALT_BYTES = 16


class Exporting:
    """`model_of`: see Handlers."""

    def __init__(
        self,
        sessions: SessionTable,
        models: Models,
        status: Status,
        model_of: Callable[[SessionRecord], Awaitable[Model]],
    ) -> None:
        self._sessions = sessions
        self._models = models
        self._status = status
        self._model_of = model_of

    async def export(self, call: Call, request: ExportSession) -> Answer:
        session = self._sessions.lookup(request.session, call.client)
        with session.in_use(call):
            info, _ = (await self._model_of(session)).described
            reply = SessionExported(id=call.id, token_ids=list(session.tokens), fingerprint=info.fingerprint)
            if not request.kv:
                return Answer(reply)
            if not session.tokens:
                raise InvalidRequest("the session is empty: it has no KV")
            engine = await self._models.ready(session.model)
            session.expect_model()
            reply.kv = _layout_of(info)
            run = ExportRun(call, session, engine, reply)
            call.client.started(call, run)
            return await run.done

    async def import_(self, call: Call, request: ImportSession, window: int | None, telling: OnLoading) -> Answer:
        """`window`: the client's descriptor, which stays the caller's; None: none came."""
        if (request.kv is not None) != (window is not None):
            raise InvalidRequest("KV comes with the descriptor of a window, and without KV there is none", field="kv")
        model = self._models.find_open(request.model, call.client)
        self._sessions.expect_room(call.client.user)  # before a model is loaded in vain
        engine = await self._models.ready(model.name, telling)
        model = self._models.find_open(model.name, call.client)  # who shares it may have ended that meanwhile
        info, _ = model.described
        _check(request, info)
        salt = b"" if window is None else secrets.token_bytes(SALT_BYTES)
        ours = -1 if window is None or request.kv is None else open_window(window, request.kv.nbytes(request.kv_tokens))
        try:
            session = self._sessions.open(call.client, model.name, request.priority, model.share is not None, salt)
        except BaseException:
            if ours >= 0:
                os.close(ours)
            raise
        session.tokens = request.token_ids
        session.changed()
        if ours < 0:
            open_in(engine, session)
            return Answer(SessionOpened(id=call.id, session=self._status.session_info(session)))
        with session.in_use(call):
            run = ImportRun(call, session, engine, self._sessions, request.kv_tokens, ours)
            call.client.started(call, run)
            await run.done
        return Answer(SessionOpened(id=call.id, session=self._status.session_info(session)))


class ExportRun(SessionRun):
    """`reply` lacks only what the engine will say. Cancelled while KV is computed, it ends with Cancelled; while KV is
    copied, as if it were not."""

    def __init__(self, call: Call, session: SessionRecord, engine: EngineClient, reply: SessionExported) -> None:
        super().__init__(call, session, engine)
        self._reply = reply
        self._started = True
        self._number = engine.run(self, ExportKv, session=session.id)

    def exported(self, message: KvExported, fd: int) -> None:
        self._reply.kv_tokens = message.tokens
        self.done.set_result(Answer(self._reply, [fd]))


class ImportRun(SessionRun):
    """Takes the window's descriptor. Unless it is well, the session goes with it."""

    def __init__(
        self,
        call: Call,
        session: SessionRecord,
        engine: EngineClient,
        sessions: SessionTable,
        kv_tokens: int,
        window: int,
    ) -> None:
        super().__init__(call, session, engine)
        self._sessions = sessions
        self._cancelled = False
        self._started = True
        self._number = engine.run(
            self,
            ImportKv,
            [window],
            session=session.id,
            model=session.model,
            tenant=session.user,
            priority=session.priority,
            tokens=session.tokens,
            kv_tokens=kv_tokens,
            salt=session.salt,
        )

    def cancel(self) -> None:
        """The copy goes on to its end, which is near."""
        self._cancelled = True

    def hold(self, held: bool) -> None:
        self._held = held

    def finished(self, message: Finished) -> None:
        if self._cancelled:
            self.failed(Cancelled("the request was cancelled"))
        else:
            self.done.set_result(Answer(SessionExported(id=0, token_ids=[], fingerprint="")))

    def failed(self, error: DjinnError) -> None:
        self.done.set_exception(error)
        self._sessions.close(self._session)


def open_window(fd: int, nbytes: int) -> int:
    """A descriptor of this daemon's own, for reading, of a client's window with so many bytes. What must hold before an
    engine reads it is the kernel's word: all of its memory is there, and stays there whatever the client does.

    Raises InvalidRequest."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise InvalidRequest("KV is handed over in a memfd, and this descriptor is none", field="kv") from error
    if seals & SEALS != SEALS or not seals & (fcntl.F_SEAL_WRITE | FUTURE_WRITE):
        raise InvalidRequest(
            "a window of KV must be sealed against shrinking, growing and (future) writing (seals "
            f"{SEALS | FUTURE_WRITE:#x}); its seals are {seals:#x}",
            seals=seals,
        )
    stat = os.fstat(fd)
    if stat.st_size != nbytes:
        raise InvalidRequest(
            f"the window has {stat.st_size:,} bytes; the KV that was announced has {nbytes:,}",
            bytes=stat.st_size,
            needed=nbytes,
        )
    if stat.st_blocks * 512 < nbytes:
        raise InvalidRequest(
            f"the window has memory for {stat.st_blocks * 512:,} of {nbytes:,} bytes: reserve all of it before you "
            "seal it (posix_fallocate)",
            bytes=stat.st_blocks * 512,
            needed=nbytes,
        )
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidRequest(f"the window cannot be opened for reading: {error}", field="kv") from error


def _check(request: ImportSession, info: ModelInfo) -> None:
    """Raises ModelMismatch, InvalidRequest, TokenOutOfRange, PromptTooLong."""
    if request.fingerprint not in ("", info.fingerprint):
        raise ModelMismatch(
            f"the session is of a model with the fingerprint {request.fingerprint[:64]}, {info.name} has "
            f"{info.fingerprint}: load the model that it was saved with, or read its tokens and begin anew",
            saved=request.fingerprint[:64],
            model=info.fingerprint,
        )
    if request.token_ids:
        admission.check_prompt(request.token_ids, 0, info, room=0)
    if request.kv is None:
        return
    if not 0 < request.kv_tokens <= len(request.token_ids):
        raise InvalidRequest(
            f"KV of {request.kv_tokens:,} tokens came with {len(request.token_ids):,} tokens: every token whose KV is "
            "handed over must be named",
            field="kv_tokens",
        )
    if request.kv != _layout_of(info):
        raise InvalidRequest(
            f"{info.name} has {_layout_of(info)}; what was handed over has {request.kv}: hand over its tokens only",
            field="kv",
        )


def _layout_of(info: ModelInfo) -> KvLayout:
    return KvLayout(info.dtype, info.blocks, info.page_size, info.kv_heads, info.head_dim)  # type: ignore[arg-type]
