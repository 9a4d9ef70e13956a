"""One route as an ASGI application.

    token ──► a place ──► body ──► handler ──► reply
    401       429         413        └── the client goes: the handler's task is cancelled, and with it the daemon's work

Each request gets one reply, and one line in the log, without any part of the body.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from djinnd.gateway.entry.admission import Admission
from djinnd.gateway.entry.request import HttpRequest
from djinnd.gateway.entry.route import Route
from djinnd.gateway.http.errors import ClientGone, Problem, problem_of
from djinnd.gateway.http.replies import Header, Whole
from djinnd.gateway.http.sending import Sending

log = logging.getLogger("djinnd.gateway")

MAX_TOLD = 1000  # characters of the headers that name ignored fields and notes
_JOINED = {b"x-djinn-ignored": ", ", b"x-djinn-notes": "; "}
_UNPRINTABLE = re.compile(r"[^ -~]")


class Endpoint:
    def __init__(self, route: Route, admission: Admission) -> None:
        self._route = route
        self._admission = admission

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = HttpRequest(scope)
        sending = Sending(send, lambda: _headers(request), self._admission.http.ping_seconds)
        status = 499
        try:
            async with self._admission.admitted(request, self._route.public):
                await self._answer(request, receive, sending)
            status = sending.status
        except ClientGone:
            pass
        except Exception as error:
            with suppress(ClientGone):
                status = await self._fail(request, sending, error)
        finally:
            self._log(request, status)

    async def _answer(self, request: HttpRequest, receive: Any, sending: Sending) -> None:
        await request.read(receive, self._admission.http.body_bytes if request.method == "POST" else 0)
        async with _until_the_client_goes(receive):
            await sending.reply(await self._route.handle(request))

    async def _fail(self, request: HttpRequest, sending: Sending, error: Exception) -> int:
        """Answers with the error, or ends a stream that has begun with an event for it. Returns the status."""
        problem = problem_of(error)
        if problem.status == 500:
            log.error("http_failed id=%s path=%s", request.id, self._route.path, exc_info=error)
        if not sending.status:
            body, headers = self._route.api.error(problem), tuple(_headers_of(problem))
            await sending.whole(Whole(body, problem.status, headers=headers), is_last=not request.is_read)
        else:
            await sending.end_stream(self._route.api.failed(problem))
        return problem.status

    def _log(self, request: HttpRequest, status: int) -> None:
        self._admission.metrics.ended(self._route.path, status)
        log.info(
            "http_request id=%s principal=%s method=%s path=%s status=%d seconds=%.3f prompt=%d generated=%d",
            request.id,
            request.principal,
            request.method,
            self._route.path,
            status,
            time.monotonic() - request.began,
            request.prompt_tokens,
            request.generated_tokens,
        )


@asynccontextmanager
async def _until_the_client_goes(receive: Any) -> AsyncIterator[None]:
    """Cancels what runs inside when the client closes its connection, and raises ClientGone then."""
    task = asyncio.current_task()
    assert task is not None
    gone = asyncio.ensure_future(receive())
    cancel = lambda _: task.cancel()  # noqa: E731  # removed again below
    gone.add_done_callback(cancel)
    try:
        yield
    except asyncio.CancelledError:
        if not gone.done() or gone.cancelled():
            raise
        task.uncancel()
        raise ClientGone from None
    finally:
        gone.remove_done_callback(cancel)
        gone.cancel()


def _headers(request: HttpRequest) -> list[Header]:
    headers = [(b"x-request-id", request.id.encode())]
    for name, found in ((b"x-djinn-ignored", request.ignored), (b"x-djinn-notes", request.notes)):
        if found:
            told = _UNPRINTABLE.sub("?", _JOINED[name].join(sorted(found)))[:MAX_TOLD]
            headers.append((name, told.encode()))
    return headers


def _headers_of(problem: Problem) -> list[Header]:
    headers = []
    if problem.retry_s is not None:
        headers.append((b"retry-after", str(math.ceil(problem.retry_s)).encode()))
        headers.append((b"retry-after-ms", str(math.ceil(problem.retry_s * 1000)).encode()))
    if problem.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers
