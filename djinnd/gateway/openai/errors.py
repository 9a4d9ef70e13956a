"""OpenAI's shape of an error: of a response that refuses, and of a stream that cannot go on."""

from __future__ import annotations

from djinnd.gateway.entry.route import Api
from djinnd.gateway.http.errors import Problem
from djinnd.gateway.http.replies import encode

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    499: "request_cancelled",
}


def error(problem: Problem) -> bytes:
    """`type` follows from the status, as OpenAI's clients expect it."""
    kind = _TYPES.get(problem.status, "server_error" if problem.status >= 500 else "invalid_request_error")
    told = {"message": problem.message, "type": kind, "param": problem.param, "code": problem.code}
    return encode({"error": told})


def failed(problem: Problem) -> bytes:
    """The event that OpenAI's clients raise as an error."""
    return b"data: " + error(problem) + b"\n\n"


OPENAI = Api(error, failed)
