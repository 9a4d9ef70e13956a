"""Ollama's API: chat, generate, embed, and descriptions of models."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from msgspec.structs import replace

from djinn_client import protocol
from djinn_client.protocol import Generate
from djinnd.gateway.calls.conversations import conversation_of
from djinnd.gateway.calls.fitting import generate_fitting, stream_fitting
from djinnd.gateway.calls.models import model_called, models, tokenizer_of
from djinnd.gateway.calls.vectors import json_rows
from djinnd.gateway.entry.request import HttpRequest
from djinnd.gateway.entry.route import Api, Route
from djinnd.gateway.http.errors import HttpError
from djinnd.gateway.http.replies import NDJSON, Reply, Stream, Whole, json, line
from djinnd.gateway.ollama import models as ollama_models
from djinnd.gateway.ollama import reply as ollama_reply
from djinnd.gateway.ollama.body import TAG, ChatBody, CommonFields, EmbedBody, GenerateBody

OLLAMA = Api(ollama_reply.error, ollama_reply.failed)
VERSION = "0.12.6"  # of Ollama's API that this follows; clients compare it with the version they need
LOADED = ("ready", "asleep")


class Named(msgspec.Struct):
    """Older clients say `name`."""

    model: str = ""
    name: str = ""

    @property
    def wanted(self) -> str:
        return (self.model or self.name).removesuffix(TAG)


async def chat(request: HttpRequest) -> Reply:
    body = request.body(ChatBody)
    if not body.messages:
        return await _without_prompt(request, body, ollama_reply.Lines("chat", body.model))
    return await _answer(request, body, ollama_reply.Lines("chat", body.model), body.generation(chat=body.chat()))


async def complete(request: HttpRequest) -> Reply:
    """A prompt is a user's message where the model has a chat template, unless it is `raw`."""
    body = request.body(GenerateBody)
    body.expect_possible()
    lines = ollama_reply.Lines("generate", body.model)
    if not body.prompt:
        return await _without_prompt(request, body, lines)
    if body.raw or not (await tokenizer_of(request, body.model_name)).has_chat:
        if body.system:
            request.ignore(["system"])
        return await _answer(request, body, lines, body.generation(text=body.prompt))
    return await _answer(request, body, lines, body.generation(chat=body.chat()))


async def embed(request: HttpRequest) -> Whole:
    body = request.body(EmbedBody)
    request.ignore(body.ignored())
    async with request.pool.link() as link:
        reply = await link.call(body.wanted(), protocol.Embedded)
    request.prompt_tokens += sum(reply.tokens)
    rows = await json_rows(reply)
    return json({"model": body.model, "embeddings": rows, "prompt_eval_count": sum(reply.tokens)})


async def tags(request: HttpRequest) -> Whole:
    return json({"models": [ollama_models.tag(info) for info in await models(request)]})


async def running(request: HttpRequest) -> Whole:
    return json({"models": [ollama_models.running(info) for info in await models(request) if info.state in LOADED]})


async def show(request: HttpRequest) -> Whole:
    """Loads the model if need be: only then is its template known."""
    info = await _model(request, request.body(Named).wanted)
    return json(ollama_models.shown(info, await tokenizer_of(request, info.name)))


async def pull(request: HttpRequest) -> Reply:
    """Succeeds for a model that is there. The gateway fetches none."""
    await _model(request, request.body(Named).wanted)
    return json({"status": "success"})


async def version(request: HttpRequest) -> Whole:
    return json({"version": VERSION})


async def alive(request: HttpRequest) -> Whole:
    return Whole(b"Ollama is running", content_type=b"text/plain; charset=utf-8")


async def _answer(request: HttpRequest, body: CommonFields, lines: ollama_reply.Lines, wanted: Generate) -> Reply:
    request.ignore(body.ignored())
    if wanted.chat is not None:
        wanted = replace(wanted, conversation=conversation_of(request.headers, body.model_name))
    if body.stream is not False:
        return Stream(_events(request, body.model_name, lines, wanted), NDJSON)
    reply = await generate_fitting(request, body.model_name, wanted)
    return json(lines.whole(reply))


async def _events(
    request: HttpRequest, model: str, lines: ollama_reply.Lines, wanted: Generate
) -> AsyncGenerator[bytes]:
    async with aclosing(stream_fitting(request, model, wanted)) as replies:
        async for reply in replies:
            told = b"".join(map(line, lines.take(reply)))
            if told:
                yield told


async def _without_prompt(request: HttpRequest, body: CommonFields, lines: ollama_reply.Lines) -> Whole:
    """Loads the model, or unloads it if its lifetime is 0."""
    async with request.pool.link() as link:
        if body.unloads:
            await link.call(protocol.UnloadModel(id=0, model=body.model_name), protocol.Done)
            return json(lines.done("unload"))
        await link.call(protocol.LoadModel(id=0, model=body.model_name), protocol.ModelReply)
    return json(lines.done("load"))


async def _model(request: HttpRequest, name: str) -> protocol.ModelInfo:
    found = await model_called(request, name)
    if found is None:
        raise HttpError(404, f"model {name[:200]!r} not found; `djinnctl pull` fetches one", code="model_not_found")
    return found


ROUTES = [
    Route(OLLAMA, "POST", "/api/chat", chat),
    Route(OLLAMA, "POST", "/api/generate", complete),
    Route(OLLAMA, "POST", "/api/embed", embed),
    Route(OLLAMA, "GET", "/api/tags", tags),
    Route(OLLAMA, "GET", "/api/ps", running),
    Route(OLLAMA, "POST", "/api/show", show),
    Route(OLLAMA, "POST", "/api/pull", pull),
    Route(OLLAMA, "GET", "/api/version", version, public=True),
    Route(OLLAMA, "GET", "/", alive, public=True),
]
