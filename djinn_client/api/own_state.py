"""The part of a session that is in the caller's process: reading it asks the daemon nothing."""

from __future__ import annotations

from collections.abc import Iterable

from djinn_client.arguments.messages import Message
from djinn_client.protocol import SessionInfo
from djinn_client.session.calls import SessionCalls


class OwnState:
    """The common part of `Session` and `AsyncSession`."""

    _calls: SessionCalls

    @property
    def id(self) -> str:
        return self._calls.info.id

    @property
    def info(self) -> SessionInfo:
        """The session as it was when it was opened or attached; `djinn.sessions()` has it as it is now."""
        return self._calls.info

    @property
    def messages(self) -> list[Message]:
        """The chat so far, answers included. It is kept in this object, not in the daemon, and may be changed or set.
        After attach() it is empty. `s.chat(s.messages[:-1])` regenerates the last answer."""
        return self._calls.messages

    @messages.setter
    def messages(self, messages: Iterable[Message]) -> None:
        self._calls.messages = list(messages)
