"""The asyncio client of the daemon itself: the calls of DaemonCalls, each awaited."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from djinn_client.admin.daemon_calls import DaemonCalls
from djinn_client.transport.aio_steps import run
from djinn_client.transport.steps import Steps

if TYPE_CHECKING:
    from typing import Self

P = ParamSpec("P")
T = TypeVar("T")


def _awaited(
    steps: Callable[Concatenate[DaemonCalls, P], Steps[T]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """The coroutine function that runs these steps and returns what they return."""

    @wraps(steps)
    async def call(client: AsyncClient, /, *args: P.args, **options: P.kwargs) -> T:
        return await run(steps(client._calls, *args, **options))

    found: Any = call  # mypy sees the type of what it wraps
    return found  # type: ignore[no-any-return]


class AsyncClient:
    """`Client` for asyncio: the same calls, awaited.

        async with djinn.AsyncClient() as client:
            answers = await asyncio.gather(*(client.chat("llama", question) for question in questions))

    As many calls as wanted may run at once, each over a connection of its own. Cancelling a task that waits in a call
    stops its work in the daemon.
    """

    def __init__(self, address: str | None = None, *, token: str | None = None) -> None:
        """`token`: see `Session`."""
        self._calls = DaemonCalls(address, token, nullcontext)

    ping = _awaited(DaemonCalls.ping)
    welcome = _awaited(DaemonCalls.welcome)
    status = _awaited(DaemonCalls.status)
    models = _awaited(DaemonCalls.models)
    points = _awaited(DaemonCalls.points)
    tokenize = _awaited(DaemonCalls.tokenize)
    detokenize = _awaited(DaemonCalls.detokenize)
    tokenizer = _awaited(DaemonCalls.tokenizer)
    generate = _awaited(DaemonCalls.generate)
    chat = _awaited(DaemonCalls.chat)
    embed = _awaited(DaemonCalls.embed)
    keep_record = _awaited(DaemonCalls.keep_record)
    record = _awaited(DaemonCalls.record)
    records = _awaited(DaemonCalls.records)
    drop_record = _awaited(DaemonCalls.drop_record)
    sessions = _awaited(DaemonCalls.sessions)
    quotas = _awaited(DaemonCalls.quotas)
    load = _awaited(DaemonCalls.load)
    plan = _awaited(DaemonCalls.plan)
    set_budget = _awaited(DaemonCalls.set_budget)
    trace = _awaited(DaemonCalls.trace)
    unload = _awaited(DaemonCalls.unload)
    close_session = _awaited(DaemonCalls.close_session)
    pause_session = _awaited(DaemonCalls.pause_session)
    unpause_session = _awaited(DaemonCalls.unpause_session)
    set_priority = _awaited(DaemonCalls.set_priority)
    why = _awaited(DaemonCalls.why)
    publish_prefix = _awaited(DaemonCalls.publish_prefix)
    prefixes = _awaited(DaemonCalls.prefixes)
    withdraw_prefix = _awaited(DaemonCalls.withdraw_prefix)
    add_token = _awaited(DaemonCalls.add_token)
    tokens = _awaited(DaemonCalls.tokens)
    revoke_token = _awaited(DaemonCalls.revoke_token)
    restart = _awaited(DaemonCalls.restart)

    async def close(self) -> None:
        self._calls.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self._calls.close()


def _called_once(name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
    """The call as a function that makes a client for itself."""

    async def call(*args: Any, address: str | None = None, token: str | None = None, **options: Any) -> Any:
        async with AsyncClient(address, token=token) as client:
            return await getattr(client, name)(*args, **options)

    return call


# Names of the last release: djinn_client warns of them.
chat_async, embed_async, generate_async = (_called_once(name) for name in ("chat", "embed", "generate"))
