"""Vectors of texts: the mean, or the last row, of the final norm's output for their tokens.

Each input is run in a session of its own that captures the final norm's output (see captures.py), and is closed then;
the sessions of one request run together: AT_ONCE of them, or as many as the user may open. Rows are added up in a
thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from djinn_client.errors import Cancelled, InvalidRequest, ProtocolError
from djinn_client.protocol import Embed, Embedded, Generate, Generated
from djinn_client.protocol.fields.bounds import unpack
from djinn_client.protocol.fields.edits import Captured
from djinnd.server.adapters.adapter import Adapter
from djinnd.server.adapters.table import AdapterTable
from djinnd.server.loading.loader import open_in
from djinnd.server.loading.models import ModelTable
from djinnd.server.models.model import ServedModel
from djinnd.server.requests.vectors import Pooling, Vector, joined, pooled
from djinnd.server.sessions.sessions import SessionTable
from djinnd.server.wire.call import ClientCall, FinalReply
from djinnd.server.wire.request_handler import handles

AT_ONCE = 16  # inputs of one request that run together
MOST_BYTES = 32 << 20  # of the vectors of one reply: half the default of limits.connection_bytes_per_user
POINT = "ln_final.hook_normalized"

Prompt = str | list[int]


class _Input(NamedTuple):
    vector: Vector
    tokens: int


@dataclass(eq=False)
class EmbedRequests:
    """Answers Embed requests. `generate` runs a call on a session, as for a client."""

    _sessions: SessionTable
    _models: ModelTable
    _adapters: AdapterTable
    _generate: Callable[[ClientCall, Generate], Awaitable[FinalReply]]

    @handles(Embed, is_new_work=True, journal="grows")
    async def embed(self, call: ClientCall, request: Embed) -> Embedded:
        inputs = _inputs(request)
        model = await self._models.once_loaded(request.model, call)
        if model.info is None or model.info.points is None or not model.info.points.norm:
            raise InvalidRequest(f"{model.name} has no final norm whose output could be a vector", field="model")
        call.reserve_window(_nbytes(len(inputs), model.info.points.width))
        pooling = request.pooling or model.source.pooling
        adapter = await self._adapters.named(model, self._models.split(request.model)[1], call.client)
        found = await self._all(call, model, adapter, inputs, pooling)
        vectors, width = await asyncio.to_thread(joined, [each.vector for each in found], request.normalize)
        tokens = [each.tokens for each in found]
        return Embedded(id=call.id, vectors=vectors, width=width, tokens=tokens, pooling=pooling)

    async def _all(
        self, call: ClientCall, model: ServedModel, adapter: Adapter | None, inputs: Sequence[Prompt], pooling: Pooling
    ) -> list[_Input]:
        """Runs all inputs. If one fails, or the call is cancelled, the others end within a step."""
        at_once = max(1, min(AT_ONCE, self._sessions.openable(call.client.user)))
        room, parts = asyncio.Semaphore(at_once), dict[asyncio.Task[Any], ClientCall]()

        async def run(prompt: Prompt) -> _Input:
            async with room:
                part = call.part()
                parts[part.task] = part
                return await self._run(part, model, adapter, prompt, pooling)

        tasks = [asyncio.create_task(run(prompt)) for prompt in inputs]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                if not task.done():
                    parts.get(task, task).cancel()
            await asyncio.wait(tasks)
        failed = [error for task in tasks if not task.cancelled() and (error := task.exception())]
        if failed:
            raise min(failed, key=lambda error: isinstance(error, Cancelled))  # the cause before the cancelled ones
        return [task.result() for task in tasks]

    async def _run(
        self, call: ClientCall, model: ServedModel, adapter: Adapter | None, prompt: Prompt, pooling: Pooling
    ) -> _Input:
        engine, chosen = await self._adapters.chosen(model, adapter)
        self._models.find_open(model.name, call.client)  # its share may have ended meanwhile
        priority, is_shared = call.client.class_for(None), model.share is not None
        session = self._sessions.open(call.client, model.name, priority, shared=is_shared, adapter=chosen)
        open_in(engine, session)
        text, token_ids = (prompt, None) if isinstance(prompt, str) else (None, prompt)
        request = Generate(
            id=call.id, session=session.id, text=text, token_ids=token_ids, max_tokens=0, capture=[POINT]
        )
        try:
            reply, fds = await self._generate(call, request)
            assert isinstance(reply, Generated)
            if reply.captured is None:
                raise Cancelled("the request was cancelled")
            return _Input(await _vector(fds, reply.captured, pooling), reply.usage.prompt_tokens)
        finally:
            call.release_window()
            self._sessions.close(session)


def _inputs(request: Embed) -> Sequence[Prompt]:
    """Raises InvalidRequest."""
    try:
        inputs: list[Prompt] = [*request.texts, *map(unpack, request.packed)]
    except ProtocolError as error:
        raise InvalidRequest(error.message, field="packed") from error
    if not inputs or (request.texts and request.packed):
        raise InvalidRequest("give the inputs as texts or as token ids, and at least one", field="texts")
    if not all(inputs):
        raise InvalidRequest(f"input {[bool(each) for each in inputs].index(False)} is empty", field="texts")
    return inputs


def _nbytes(inputs: int, width: int) -> int:
    """Bytes of the reply's vectors. Raises InvalidRequest if they are too many for one reply."""
    nbytes = 4 * inputs * width
    if nbytes > MOST_BYTES:
        told = f"{inputs:,} vectors of {width:,} numbers are {nbytes:,} bytes, and a reply has at most {MOST_BYTES:,}"
        raise InvalidRequest(f"{told}: send at most {MOST_BYTES // (4 * width):,} inputs at a time", field="texts")
    return nbytes


async def _vector(fds: Sequence[int], captured: Captured, pooling: Pooling) -> Vector:
    """Pools the rows in a thread, which closes the window also if the caller is cancelled before the thread begins."""
    return await asyncio.shield(asyncio.to_thread(pooled, fds, captured, pooling))
