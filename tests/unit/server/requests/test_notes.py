from __future__ import annotations

from typing import Any

import pytest

from djinn_client.protocol import Generate, Generated, ModelInfo, Timings, Usage
from djinnd.server.requests.notes import QUANTISED, ROUNDED, WANTS_CHAT, notes_on

PLAIN = ModelInfo(name="m", path="")
FP8 = ModelInfo(name="m", path="", quantised="fp8")
BOTH = ModelInfo(name="m", path="", quantised="int8", kv_dtype="fp8")


def told(
    text: str | None = "What is the capital of France?",
    has_chat: bool = True,
    token: int = 2,
    info: ModelInfo = PLAIN,
    **reply: Any,
) -> list[str]:
    fields: dict[str, Any] = {"finish_reason": "stop", "usage": Usage(generated_tokens=1)} | reply
    given = Generated(id=1, text="", token_ids=[], timings=Timings(), **fields)
    return notes_on(Generate(id=1, session="s", text=text), given, [5, token], {2, 3}, has_chat, info)


def test_a_text_that_a_chat_model_ends_at_once() -> None:
    assert told() == [WANTS_CHAT]


@pytest.mark.parametrize(
    "other",
    [
        {"has_chat": False},
        {"text": None},
        {"token": 7},
        {"usage": Usage(generated_tokens=2)},
        {"finish_reason": "length"},
    ],
    ids=str,
)
def test_nothing_is_said_of_any_other_reply(other: dict[str, Any]) -> None:
    assert told(**other) == []


def test_every_reply_of_a_quantised_model_says_so() -> None:
    assert told(info=FP8, token=7) == [QUANTISED.format("fp8")]
    assert told(info=BOTH) == [WANTS_CHAT, QUANTISED.format("int8"), ROUNDED.format("fp8")]
