"""Calls of APIs in which a client may ask for more tokens than the context has room for.

Anthropic's and Ollama's clients ask for a round number, whatever the prompt. The daemon refuses a number beyond the
context before anything runs. The gateway then repeats the call without a number, to the context's end.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from msgspec.structs import replace

from djinn_client.errors import InvalidRequest
from djinn_client.protocol import Generate, Generated, Piece
from djinnd.gateway.calls.generating import generate, stream
from djinnd.gateway.entry.request import HttpRequest


async def generate_fitting(request: HttpRequest, model: str, wanted: Generate) -> Generated:
    try:
        return await generate(request, model, wanted)
    except InvalidRequest as error:
        return await generate(request, model, _to_the_end(wanted, error))


async def stream_fitting(request: HttpRequest, model: str, wanted: Generate) -> AsyncGenerator[Piece | Generated]:
    try:
        async with aclosing(stream(request, model, wanted)) as replies:
            async for reply in replies:
                yield reply
    except InvalidRequest as error:
        async with aclosing(stream(request, model, _to_the_end(wanted, error))) as replies:
            async for reply in replies:
                yield reply


def _to_the_end(wanted: Generate, error: InvalidRequest) -> Generate:
    """Raises the error unless it is about too little room for `max_tokens`."""
    if "room" not in error.data:
        raise error
    return replace(wanted, max_tokens=None)
