"""Hostile clients of the HTTP gateway: each gets its status or is cut off, and the daemon never notices."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPConnection
from typing import Any

import pytest

from tests.conftest import MODEL
from tests.support.daemon import Daemon, wait_for
from tests.support.gateway import Gateway, close_conversations

LIMITS = {
    "header_seconds": "1s",
    "body_seconds": "2s",
    "write_seconds": "2s",
    "requests_per_token": 4,
    "connections": 64,
}
COMPLETION = {"model": MODEL, "prompt": "a", "max_tokens": 1, "temperature": 0}


@pytest.fixture(scope="module")
def gateway(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with Gateway(tmp_path_factory.mktemp("gateway"), daemon.address, LIMITS) as running:
        yield running
    close_conversations(daemon)


@pytest.fixture(autouse=True)
def nothing_is_lost(gateway: Gateway, daemon: Daemon) -> Iterator[None]:
    """After whatever was sent, the gateway answers, and the daemon has nothing left of it."""
    yield
    assert gateway.post("/v1/completions", COMPLETION).status == 200
    with daemon.client() as client:
        wait_for(lambda: client.status().requests_running == 0)
        assert client.status().devices[0].restarts == 0


def read_all(sock: socket.socket) -> bytes:
    """Reads until the gateway closes or resets the connection."""
    sock.settimeout(30)
    came = b""
    with suppress(ConnectionResetError):
        while part := sock.recv(65536):
            came += part
    return came


def connected(gateway: Gateway) -> socket.socket:
    return socket.create_connection(gateway.address)


def not_reading(gateway: Gateway) -> socket.socket:
    """Its buffer is full after a few kilobytes."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(gateway.address)
    return sock


def head_of(length: int, path: str = "/v1/completions") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n".encode()


@pytest.mark.smoke
def test_a_body_of_a_gigabyte_is_refused_before_it_comes(gateway):
    with connected(gateway) as sock:
        sock.sendall(head_of(1 << 30))
        assert read_all(sock).startswith(b"HTTP/1.1 413 ")


def test_a_chunked_body_is_refused_when_it_is_over_the_limit(gateway):
    chunk = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"
    with connected(gateway) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        with suppress(ConnectionResetError, BrokenPipeError):
            for _ in range(64):
                sock.sendall(chunk)
        assert read_all(sock).startswith(b"HTTP/1.1 413 ")


def test_a_length_that_is_none(gateway):
    with connected(gateway) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n")
        assert read_all(sock).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET /health HTT", b"GET /health HTTP/1.1\r\nHost: localhost\r\n", head_of(100) + b"{", b"\r\n"],
    ids=["nothing", "half a line", "half a head", "half a body", "empty lines"],
)
def test_a_client_that_does_not_go_on_is_cut_off(gateway, sent):
    with connected(gateway) as sock:
        sock.sendall(sent)
        assert read_all(sock) == b""


def test_headers_without_end(gateway):
    with connected(gateway) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        try:
            for number in range(10_000):
                sock.sendall(f"x-{number}: {'y' * 1000}\r\n".encode())
        except (ConnectionResetError, BrokenPipeError):
            return
        assert read_all(sock) == b""


def test_many_headers(gateway):
    with connected(gateway) as sock:
        with suppress(ConnectionResetError, BrokenPipeError):
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 5_000 + b"\r\n")
        assert read_all(sock) == b""


