"""`/v1/responses`: OpenAI's stateful API. A response is a point of a conversation: docs/guide/conversations.md."""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NamedTuple

from msgspec.structs import replace

from djinn_client.protocol import Generate, Generated
from djinnd.gateway.calls.conversations import conversation_of
from djinnd.gateway.calls.generating import stream
from djinnd.gateway.entry.request import HttpRequest
from djinnd.gateway.entry.route import Api, Route
from djinnd.gateway.http.errors import HttpError
from djinnd.gateway.http.replies import Reply, Stream, Whole, json
from djinnd.gateway.openai.errors import error
from djinnd.gateway.responses import store as responses_store
from djinnd.gateway.responses.body import Body
from djinnd.gateway.responses.items import Item, Messages, items_of, messages_of
from djinnd.gateway.responses.reply import Answer, failed
from djinnd.gateway.responses.running import Running
from djinnd.gateway.responses.store import Stored, conversation_record, find

RESPONSES = Api(error, failed)
_running = Running()


class Turn(NamedTuple):
    """A request with its input as messages, and the call of the daemon for it. messages: the whole transcript."""

    name: str
    body: Body
    input: list[Item]
    messages: Messages
    wanted: Generate


async def create(request: HttpRequest) -> Reply:
    body = request.body(Body)
    body.expect_supported()
    request.ignore(body.ignored())
    turn = await _turn(request, body)
    answer = Answer(turn.name, request.created, body)
    events = _events(request, turn, answer)
    if body.stream:
        return Stream(events)
    async with aclosing(events):
        async for _ in events:
            pass
    return json(answer.response)


async def retrieve(request: HttpRequest) -> Whole:
    if request.query.get("stream") == "true":
        raise HttpError(400, "a response that is stored is not streamed again", param="stream")
    async with request.pool.link() as link:
        return json((await find(link, request.parameters["response"])).response)


async def delete(request: HttpRequest) -> Whole:
    name = request.parameters["response"]
    async with request.pool.link() as link:
        await responses_store.drop(link, name)
    return json({"id": name, "object": "response", "deleted": True})


async def cancel(request: HttpRequest) -> Whole:
    """Ends a response that is in progress in this gateway. Raises HttpError."""
    name = request.parameters["response"]
    answer = await _running.cancel(request.principal, name)
    if answer is None:
        async with request.pool.link() as link:
            await find(link, name)
        raise HttpError(400, "only a response that is in progress can be cancelled", code="not_in_progress")
    return json(answer.response)


async def input_items(request: HttpRequest) -> Whole:
    """A page of them: `limit`, `order` and `after` as OpenAI has them."""
    async with request.pool.link() as link:
        items = (await find(link, request.parameters["response"])).input
    limit, after = _limit(request.query.get("limit", "20")), request.query.get("after")
    if request.query.get("order", "desc") != "asc":
        items = items[::-1]
    ids = [str(item.get("id")) for item in items]
    start = ids.index(after) + 1 if after in ids else 0
    page = items[start : start + limit]
    first, last = (page[0].get("id"), page[-1].get("id")) if page else (None, None)
    has_more = start + len(page) < len(items)
    return json({"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": has_more})


def _limit(given: str) -> int:
    """Raises HttpError."""
    if re.fullmatch(r"[0-9]{1,3}", given) and 1 <= int(given) <= 100:
        return int(given)
    raise HttpError(400, "limit must be from 1 to 100", param="limit")


async def _turn(request: HttpRequest, body: Body) -> Turn:
    """Raises HttpError."""
    earlier, after = await _earlier(request, body)
    items = items_of(body.input)
    messages = [*(earlier.transcript if earlier else ()), *messages_of(items)]
    conversation = conversation_of(
        request.headers,
        body.model,
        key=body.prompt_cache_key,
        service_tier=body.service_tier,
        priority=body.priority,
    )
    wanted = body.generation(messages, replace(conversation, after=after))
    return Turn(f"resp_{secrets.token_hex(24)}", body, items, messages, wanted)


async def _earlier(request: HttpRequest, body: Body) -> tuple[Stored | None, str]:
    """The response that the request continues, and the name of its record. A response of another model is continued by
    its transcript alone, without its record."""
    name = body.previous_response_id or ""
    if not name and not body.conversation_id:
        return None, ""
    async with request.pool.link() as link:
        if name:
            earlier: Stored | None = await find(link, name)
        else:
            name = conversation_record(body.conversation_id)
            earlier = await responses_store.read(link, name)
    is_alike = earlier is not None and earlier.response.get("model") == body.model
    return earlier, name if is_alike else ""


async def _events(request: HttpRequest, turn: Turn, answer: Answer) -> AsyncGenerator[bytes]:
    session, begun = "", False
    with _running.entered(request.principal, turn.name, answer) as entry:
        async with (
            aclosing(stream(request, turn.body.model, turn.wanted)) as replies,
            aclosing(entry.until_cancelled(replies)) as uncancelled,
        ):
            async for reply in uncancelled:
                if isinstance(reply, Generated):
                    session = reply.session
                told = answer.take(reply) if begun else answer.begin() + answer.take(reply)
                begun = True
                yield told
        if answer.response["status"] == "in_progress":
            yield answer.cancelled() if begun else answer.begin() + answer.cancelled()
        await _store(request, turn, answer, session)
    yield answer.end()


async def _store(request: HttpRequest, turn: Turn, answer: Answer, session: str) -> None:
    """Called before the last event, so that a client that has it can continue the response."""
    conversation = turn.body.conversation_id
    names = [turn.name] if turn.body.is_stored else []
    names += [conversation_record(conversation)] if conversation else []
    if not names:
        return
    stored = Stored(answer.response, turn.input, [*turn.messages, answer.message])
    async with request.pool.link() as link:
        for name in names:
            await responses_store.keep(link, name, turn.body.model, session, stored)


_ONE = "/v1/responses/{response}"
ROUTES = [
    Route(RESPONSES, "POST", "/v1/responses", create),
    Route(RESPONSES, "GET", _ONE, retrieve),
    Route(RESPONSES, "DELETE", _ONE, delete),
    Route(RESPONSES, "POST", f"{_ONE}/cancel", cancel),
    Route(RESPONSES, "GET", f"{_ONE}/input_items", input_items),
]
