"""The whole application without a server: its answers where there is no daemon, and to malformed requests."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from djinnd.config import Http
from djinnd.gateway.app import application
from djinnd.gateway.daemon.pools import Daemon
from djinnd.gateway.daemon.refused_tokens import RefusedTokens
from djinnd.gateway.entry.admission import Admission
from djinnd.gateway.entry.metrics import Metrics

NOWHERE = "/nowhere/djinnd.sock"


def ask(method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None, **http: Any) -> Any:
    """→ status, headers, body. The request comes through a Unix socket."""

    async def main() -> Any:
        daemon = Daemon(NOWHERE, RefusedTokens())
        app = application(Admission(Http(loopback_without_token=True, **http), daemon, Metrics("")))
        path_, _, query = path.partition("?")
        scope = {"type": "http", "method": method, "path": path_, "query_string": query.encode(), "root_path": ""}
        scope["headers"] = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        sent: list[Any] = []
        asked = iter([{"type": "http.request", "body": body}])

        async def receive() -> Any:
            return next(asked, None) or await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        await app(scope, receive, send)
        told = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return sent[0]["status"], told, b"".join(message.get("body", b"") for message in sent[1:])

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/health"), ("GET", "/v1/models"), ("POST", "/v1/messages"), ("POST", "/api/chat")]
)
def test_without_a_daemon_clients_are_told_to_come_back_and_not_where_it_would_be(method, path):
    status, headers, body = ask(method, path, b"{}" if method == "POST" else b"")
    assert (status, headers["retry-after"]) == (503, "1")
    assert NOWHERE not in body.decode() and json.loads(body)["error"]


@pytest.mark.parametrize("path", ["/version", "/api/version", "/"])
def test_versions_are_told_without_a_daemon(path):
    assert ask("GET", path)[0] == 200


def test_a_web_page_may_send_any_header_where_its_origin_is_named():
    page = {"origin": "https://chat.example", "access-control-request-method": "POST"}
    page["access-control-request-headers"] = "authorization,x-stainless-os,anthropic-dangerous-direct-browser-access"
    status, headers, _ = ask("OPTIONS", "/v1/chat/completions", headers=page, cors=("https://chat.example",))
    assert status == 200 and "x-stainless-os" in headers["access-control-allow-headers"]
    assert ask("OPTIONS", "/v1/models", headers=page, cors=("https://other.example",))[0] == 400


def test_paths_that_there_are_not_are_refused_in_their_api_s_shape():
    assert json.loads(ask("GET", "/v1/messages/batches")[2])["type"] == "error"
    assert isinstance(json.loads(ask("GET", "/api/nothing")[2])["error"], str)
    assert json.loads(ask("GET", "/v1/nothing")[2])["error"]["type"] == "not_found_error"


@pytest.mark.parametrize("host", ["[", "evil.example", "a b", ""])
@pytest.mark.parametrize("path", ["/nothing", "/version/", "/v1/completions"])
def test_a_host_of_any_kind_gets_a_refusal_and_leads_nowhere(path, host):
    status, headers, _ = ask("GET", path, headers={"host": host})
    assert status in (404, 405) and "location" not in headers
