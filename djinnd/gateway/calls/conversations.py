"""Finds the conversation that a request names, by its fields and headers.

Programs without sessions send the whole transcript each time. Some name the conversation, each in its own way. For the
others the daemon finds the session by the transcript: docs/guide/conversations.md.
"""

from __future__ import annotations

import math

from starlette.datastructures import Headers

from djinn_client.protocol.fields.conversations import Conversation
from djinn_client.protocol.fields.scheduling import CLASSES, Class
from djinnd.gateway.http.errors import HttpError

EXPECTED_WAIT = "x-djinn-expected-wait"  # seconds until the conversation's next call
_KEYS = ("x-session-id", "session-id", "x-conversation-id", "conversation-id")
_TIERS: dict[str, Class | None] = {
    "auto": None,
    "default": None,
    "standard_only": None,
    "scale": None,
    "priority": "interactive",
    "flex": "batch",
    "batch": "batch",
}


def conversation_of(
    headers: Headers,
    model: str,
    *,
    key: str | None = None,
    service_tier: str | None = None,
    priority: int | str | None = None,
) -> Conversation:
    """`key`: the name in the body; without one a header may have it. Raises HttpError."""
    return Conversation(
        model=model,
        key=key or _key_in(headers),
        priority=class_of(service_tier, priority),
        expected_wait_s=_expected_wait(headers),
    )


def class_of(service_tier: str | None, priority: int | str | None) -> Class | None:
    """`priority` counts before `service_tier`: the name of a class, or vLLM's number, where a higher one runs later.
    None: the highest class that the principal may have. Raises HttpError."""
    if isinstance(priority, str):
        if priority not in CLASSES:
            raise HttpError(400, f"priority must be a whole number, or one of {', '.join(CLASSES)}", param="priority")
        return next(each for each in CLASSES if each == priority)
    if priority is not None and priority > 0:
        return "batch"
    if service_tier is None:
        return None
    if service_tier not in _TIERS:
        raise HttpError(400, f"service_tier must be one of {', '.join(_TIERS)}", param="service_tier")
    return _TIERS[service_tier]


def _key_in(headers: Headers) -> str:
    """The value of the first of these headers, written with - or _."""
    found = {name.replace("_", "-"): value for name, value in headers.items() if "session" in name or "conver" in name}
    return next((found[name] for name in _KEYS if name in found), "")


def _expected_wait(headers: Headers) -> float:
    told = headers.get(EXPECTED_WAIT)
    if told is None:
        return 0.0
    try:
        seconds = float(told)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= 86400:
        raise HttpError(400, f"{EXPECTED_WAIT} must be seconds, from 0 to 86400", param=EXPECTED_WAIT)
    return seconds
