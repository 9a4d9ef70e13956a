"""Routes for operators: health, version, metrics."""

from __future__ import annotations

from djinn_client.protocol import GetStatus, StatusReply
from djinn_client.version import __version__
from djinnd.gateway.entry.metrics import CONTENT_TYPE
from djinnd.gateway.entry.request import HttpRequest
from djinnd.gateway.entry.route import Route
from djinnd.gateway.http.errors import HttpError
from djinnd.gateway.http.replies import Whole, json
from djinnd.gateway.openai.errors import OPENAI


async def health(request: HttpRequest) -> Whole:
    """Answers load balancers: 200 while an engine is ready, else 503. Raises HttpError."""
    async with request.pool.link() as link:
        status = await link.call(GetStatus(id=0), StatusReply)
    if status.state != "ready" or not any(device.state == "ready" for device in status.devices):
        raise HttpError(503, f"no engine is ready: the daemon is {status.state}", code="not_ready", retry_s=1)
    return json({"status": "ok"})


async def version(request: HttpRequest) -> Whole:
    return json({"version": __version__})


async def metrics(request: HttpRequest) -> Whole:
    """Only administrators may read them: the daemon's part names its users. Raises HttpError."""
    if not request.pool.is_admin:
        raise HttpError(403, "metrics are for administrators: docs/reference/http.md")
    async with request.pool.link() as link:
        request.metrics.daemon(await link.call(GetStatus(id=0), StatusReply))
    return Whole(await request.metrics.text(), content_type=CONTENT_TYPE)


ROUTES = [
    Route(OPENAI, "GET", "/metrics", metrics),
    Route(OPENAI, "GET", "/health", health, public=True),
    Route(OPENAI, "GET", "/version", version, public=True),
]
