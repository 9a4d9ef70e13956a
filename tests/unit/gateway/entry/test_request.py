from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from djinnd.gateway.entry.request import MAX_IGNORED, HttpRequest
from djinnd.gateway.entry.unknown_fields import MAX_OBJECTS
from djinnd.gateway.http.errors import HttpError, problem_of


class Content(msgspec.Struct):
    text: str = ""
    parts: list[Content] | None = None


class Body(msgspec.Struct):
    model: str
    content: str | list[Content] = ""
    arguments: dict[str, Any] | None = None


def request_of(content: bytes = b"", method: str = "POST", **headers: str) -> HttpRequest:
    told = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    request = HttpRequest({"method": method, "path": "/", "headers": told})
    request.content = content
    request.hold = lambda count: None
    return request


def status_of(content: bytes) -> int:
    try:
        request_of(content).body(Body)
        return 200
    except Exception as error:
        return problem_of(error).status


async def receive_nothing() -> Any:
    raise AssertionError("the body is not waited for")


def test_a_body_s_unknown_fields_are_noted_up_to_a_bound():
    request = request_of(b'{"model": "m", "zebra": 1, "' + b"y" * 1000 + b'": 2}')
    assert request.body(Body).model == "m" and request.ignored == {"zebra", "y" * 64}
    many = request_of(b'{"model": "m",' + b",".join(b'"k%d": 1' % at for at in range(5000)) + b"}")
    many.body(Body)
    many.ignore(["more"])
    assert len(many.ignored) == MAX_IGNORED


def test_unknown_fields_inside_others_are_noted_with_the_path_to_them():
    content = {"text": "a", "parts": [{"text": "b", "zebra": 1}, {"text": "c", "parts": [{"yak": {}}]}], "yak": 2}
    request = request_of(msgspec.json.encode({"model": "m", "content": [content], "arguments": {"any": 1}}))
    assert request.body(Body).content[0].parts[0].text == "b"
    assert request.ignored == {"content.parts.zebra", "content.parts.parts.yak", "content.yak"}


def test_a_body_of_many_objects_is_looked_into_up_to_a_bound():
    parts = [{"text": "a"}] * MAX_OBJECTS + [{"zebra": 1}]
    request = request_of(msgspec.json.encode({"model": "m", "content": parts}))
    request.body(Body)
    assert request.ignored == set()
    request = request_of(msgspec.json.encode({"model": "m", "content": parts[1:]}))
    request.body(Body)
    assert request.ignored == {"content.zebra"}


@pytest.mark.parametrize("depth", [900, 1_000, 10_000])
def test_a_body_that_is_nested_deeply_is_refused_or_read(depth):
    assert status_of(b'{"model": "m", "arguments": {"a": ' + b"[" * depth + b"]" * depth + b"}}") in (200, 400)


def test_a_long_number_is_refused_or_read():
    assert status_of(b'{"model": "m", "arguments": {"a": ' + b"9" * 10_000 + b"}}") in (200, 400)


@pytest.mark.parametrize("headers", [{"content_length": "1"}, {"transfer_encoding": "chunked"}])
def test_a_call_without_a_body_does_not_wait_for_one(headers):
    with pytest.raises(HttpError) as refused:
        asyncio.run(request_of(method="GET", **headers).read(receive_nothing, 0))
    assert refused.value.problem.status == 413


def test_bytes_are_charged_as_they_come():
    parts = iter([(b"ab", True), (b"", True), (b"cde", False)])
    charged: list[int] = []

    async def receive() -> Any:
        part, more = next(parts)
        return {"type": "http.request", "body": part, "more_body": more}

    request = request_of()
    request.hold = charged.append
    asyncio.run(request.read(receive, 10))
    assert (request.content, charged) == (b"abcde", [2, 3])


def test_a_request_s_id_is_ascii():
    assert request_of(x_request_id="mine-1").id == "mine-1"
    assert request_of(x_request_id="m\u00efne").id.isascii()
