"""The blocking client of the daemon itself: the calls of DaemonCalls, each run to its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from djinn_client.admin.daemon_calls import DaemonCalls
from djinn_client.admin.loading_line import loading_line
from djinn_client.old_names import warn_of
from djinn_client.transport.steps import blocking

if TYPE_CHECKING:
    from typing import Self


class Client:
    """Calls on the daemon itself, over connections that are kept from one call to the next. Threads may share it.

    Every call raises ConnectionLost if no daemon answers, and otherwise the daemon's own error.
    """

    def __init__(self, address: str | None = None, *, token: str | None = None) -> None:
        """`token`: see `Session`."""
        self._calls = DaemonCalls(address, token, loading_line)

    ping = blocking(DaemonCalls.ping)
    welcome = blocking(DaemonCalls.welcome)
    status = blocking(DaemonCalls.status)
    models = blocking(DaemonCalls.models)
    points = blocking(DaemonCalls.points)
    tokenize = blocking(DaemonCalls.tokenize)
    detokenize = blocking(DaemonCalls.detokenize)
    tokenizer = blocking(DaemonCalls.tokenizer)
    generate = blocking(DaemonCalls.generate)
    chat = blocking(DaemonCalls.chat)
    embed = blocking(DaemonCalls.embed)
    keep_record = blocking(DaemonCalls.keep_record)
    record = blocking(DaemonCalls.record)
    records = blocking(DaemonCalls.records)
    drop_record = blocking(DaemonCalls.drop_record)
    sessions = blocking(DaemonCalls.sessions)
    quotas = blocking(DaemonCalls.quotas)
    load = blocking(DaemonCalls.load)
    plan = blocking(DaemonCalls.plan)
    set_budget = blocking(DaemonCalls.set_budget)
    trace = blocking(DaemonCalls.trace)
    unload = blocking(DaemonCalls.unload)
    adapters = blocking(DaemonCalls.adapters)
    load_adapter = blocking(DaemonCalls.load_adapter)
    unload_adapter = blocking(DaemonCalls.unload_adapter)
    close_session = blocking(DaemonCalls.close_session)
    pause_session = blocking(DaemonCalls.pause_session)
    unpause_session = blocking(DaemonCalls.unpause_session)
    set_priority = blocking(DaemonCalls.set_priority)
    why = blocking(DaemonCalls.why)
    publish_prefix = blocking(DaemonCalls.publish_prefix)
    prefixes = blocking(DaemonCalls.prefixes)
    withdraw_prefix = blocking(DaemonCalls.withdraw_prefix)
    add_token = blocking(DaemonCalls.add_token)
    tokens = blocking(DaemonCalls.tokens)
    revoke_token = blocking(DaemonCalls.revoke_token)
    restart = blocking(DaemonCalls.restart)

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
