"""How an output ended."""

from __future__ import annotations

from djinnd.gateway.http.errors import HttpError


def finish_reason(told: str) -> str:
    """OpenAI's word. Raises HttpError for an output that was ended from outside."""
    if told == "cancelled":
        raise HttpError(499, "this request was ended by another client before it was complete", code="cancelled")
    return "length" if told == "length" else "stop"
