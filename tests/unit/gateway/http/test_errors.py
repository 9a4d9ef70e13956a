from __future__ import annotations

import pytest

from djinn_client import errors
from djinnd.gateway.http.errors import problem_of


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (errors.NotAuthenticated("x"), 401, "invalid_api_key"),
        (errors.PromptTooLong("x", max_context=10), 400, "context_length_exceeded"),
        (errors.TokenOutOfRange("x"), 400, "token_out_of_range"),
        (errors.GrammarRejected("x"), 400, "grammar_rejected"),
        (errors.ModelNotFound("x"), 404, "model_not_found"),
        (errors.QuotaExceeded("x"), 429, "quota_exceeded"),
        (errors.NotPermitted("x"), 403, "not_permitted"),
        (errors.SessionBusy("x"), 409, "session_busy"),
        (errors.TextFailed("x"), 422, "text_failed"),
        (errors.Busy("x", retry_s=2.5), 429, "busy"),
        (errors.EngineLost("x"), 503, "engine_lost"),
        (errors.ConnectionLost("x"), 503, "no_daemon"),
        (errors.DjinnError("x"), 500, "error"),
        (ValueError("a secret"), 500, "internal_error"),
    ],
)
def test_each_error_has_its_status_and_code(error, status, code):
    problem = problem_of(error)
    assert (problem.status, problem.code) == (status, code)
    assert "secret" not in problem.message
    assert (problem.retry_s is not None) == (status in (429, 503))


def test_the_daemon_s_time_of_a_retry_and_its_field_are_told():
    assert problem_of(errors.Busy("x", retry_s=2.5)).retry_s == 2.5
    assert problem_of(errors.InvalidRequest("x", field="sampling.seed")).param == "sampling.seed"
    assert problem_of(errors.InvalidRequest("x", field="no field at all")).param is None
