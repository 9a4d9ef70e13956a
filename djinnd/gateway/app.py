"""All routes as one ASGI application."""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute

from djinnd.config import Http
from djinnd.gateway import operations
from djinnd.gateway.anthropic import routes as anthropic
from djinnd.gateway.anthropic.routes import ANTHROPIC
from djinnd.gateway.entry.admission import Admission
from djinnd.gateway.entry.endpoint import Endpoint
from djinnd.gateway.entry.route import Route
from djinnd.gateway.http.errors import Problem
from djinnd.gateway.ollama import routes as ollama
from djinnd.gateway.ollama.routes import OLLAMA
from djinnd.gateway.openai import chat, completions, embeddings, models, tokenizing
from djinnd.gateway.openai.errors import OPENAI
from djinnd.gateway.responses import routes as responses

ROUTES: list[Route] = [
    *operations.ROUTES,
    *models.ROUTES,
    *chat.ROUTES,
    *completions.ROUTES,
    *embeddings.ROUTES,
    *responses.ROUTES,
    *anthropic.ROUTES,
    *ollama.ROUTES,
    *tokenizing.ROUTES,
]

_EXPOSED_HEADERS = ["x-request-id", "x-djinn-ignored", "x-djinn-notes", "retry-after", "retry-after-ms"]


def application(admission: Admission) -> Starlette:
    handlers: Any = {404: _not_found, 405: _not_allowed}
    app = Starlette(
        routes=[StarletteRoute(route.path, Endpoint(route, admission), methods=[route.method]) for route in ROUTES],
        middleware=_cors(admission.http),
        exception_handlers=handlers,
    )
    app.router.redirect_slashes = False  # a redirection would be to wherever the Host header says
    return app


def _cors(http: Http) -> list[Middleware]:
    if not http.cors:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=list(http.cors),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],  # clients' libraries add their own
            expose_headers=_EXPOSED_HEADERS,
        )
    ]


async def _not_found(request: Request, error: HTTPException) -> Response:
    told = f"there is nothing at {request.scope['path'][:200]}: docs/reference/http.md lists what there is"
    return _refusal(request, Problem(404, told))


async def _not_allowed(request: Request, error: HTTPException) -> Response:
    allowed = (error.headers or {}).get("Allow", "")
    told = f"{request.scope['path'][:200]} does not take {request.method[:20]}, but {allowed}"
    return _refusal(request, Problem(405, told), {"allow": allowed})


def _refusal(request: Request, problem: Problem, headers: dict[str, str] | None = None) -> Response:
    """Refuses in the shape of the path's API. Starlette's `request.url` is not asked: it parses the Host header, which
    may be anything."""
    path = request.scope["path"]
    api = OLLAMA if path.startswith("/api/") else ANTHROPIC if path.startswith("/v1/messages") else OPENAI
    return Response(api.error(problem), problem.status, headers, "application/json")
