"""The blocking client of the daemon itself: the calls of DaemonCalls, each run to its end."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from djinn_client.admin.daemon_calls import DaemonCalls
from djinn_client.admin.loading_line import loading_line
from djinn_client.old_names import warn_of
from djinn_client.transport.steps import Steps, run

if TYPE_CHECKING:
    from typing import Self

P = ParamSpec("P")
T = TypeVar("T")


def _blocking(steps: Callable[Concatenate[DaemonCalls, P], Steps[T]]) -> Callable[Concatenate[Client, P], T]:
    """The method that runs these steps and returns what they return."""

    @wraps(steps)
    def call(client: Client, /, *args: P.args, **options: P.kwargs) -> T:
        return run(steps(client._calls, *args, **options))

    found: Any = call  # mypy sees the type of what it wraps
    return found  # type: ignore[no-any-return]


class Client:
    """Calls on the daemon itself, over connections that are kept from one call to the next. Threads may share it.

    Every call raises ConnectionLost where no daemon answers, and the daemon's own error otherwise.
    """

    def __init__(self, address: str | None = None, *, token: str | None = None) -> None:
        """`token`: see `Session`."""
        self._calls = DaemonCalls(address, token, loading_line)

    ping = _blocking(DaemonCalls.ping)
    welcome = _blocking(DaemonCalls.welcome)
    status = _blocking(DaemonCalls.status)
    models = _blocking(DaemonCalls.models)
    points = _blocking(DaemonCalls.points)
    tokenize = _blocking(DaemonCalls.tokenize)
    detokenize = _blocking(DaemonCalls.detokenize)
    tokenizer = _blocking(DaemonCalls.tokenizer)
    generate = _blocking(DaemonCalls.generate)
    chat = _blocking(DaemonCalls.chat)
    embed = _blocking(DaemonCalls.embed)
    keep_record = _blocking(DaemonCalls.keep_record)
    record = _blocking(DaemonCalls.record)
    records = _blocking(DaemonCalls.records)
    drop_record = _blocking(DaemonCalls.drop_record)
    sessions = _blocking(DaemonCalls.sessions)
    quotas = _blocking(DaemonCalls.quotas)
    load = _blocking(DaemonCalls.load)
    plan = _blocking(DaemonCalls.plan)
    set_budget = _blocking(DaemonCalls.set_budget)
    trace = _blocking(DaemonCalls.trace)
    unload = _blocking(DaemonCalls.unload)
    close_session = _blocking(DaemonCalls.close_session)
    pause_session = _blocking(DaemonCalls.pause_session)
    unpause_session = _blocking(DaemonCalls.unpause_session)
    set_priority = _blocking(DaemonCalls.set_priority)
    why = _blocking(DaemonCalls.why)
    publish_prefix = _blocking(DaemonCalls.publish_prefix)
    prefixes = _blocking(DaemonCalls.prefixes)
    withdraw_prefix = _blocking(DaemonCalls.withdraw_prefix)
    add_token = _blocking(DaemonCalls.add_token)
    tokens = _blocking(DaemonCalls.tokens)
    revoke_token = _blocking(DaemonCalls.revoke_token)
    restart = _blocking(DaemonCalls.restart)

    def resume_session(self, session: str) -> None:
        """The old name of `unpause_session`."""
        warn_of("resume_session", "unpause_session", stacklevel=2)
        self.unpause_session(session)

    def close(self) -> None:
        self._calls.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
