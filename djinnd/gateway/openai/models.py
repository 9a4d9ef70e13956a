"""`/v1/models`: the models that the daemon has, as OpenAI lists its own."""

from __future__ import annotations

import time
from typing import Any

from djinn_client.protocol import ModelInfo
from djinnd.gateway.calls.models import model_called, served
from djinnd.gateway.entry.request import HttpRequest
from djinnd.gateway.entry.route import Route
from djinnd.gateway.http.errors import HttpError
from djinnd.gateway.http.replies import Whole, json
from djinnd.gateway.openai.errors import OPENAI

_STARTED = int(time.time())  # OpenAI has a model's birth here; the daemon knows none


async def list_models(request: HttpRequest) -> Whole:
    return json({"object": "list", "data": [_model(*each) for each in await served(request)]})


async def get_model(request: HttpRequest) -> Whole:
    name = request.parameters["name"]
    found = await model_called(request, name)
    if found is None:
        raise HttpError(404, f"there is no model {name[:200]!r}", code="model_not_found", param="model")
    return json(_model(name, found))


def _model(name: str, info: ModelInfo) -> dict[str, Any]:
    """`max_model_len`: tokens of its context, as vLLM tells it; None before it is loaded. `parent`: the model of an
    adapter, likewise. `quantised`: the code to which its weights were quantised when they were loaded.
    `kv_dtype`: the code to which its keys and values are rounded."""
    told = {"id": name, "object": "model", "created": _STARTED, "owned_by": "djinnd"}
    if name != info.name:
        told["parent"] = info.name
    if info.quantised:
        told["quantised"] = info.quantised
    if info.kv_dtype:
        told["kv_dtype"] = info.kv_dtype
    return told | {"max_model_len": info.max_context or None}


ROUTES = [
    Route(OPENAI, "GET", "/v1/models", list_models),
    Route(OPENAI, "GET", "/v1/models/{name:path}", get_model),
]
