"""Conversations of programs without sessions: each call brings the whole transcript, and the daemon finds the session.
The daemon keeps a session for each such conversation and continues it, so that a call computes only the new part of its
prompt. See docs/guide/conversations.md.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from djinn_client.errors import InvalidRequest
from djinn_client.protocol.fields.bounds import Name
from djinn_client.protocol.fields.scheduling import Class
from djinn_client.protocol.fields.signals import MAX_EXPECTED_S

MAX_KEY = 256  # characters
MAX_RECORD_NAME = 64

RecordName = Annotated[str, msgspec.Meta(max_length=MAX_RECORD_NAME)]


class Conversation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """In a Generate without a session: the daemon chooses the session, and the prompt is the whole transcript.

    The daemon takes the session that this user's earlier calls with the same `key` used. Without a key it takes the
    user's idle session that shares the longest prefix with the prompt, if the prefix includes the session's last
    prompt. Otherwise it opens a new one. With `after`, the name of a record of this user, the call continues from that
    record; a text or token prompt is then appended to its tokens.

    `expected_wait_s`: seconds until the conversation's next call, if the caller knows; the session's pages may leave
    the device until then. 0: not known."""

    model: Name
    key: Name = ""
    after: Name = ""
    priority: Class | None = None  # None: the highest that the user may have
    expected_wait_s: float = 0.0

    def validate(self) -> None:
        """Raises InvalidRequest."""
        if not self.model:
            raise InvalidRequest("a conversation needs the name of its model", field="conversation.model")
        if len(self.key) > MAX_KEY:
            raise InvalidRequest(
                f"a conversation's key has {len(self.key):,} characters: at most {MAX_KEY}", field="conversation.key"
            )
        if not 0.0 <= self.expected_wait_s <= MAX_EXPECTED_S:  # NaN is neither
            raise InvalidRequest(
                f"expected_wait_s is {self.expected_wait_s:g}; it must be from 0 (not known) to {MAX_EXPECTED_S:g} "
                "seconds, a day",
                field="conversation.expected_wait_s",
            )


class RecordInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A record: a point of a session, with the caller's own bytes."""

    record: str
    model: str
    session: str  # that it was made of, and that may be gone
    length: int  # tokens
    nbytes: int  # of its body
    created: float  # seconds since 1970
