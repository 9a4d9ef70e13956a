from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from djinnd.config import Http
from djinnd.gateway.daemon.pools import Daemon, Pool
from djinnd.gateway.daemon.refused_tokens import RefusedTokens
from djinnd.gateway.entry.admission import PUBLIC_REQUESTS, Admission
from djinnd.gateway.entry.metrics import Metrics
from djinnd.gateway.entry.request import HttpRequest
from djinnd.gateway.http.errors import HttpError

TOKENS = ("djn_a", "djn_b")


class ProvenDaemon(Daemon):
    """Knows every token without asking."""

    def __init__(self) -> None:
        super().__init__("/nowhere", RefusedTokens())
        self.proven: dict[str, Pool] = {}

    async def pool(self, token: str) -> Pool:
        return self.proven.setdefault(token, Pool("/nowhere", token))


def admission(**limits: Any) -> Admission:
    return Admission(Http(**limits), ProvenDaemon(), Metrics(""))


def request_of(token: str = TOKENS[0]) -> HttpRequest:
    return HttpRequest({"method": "POST", "path": "/", "headers": [(b"x-api-key", token.encode())]})


def refused(error: pytest.ExceptionInfo[HttpError]) -> bool:
    return error.value.problem.status == 429 and error.value.problem.retry_s is not None


def test_places_of_a_token_and_in_all() -> None:
    async def main() -> None:
        doors = admission(requests=2, requests_per_token=1)
        async with doors.admitted(request_of(), False):
            with pytest.raises(HttpError) as error:
                await doors.admitted(request_of(), False).__aenter__()
            assert refused(error)
            async with doors.admitted(request_of(TOKENS[1]), False):
                with pytest.raises(HttpError) as error:
                    await doors.admitted(request_of("djn_c"), False).__aenter__()
                assert refused(error)
        async with doors.admitted(request_of(), False):
            pass

    asyncio.run(main())


def test_requests_without_a_token_take_no_place_of_others() -> None:
    async def main() -> None:
        doors = admission(requests=1, requests_per_token=1)
        async with AsyncExitStack() as stack:
            for _ in range(PUBLIC_REQUESTS):
                await stack.enter_async_context(doors.admitted(request_of(""), True))
            with pytest.raises(HttpError) as error:
                await doors.admitted(request_of(""), True).__aenter__()
            assert refused(error)
            async with doors.admitted(request_of(), False):
                pass

    asyncio.run(main())


def test_bytes_of_a_token_and_in_all_are_bounded_and_given_back() -> None:
    async def main() -> None:
        doors = admission(body_bytes=10, held_bytes_per_token=10, held_bytes=15)
        first, second, other = request_of(), request_of(), request_of(TOKENS[1])
        async with doors.admitted(first, False), doors.admitted(second, False), doors.admitted(other, False):
            first.hold(8)
            with pytest.raises(HttpError) as error:
                second.hold(3)
            assert refused(error)
            other.hold(7)
            with pytest.raises(HttpError) as error:
                second.hold(1)
            assert refused(error)
        async with doors.admitted(first := request_of(), False), doors.admitted(other := request_of(TOKENS[1]), False):
            first.hold(10)
            other.hold(5)

    asyncio.run(main())
