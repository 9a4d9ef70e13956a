"""Calls of Generate: one output, or several at once. The first of several outputs of a prompt begins alone. The others
begin after its first token and find the prompt's pages by their keys, so the prompt is computed once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import reduce
from operator import or_
from typing import NamedTuple

from msgspec.structs import replace

from djinn_client.protocol import Generate, Generated, Piece
from djinnd.gateway.daemon.link import Link
from djinnd.gateway.entry.request import HttpRequest
from djinnd.gateway.http.errors import HttpError

MAX_OUTPUTS = 256  # of one HTTP request: prompts times n
SIDE_BY_SIDE = 32  # outputs of one request that run at once
WAITING_REPLIES = 64  # of one request, that wait to be sent on


class Output(NamedTuple):
    """One output that is wanted. choice: its index in the answer. prompt: the index of its prompt."""

    choice: int
    prompt: int
    wanted: Generate


async def generate(request: HttpRequest, model: str, wanted: Generate) -> Generated:
    """Runs in the call's conversation; without one, in a session that is closed after it."""
    async with request.pool.link() as link, _placed(link, model, wanted) as placed:
        reply = await link.call(placed, Generated)
    request.notes.update(reply.notes)
    _ended(request, model, reply)
    return reply


async def stream(request: HttpRequest, model: str, wanted: Generate) -> AsyncGenerator[Piece | Generated]:
    """Yields each Piece, and last the Generated, of an output that runs where `generate` runs it. Closing the generator
    ends the work in the daemon."""
    async with (
        request.pool.link() as link,
        _placed(link, model, wanted) as placed,
        aclosing(link.stream(replace(placed, stream=True))) as replies,
    ):
        async for reply in replies:
            request.notes.update(reply.notes)
            if isinstance(reply, Generated):
                _ended(request, model, reply)
            yield reply


@asynccontextmanager
async def _placed(link: Link, model: str, wanted: Generate) -> AsyncIterator[Generate]:
    """A call with its session or its conversation. A session is closed after it; a conversation the daemon keeps."""
    if wanted.conversation is not None or wanted.session:
        yield wanted
    else:
        async with link.session(model) as session:
            yield replace(wanted, session=session)


async def generate_all(request: HttpRequest, model: str, outputs: Sequence[Output]) -> list[Generated]:
    """The results in the order of `outputs`. An error of one output ends all."""
    if len(outputs) == 1:
        return [await generate(request, model, outputs[0].wanted)]
    pieces: dict[int, list[Piece]] = {output.choice: [] for output in outputs}
    results: dict[int, Generated] = {}
    async with aclosing(stream_all(request, model, outputs)) as replies:
        async for index, reply in replies:
            if isinstance(reply, Piece):
                pieces[index].append(reply)
            else:
                results[index] = _whole(pieces.pop(index), reply)
    return [results[output.choice] for output in outputs]


async def stream_all(
    request: HttpRequest, model: str, outputs: Sequence[Output]
) -> AsyncGenerator[tuple[int, Piece | Generated]]:
    """The replies in the order in which they come, each with the index of its choice."""
    if len(outputs) == 1:
        async with aclosing(stream(request, model, outputs[0].wanted)) as replies:
            async for reply in replies:
                yield outputs[0].choice, reply
        return
    merged = _Merged(request, model, outputs)
    try:
        for _ in outputs:
            index, reply = await merged.next()
            while isinstance(reply, Piece):
                yield index, reply
                index, reply = await merged.next()
            yield index, reply
    finally:
        await merged.close()


class _Merged:
    """Several outputs under way, a task each. Their replies meet in one queue."""

    def __init__(self, request: HttpRequest, model: str, outputs: Sequence[Output]) -> None:
        self._replies: asyncio.Queue[tuple[int, Piece | Generated | Exception]] = asyncio.Queue(WAITING_REPLIES)
        self._places = asyncio.Semaphore(SIDE_BY_SIDE)
        self._begun: dict[int, asyncio.Event] = {}  # by prompt: set when its first output has a token, or has ended
        self._tasks = [asyncio.create_task(self._run(request, model, output)) for output in outputs]

    async def next(self) -> tuple[int, Piece | Generated]:
        """The next reply. Raises the error of any output."""
        index, reply = await self._replies.get()
        if isinstance(reply, Exception):
            raise reply
        return index, reply

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, request: HttpRequest, model: str, output: Output) -> None:
        begun = self._begun.get(output.prompt)
        if begun is None:
            begun = self._begun[output.prompt] = asyncio.Event()
        else:
            await begun.wait()
        try:
            async with self._places, aclosing(stream(request, model, output.wanted)) as replies:
                async for reply in replies:
                    begun.set()
                    await self._replies.put((output.choice, reply))
        except Exception as error:
            await self._replies.put((output.choice, error))
        finally:
            begun.set()


def expect_few(outputs: int) -> None:
    """Raises HttpError."""
    if outputs > MAX_OUTPUTS:
        raise HttpError(400, f"{outputs:,} outputs are wanted, prompts times n; one request may have {MAX_OUTPUTS}")


def _whole(pieces: Sequence[Piece], last: Generated) -> Generated:
    """Joins the pieces of an output and its last reply, as a call without `stream` answers."""
    return replace(
        last,
        text="".join(piece.text for piece in pieces) + last.text,
        token_ids=[token for piece in pieces for token in piece.token_ids] + last.token_ids,
        logprobs=[each for piece in pieces for each in piece.logprobs] + last.logprobs,
        token_bytes=reduce(or_, (piece.token_bytes for piece in pieces), last.token_bytes),
    )


def _ended(request: HttpRequest, model: str, reply: Generated) -> None:
    """Counts an output. Raises HttpError for one that was ended from outside."""
    request.metrics.output(model, reply)
    request.prompt_tokens += reply.usage.prompt_tokens
    request.generated_tokens += reply.usage.generated_tokens
    if reply.finish_reason == "cancelled":
        raise HttpError(499, "this request was ended by another client before it was complete", code="cancelled")
