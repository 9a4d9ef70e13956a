"""All routes as one ASGI application."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute

from djinnd.config import Http
from djinnd.gateway import (
    anthropic_messages,
    ollama,
    openai_chat,
    openai_completions,
    openai_embeddings,
    openai_models,
    operations,
    responses,
    tokenizing,
)
from djinnd.gateway.anthropic_messages import ANTHROPIC
from djinnd.gateway.api import OPENAI, Route
from djinnd.gateway.doors import Doors
from djinnd.gateway.endpoint import Endpoint
from djinnd.gateway.errors import Problem
from djinnd.gateway.ollama import OLLAMA

ROUTES: list[Route] = [
    *operations.ROUTES,
    *openai_models.ROUTES,
    *openai_chat.ROUTES,
    *openai_completions.ROUTES,
    *openai_embeddings.ROUTES,
    *responses.ROUTES,
    *anthropic_messages.ROUTES,
    *ollama.ROUTES,
    *tokenizing.ROUTES,
]

_ALLOWED_HEADERS = [
    "authorization",
    "content-type",
    "x-api-key",
    "anthropic-version",
    "anthropic-beta",
    "x-request-id",
    "x-session-id",
    "x-djinn-expected-wait",
]
_EXPOSED_HEADERS = ["x-request-id", "x-djinn-ignored", "retry-after"]


def application(doors: Doors, routes: Iterable[Route] = ()) -> Starlette:
    handlers: Any = {404: _not_found, 405: _not_allowed}
    return Starlette(
        routes=[
            StarletteRoute(route.path, Endpoint(route, doors), methods=[route.method]) for route in [*ROUTES, *routes]
        ],
        middleware=_cors(doors.http),
        exception_handlers=handlers,
    )


def _cors(http: Http) -> list[Middleware]:
    if not http.cors:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=list(http.cors),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=_ALLOWED_HEADERS,
            expose_headers=_EXPOSED_HEADERS,
        )
    ]


async def _not_found(request: Request, error: HTTPException) -> Response:
    problem = Problem(404, f"there is nothing at {request.url.path[:200]}: docs/http.md lists what there is")
    return _refusal(request, problem)


async def _not_allowed(request: Request, error: HTTPException) -> Response:
    allowed = (error.headers or {}).get("Allow", "")
    problem = Problem(405, f"{request.url.path[:200]} does not take {request.method[:20]}, but {allowed}")
    return _refusal(request, problem, {"allow": allowed})


def _refusal(request: Request, problem: Problem, headers: dict[str, str] | None = None) -> Response:
    """In the shape of the API that the path belongs to."""
    path = request.url.path
    api = OLLAMA if path.startswith("/api/") else ANTHROPIC if path.startswith("/v1/messages") else OPENAI
    return Response(api.error(problem), problem.status, headers, "application/json")
