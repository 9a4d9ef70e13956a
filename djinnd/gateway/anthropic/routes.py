"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from djinn_client.protocol import Generate, Tokenize, Tokenized
from djinnd.gateway.anthropic import reply as anthropic_reply
from djinnd.gateway.anthropic.body import ChatFields, MessagesBody
from djinnd.gateway.calls.fitting import generate_fitting, stream_fitting
from djinnd.gateway.entry.request import HttpRequest
from djinnd.gateway.entry.route import Api, Route
from djinnd.gateway.http.replies import SSE, Framing, Reply, Stream, Whole, json, named_event

ANTHROPIC = Api(anthropic_reply.error, anthropic_reply.failed)
_FRAMING = Framing(SSE.content_type, named_event("ping", {"type": "ping"}))


async def create(request: HttpRequest) -> Reply:
    body = request.body(MessagesBody)
    request.ignore(body.ignored())
    wanted = body.generation(request.headers)
    if body.stream:
        return Stream(_events(request, body, wanted), _FRAMING)
    reply = await generate_fitting(request, body.model, wanted)
    return json(anthropic_reply.message(f"msg_{request.id}", body.model, body.max_tokens, reply))


async def count_tokens(request: HttpRequest) -> Whole:
    body = request.body(ChatFields)
    request.ignore(body.ignored())
    async with request.pool.link() as link:
        tokenized = await link.call(Tokenize(id=0, model=body.model, chat=body.chat()), Tokenized)
    return json({"input_tokens": len(tokenized.token_ids)})


async def _events(request: HttpRequest, body: MessagesBody, wanted: Generate) -> AsyncGenerator[bytes]:
    events = anthropic_reply.Events(f"msg_{request.id}", body.model, body.max_tokens)
    async with aclosing(stream_fitting(request, body.model, wanted)) as replies:
        begun = False
        async for reply in replies:
            told = b"".join(events.take(reply))
            if told:
                yield told if begun else events.begin() + told
                begun = True


ROUTES = [
    Route(ANTHROPIC, "POST", "/v1/messages", create),
    Route(ANTHROPIC, "POST", "/v1/messages/count_tokens", count_tokens),
]
