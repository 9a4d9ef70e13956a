"""`/tokenize`, `/detokenize` and `/tokenizer_info`, as vLLM has them."""

from __future__ import annotations

from typing import Any

import msgspec

from djinn_client.protocol import Detokenize, Detokenized, Tokenize, Tokenized
from djinn_client.protocol.fields.chat import ChatInput
from djinnd.gateway.calls.models import model_called, models, tokenizer_of
from djinnd.gateway.entry.request import ABSENT, HttpRequest, given
from djinnd.gateway.entry.route import Route
from djinnd.gateway.http.errors import HttpError
from djinnd.gateway.http.replies import Whole, json
from djinnd.gateway.openai.errors import OPENAI


class TokenizeBody(msgspec.Struct):
    """A text or a chat to tokenise. Without a model it is the only one that there is."""

    model: str = ""
    prompt: str | None = None
    messages: msgspec.Raw = ABSENT
    tools: msgspec.Raw = ABSENT
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct):
    tokens: list[int]
    model: str = ""


async def tokenize(request: HttpRequest) -> Whole:
    body = request.body(TokenizeBody)
    if (body.prompt is None) == (not given(body.messages)):
        raise HttpError(400, "either prompt or messages, and not both", param="prompt")
    model = body.model or await _only_model(request)
    wanted = Tokenize(
        id=0,
        model=model,
        text=body.prompt or "",
        chat=_chat(body),
        add_special=body.add_special_tokens is not False,
        token_texts=bool(body.return_token_strs),
    )
    async with request.pool.link() as link:
        reply = await link.call(wanted, Tokenized)
    told = {"tokens": reply.token_ids, "count": len(reply.token_ids), "max_model_len": await _context(request, model)}
    return json(told | {"token_strs": reply.token_texts if body.return_token_strs else None})


async def detokenize(request: HttpRequest) -> Whole:
    body = request.body(DetokenizeBody)
    wanted = Detokenize(id=0, model=body.model or await _only_model(request), token_ids=body.tokens)
    async with request.pool.link() as link:
        reply = await link.call(wanted, Detokenized)
    return json({"prompt": reply.text})


async def describe(request: HttpRequest) -> Whole:
    """`?model=` chooses one of several."""
    model = request.query.get("model", "") or await _only_model(request)
    info = await tokenizer_of(request, model)
    return json(
        {
            "model": model,
            "tokenizer_class": "djinnd",
            "bos_token": info.bos_token or None,
            "eos_token": info.eos_token or None,
            "chat_template": info.chat_template or None,
        }
    )


def _chat(body: TokenizeBody) -> ChatInput | None:
    if not given(body.messages):
        return None
    return ChatInput(
        messages=bytes(body.messages),
        tools=given(body.tools),
        arguments=msgspec.json.encode(body.chat_template_kwargs) if body.chat_template_kwargs else b"",
        continue_final=bool(body.continue_final_message),
    )


async def _only_model(request: HttpRequest) -> str:
    """Raises HttpError if there are several."""
    there = await models(request)
    ready = [model.name for model in there if model.state == "ready"] or [model.name for model in there]
    if len(ready) != 1:
        raise HttpError(400, f"there are {len(ready)} models: name one", param="model")
    return ready[0]


async def _context(request: HttpRequest, name: str) -> int | None:
    model = await model_called(request, name)
    return (model.max_context or None) if model is not None else None


ROUTES = [
    Route(OPENAI, "POST", "/tokenize", tokenize),
    Route(OPENAI, "POST", "/detokenize", detokenize),
    Route(OPENAI, "GET", "/tokenizer_info", describe),
]
