"""How OpenAI's streams end."""

from __future__ import annotations

from djinnd.gateway.errors import Problem, openai_error


def failed(problem: Problem) -> bytes:
    """The event that OpenAI's clients raise as an error."""
    return b"data: " + openai_error(problem) + b"\n\n"
