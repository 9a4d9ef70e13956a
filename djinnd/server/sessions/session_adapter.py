"""The adapter that a session was opened with."""

from __future__ import annotations

from typing import NamedTuple


class SessionAdapter(NamedTuple):
    """The name helps to find the files again; the identity says what they must contain."""

    name: str
    identity: bytes
