"""The asyncio client of the daemon itself: the calls of DaemonCalls, each awaited."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from djinn_client.admin.daemon_calls import DaemonCalls
from djinn_client.transport.aio_steps import awaited

if TYPE_CHECKING:
    from typing import Self


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

    ping = awaited(DaemonCalls.ping)
    welcome = awaited(DaemonCalls.welcome)
    status = awaited(DaemonCalls.status)
    models = awaited(DaemonCalls.models)
    points = awaited(DaemonCalls.points)
    tokenize = awaited(DaemonCalls.tokenize)
    detokenize = awaited(DaemonCalls.detokenize)
    tokenizer = awaited(DaemonCalls.tokenizer)
    generate = awaited(DaemonCalls.generate)
    chat = awaited(DaemonCalls.chat)
    embed = awaited(DaemonCalls.embed)
    keep_record = awaited(DaemonCalls.keep_record)
    record = awaited(DaemonCalls.record)
    records = awaited(DaemonCalls.records)
    drop_record = awaited(DaemonCalls.drop_record)
    sessions = awaited(DaemonCalls.sessions)
    quotas = awaited(DaemonCalls.quotas)
    load = awaited(DaemonCalls.load)
    plan = awaited(DaemonCalls.plan)
    set_budget = awaited(DaemonCalls.set_budget)
    trace = awaited(DaemonCalls.trace)
    unload = awaited(DaemonCalls.unload)
    adapters = awaited(DaemonCalls.adapters)
    load_adapter = awaited(DaemonCalls.load_adapter)
    unload_adapter = awaited(DaemonCalls.unload_adapter)
    close_session = awaited(DaemonCalls.close_session)
    pause_session = awaited(DaemonCalls.pause_session)
    unpause_session = awaited(DaemonCalls.unpause_session)
    set_priority = awaited(DaemonCalls.set_priority)
    why = awaited(DaemonCalls.why)
    publish_prefix = awaited(DaemonCalls.publish_prefix)
    prefixes = awaited(DaemonCalls.prefixes)
    withdraw_prefix = awaited(DaemonCalls.withdraw_prefix)
    add_token = awaited(DaemonCalls.add_token)
    tokens = awaited(DaemonCalls.tokens)
    revoke_token = awaited(DaemonCalls.revoke_token)
    restart = awaited(DaemonCalls.restart)

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