def test_a_body_that_needs_no_token_and_never_comes_takes_no_place(gateway):
    with connected(gateway) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n")
        assert read_all(sock).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("unit", [b"[]", b"{}", b'""', b"1"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/messages"])
def test_a_body_of_millions_of_values(gateway, path, unit):
    field = {"/v1/completions": b"prompt", "/v1/responses": b"input"}.get(path, b"messages")
    body = b'{"model": "m", "' + field + b'": [' + b",".join([unit] * ((8 << 20) // (len(unit) + 2))) + b"]}"
    assert gateway.post(path, body).status == 413


LONG = "x" * 60_000


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("change", "headers"),
    [
        ({"model": LONG}, {}),
        ({}, {"x-session-id": LONG}),
        ({"prompt_cache_key": LONG}, {}),
        ({"stop": ["a"] * 40_000}, {}),
        ({"stop": LONG}, {}),
        ({"stop_token_ids": [1] * 40_000}, {}),
        ({"logit_bias": {str(token): 1 for token in range(2_000)}}, {}),
        ({"n": 256, "best_of": 257}, {}),
        ({"regex": "(" * 50_000}, {}),
        ({"seed": 10**30, "top_k": 10**30}, {}),
        ({"max_tokens": 10**30}, {}),
    ],
)
def test_values_beyond_the_daemon_s_bounds_are_refused_as_the_client_s_fault(gateway, change, headers):
    answer = gateway.post("/v1/completions", COMPLETION | change, headers)
    assert answer.status in (400, 404), answer.content[:300]
    assert len(answer.content) < 10_000


@pytest.mark.parametrize("limit", ["%C2%B2", "0", "1e1", "9" * 5_000, "-1"])
def test_a_limit_that_is_no_number(gateway, limit):
    assert gateway.get(f"/v1/responses/resp_1/input_items?limit={limit}").status in (400, 404)


@pytest.mark.smoke
@pytest.mark.parametrize("depth", [950, 100_000])
def test_a_body_that_is_nested_deeply(gateway, depth):
    nested = b"[" * depth + b"]" * depth
    for path, field in (
        ("/v1/messages", b'"max_tokens": 1, "messages": [], "tools": [{"name": "f", "input_schema": {"a": %b}}]'),
        ("/v1/chat/completions", b'"messages": [], "chat_template_kwargs": {"a": %b}'),
        ("/v1/chat/completions", b'"messages": [{"role": "user"}], "structured_outputs": {"json": {"a": %b}}'),
        ("/v1/responses", b'"input": [{"role": "user", "content": %b}]'),
        ("/api/chat", b'"messages": [{"role": "user"}], "format": {"a": %b}'),
    ):
        status = gateway.post(path, b'{"model": "%b", ' % MODEL.encode() + field % nested + b"}").status
        assert status in (400, 413, 422), (path, status)


@pytest.mark.smoke
def test_bytes_that_are_no_http(gateway):
    rng = random.Random(0)
    for _ in range(50):
        with connected(gateway) as sock:
            sock.sendall(rng.randbytes(rng.randrange(1, 300)) + b"\r\n\r\n")
            sock.shutdown(socket.SHUT_WR)
            assert read_all(sock)[:12] in (b"", b"HTTP/1.1 400")


def test_a_flood_of_pipelined_requests(gateway):
    with connected(gateway) as sock:
        with suppress(ConnectionResetError, BrokenPipeError):
            sock.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n" * 5000)
        assert read_all(sock).count(b"200 OK") < 5000


def test_many_connections_that_do_nothing(gateway):
    idle = [connected(gateway) for _ in range(80)]
    for sock in idle:  # until its time is over, or at once where there was no room
        assert read_all(sock) == b""
        sock.close()


def test_a_client_that_never_reads_is_cut_off(gateway):
    before = gateway.log.count("reason=write_seconds")
    body = json.dumps({"model": MODEL, "prompt": "def f(x):\n" * 150_000, "return_token_strs": True}).encode()
    with not_reading(gateway) as sock:
        sock.sendall(head_of(len(body), path="/tokenize") + body)
        wait_for(lambda: gateway.log.count("reason=write_seconds") > before)


@pytest.mark.long
def test_the_run_of_a_client_that_never_reads_ends(gateway):
    before = gateway.log.count("reason=write_seconds")
    wanted = {"max_tokens": 1900, "ignore_eos": True, "stream": True, "n": 4, "logprobs": 20}
    body = json.dumps(COMPLETION | wanted).encode()
    with not_reading(gateway) as sock:
        sock.sendall(head_of(len(body)) + body)
        wait_for(lambda: gateway.log.count("reason=write_seconds") > before)


@pytest.mark.smoke
def test_more_requests_than_places_are_told_to_come_back(gateway, daemon):
    body = json.dumps(COMPLETION | {"max_tokens": 1900, "ignore_eos": True, "stream": True}).encode()
    busy = [connected(gateway) for _ in range(4)]
    for sock in busy:
        sock.sendall(head_of(len(body)) + body)
        assert sock.recv(12) == b"HTTP/1.1 200"
    refused = gateway.post("/v1/completions", COMPLETION)
    assert (refused.status, refused.headers["retry-after"]) == (429, "1")
    for sock in busy:
        sock.close()
    wait_for(lambda: gateway.post("/v1/completions", COMPLETION).status == 200)


@pytest.mark.smoke
def test_malformed_bodies(gateway):
    _send_malformed(gateway, 300)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_many_malformed_bodies(gateway):
    _send_malformed(gateway, 2_500)


def _send_malformed(gateway: Gateway, count: int) -> None:
    """Bodies of the right shape with wrong values in some places: each has a status of the client's."""
    rng = random.Random(count)
    refused = 0
    for number in range(count):
        path, body = rng.choice(list(BODIES.items()))
        content = json.dumps(_spoilt(body, rng)).encode()
        if number % 10 == 0:
            content = content[: rng.randrange(len(content))]
        status, told = _outcome(gateway, path, content)
        assert status in {200, 400, 404, 413, 422, 429}, (path, content, status)
        assert status == 200 or json.loads(told)["error"], (path, content, told)
        refused += status == 400
    assert refused > count / 4


def _outcome(gateway: Gateway, path: str, content: bytes) -> tuple[int, bytes]:
    """The status and, of a refusal, the body. An answer is given up when it begins: some have no bound now."""
    connection = HTTPConnection(*gateway.address, timeout=60)
    try:
        connection.request("POST", path, content)
        response = connection.getresponse()
        return response.status, b"" if response.status == 200 else response.read()
    finally:
        connection.close()


MESSAGE = {"role": "user", "content": "hi"}
CHAT = {"model": MODEL, "messages": [MESSAGE], "stream": True}
BODIES: dict[str, Any] = {
    "/v1/completions": COMPLETION
    | {"stream": True, "n": 1, "stop": ["a"], "seed": 1, "logprobs": 1, "logit_bias": {"5": 1}},
    "/v1/chat/completions": CHAT
    | {"max_tokens": 1, "stream_options": {}, "tools": [], "response_format": {"type": "text"}},
    "/v1/embeddings": {"model": MODEL, "input": ["a", "b"], "encoding_format": "float"},
    "/v1/responses": {
        "model": MODEL,
        "input": [MESSAGE],
        "max_output_tokens": 1,
        "store": False,
        "text": {},
        "stream": True,
    },
    "/v1/messages": CHAT | {"max_tokens": 1, "system": "s"},
    "/api/chat": CHAT | {"options": {"num_predict": 1, "temperature": 0.1}},
    "/api/generate": {"model": MODEL, "prompt": "a", "stream": True, "options": {"num_predict": 1}},
    "/tokenize": {"model": MODEL, "prompt": "a"},
    "/detokenize": {"model": MODEL, "tokens": [1, 2]},
}
WRONG: list[Any] = [
    None,
    True,
    -1,
    -0.5,
    2**70,
    1e308,
    "",
    "\0",
    "x" * 3000,
    "\ud800",
    [],
    [[]],
    [1, "a"],
    {},
    {"a": {}},
]


def _spoilt(value: Any, rng: random.Random) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.9:
        at = rng.choice([key for key in value if key != "stream"])
        if rng.random() < 0.1:
            return {key: inner for key, inner in value.items() if key != at}
        return value | {at: _spoilt(value[at], rng)}
    if isinstance(value, list) and value and rng.random() < 0.5:
        return [*value[:-1], _spoilt(value[-1], rng)]
    return rng.choice(WRONG)
