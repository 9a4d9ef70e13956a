"""`/v1/embeddings`: a vector for each text or row of tokens."""

from __future__ import annotations

import base64
from typing import Literal

import msgspec

from djinn_client.protocol import Embed, Embedded
from djinn_client.protocol.fields.bounds import pack
from djinnd.gateway.calls.vectors import json_rows, rows_of
from djinnd.gateway.entry.request import HttpRequest
from djinnd.gateway.entry.route import Route
from djinnd.gateway.http.errors import HttpError
from djinnd.gateway.http.replies import Whole, json
from djinnd.gateway.openai.errors import OPENAI
from djinnd.gateway.openai.prompts import Given, prompts_of


class Body(msgspec.Struct, kw_only=True):
    model: str
    input: Given
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


async def embed(request: HttpRequest) -> Whole:
    body = request.body(Body)
    if body.dimensions is not None:
        raise HttpError(400, "dimensions is not supported: a vector has the model's width", param="dimensions")
    async with request.pool.link() as link:
        reply = await link.call(_wanted(body), Embedded)
    is_base64 = body.encoding_format == "base64"
    rows = await json_rows(reply) if not is_base64 else [_base64(row) for row in rows_of(reply)]
    data = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)]
    total = sum(reply.tokens)
    request.prompt_tokens += total
    usage = {"prompt_tokens": total, "total_tokens": total}
    return json({"object": "list", "model": body.model, "data": data, "usage": usage})


def _wanted(body: Body) -> Embed:
    """Raises HttpError."""
    prompts = prompts_of(body.input, "input")
    texts = [prompt.text for prompt in prompts if prompt.text is not None]
    rows = [prompt.token_ids for prompt in prompts if prompt.token_ids is not None]
    if texts and rows:
        raise HttpError(400, "input must be texts or lists of tokens, and not both", param="input")
    try:
        return Embed(id=0, model=body.model, texts=texts, packed=[pack(row) for row in rows])
    except OverflowError as error:
        raise HttpError(400, "input has a number that is no token", param="input") from error


def _base64(row: bytes) -> msgspec.Raw:
    return msgspec.Raw(b'"' + base64.b64encode(row) + b'"')


ROUTES = [Route(OPENAI, "POST", "/v1/embeddings", embed)]
