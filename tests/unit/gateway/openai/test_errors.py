from __future__ import annotations

import msgspec

from djinn_client import errors
from djinnd.gateway.http.errors import problem_of
from djinnd.gateway.openai.errors import error


def test_an_error_has_openai_s_shape():
    told = msgspec.json.decode(error(problem_of(errors.Busy("wait"))))
    assert told == {"error": {"message": "wait", "type": "rate_limit_error", "param": None, "code": "busy"}}
