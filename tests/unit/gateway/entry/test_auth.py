from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from djinnd.gateway.entry import auth
from djinnd.gateway.http.errors import HttpError


@pytest.mark.parametrize(
    ("headers", "token"),
    [
        ({}, ""),
        ({"authorization": "Bearer djn_a"}, "djn_a"),
        ({"authorization": "bearer  djn_a "}, "djn_a"),
        ({"authorization": "Basic djn_a"}, ""),
        ({"authorization": "Bearer ", "x-api-key": "djn_b"}, "djn_b"),
        ({"api-key": "djn_c"}, "djn_c"),
    ],
)
def test_tokens(headers, token):
    assert auth.token_of(Headers(headers)) == token


@pytest.mark.parametrize("given", ["x" * 1000, "djn_\u00e9"])
def test_a_text_that_is_no_token_is_refused(given):
    with pytest.raises(HttpError):
        auth.token_of({"authorization": f"Bearer {given}"})
