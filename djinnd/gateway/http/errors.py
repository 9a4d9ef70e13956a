"""Finds the HTTP status and the code of an error.

Each API has its own shape of an error (`entry.route.Api`), and writes a Problem in it.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from djinn_client import errors


class Problem(NamedTuple):
    """An error with its HTTP status. `param` names the field at fault. `retry_s`: when a client may try again."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    retry_s: float | None = None


class HttpError(Exception):
    """The gateway refuses a request by itself."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.problem = Problem(status, message, code, param, retry_s)


def unauthorised(message: str) -> HttpError:
    return HttpError(401, message, code="invalid_api_key")


class ClientGone(Exception):
    """The client has closed its connection before its request was answered."""


# The first class that an error is an instance of decides. `None` keeps the error's own code.
_STATUSES: list[tuple[type[errors.DjinnError], int, str | None]] = [
    (errors.NotAuthenticated, 401, "invalid_api_key"),
    (errors.PromptTooLong, 400, "context_length_exceeded"),
    (errors.InvalidRequest, 400, None),
    (errors.ModelNotFound, 404, "model_not_found"),
    (errors.NotFound, 404, None),
    (errors.QuotaExceeded, 429, None),
    (errors.NotPermitted, 403, None),
    (errors.SessionBusy, 409, None),
    (errors.SessionLost, 409, None),
    (errors.TextFailed, 422, None),
    (errors.ModelRejected, 422, None),
    (errors.FunctionFailed, 422, None),
    (errors.FrameTooLarge, 413, None),
    (errors.Cancelled, 499, None),
    (errors.Busy, 429, None),
    (errors.Retry, 503, None),
    (errors.OutOfMemory, 503, None),
]
_RETRY_S = 1.0  # where the daemon gives no time


def problem_of(error: BaseException) -> Problem:
    """Details of an unforeseen error, and the address of a daemon that is gone, are for the gateway's log only."""
    if isinstance(error, HttpError):
        return error.problem
    if isinstance(error, RecursionError):  # only bodies are read recursively
        return Problem(400, "the body is nested too deeply", "invalid_request")
    if isinstance(error, errors.ConnectionLost):
        told = "the gateway's connection to the daemon was lost, or there is no daemon: try again"
        return Problem(503, told, "no_daemon", retry_s=_RETRY_S)
    if not isinstance(error, errors.DjinnError):
        return Problem(500, "the gateway failed: its log has the details", "internal_error")
    status, code = next(((s, c) for kind, s, c in _STATUSES if isinstance(error, kind)), (500, None))
    return Problem(status, _told(error), code or error.code, _field(error.data), _retry_s(status, error.data))


def _told(error: errors.DjinnError) -> str:
    """litellm knows a prompt that is too long by OpenAI's own words, so these come first."""
    limit = error.data.get("max_context")
    if isinstance(error, errors.PromptTooLong) and isinstance(limit, int):
        return f"This model's maximum context length is {limit} tokens: {error.message}"
    return error.message


def _field(data: dict[str, Any]) -> str | None:
    field = data.get("field")
    return field if isinstance(field, str) and re.fullmatch(r"[\w.\[\]]{1,64}", field) else None


def _retry_s(status: int, data: dict[str, Any]) -> float | None:
    told = data.get("retry_s")
    if isinstance(told, int | float) and told >= 0:
        return float(told)
    return _RETRY_S if status in (429, 503) else None
