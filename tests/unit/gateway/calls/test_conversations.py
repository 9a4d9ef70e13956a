from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from djinnd.gateway.calls.conversations import class_of, conversation_of
from djinnd.gateway.http.errors import HttpError


@pytest.mark.parametrize(
    ("tier", "priority", "found"),
    [
        (None, None, None),
        ("auto", None, None),
        ("flex", None, "batch"),
        ("priority", None, "interactive"),
        ("flex", "agent", "agent"),
        (None, 0, None),
        (None, 5, "batch"),
    ],
)
def test_classes(tier, priority, found):
    assert class_of(tier, priority) == found


@pytest.mark.parametrize(("tier", "priority"), [("gold", None), (None, "royal")])
def test_classes_that_there_are_not(tier, priority):
    with pytest.raises(HttpError):
        class_of(tier, priority)


def test_a_conversation_s_name():
    headers = Headers({"X-Session-ID": "from header", "x-djinn-expected-wait": "1.5"})
    assert conversation_of(headers, "m", key="from body").key == "from body"
    found = conversation_of(headers, "m")
    assert (found.key, found.expected_wait_s) == ("from header", 1.5)
    assert conversation_of(Headers({"session_id": "a"}), "m").key == "a"
    for wrong in ("soon", "-1", "nan", "1e9"):
        with pytest.raises(HttpError):
            conversation_of(Headers({"x-djinn-expected-wait": wrong}), "m")
