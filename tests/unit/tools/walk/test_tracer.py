from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from tools.walk.tracer import Value

PROMPT = [1201, 1208, 1215]
VALUE = Value("prompt", PROMPT, [b"\x01\x02\x03"])


class Frame(NamedTuple):
    payload: bytes


class Message(msgspec.Struct):
    token_ids: list[int]


@dataclass
class Session:
    tokens: list[int]


class Owner:
    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens


@pytest.mark.parametrize(
    "holder",
    [
        [5, *PROMPT, 6],
        tuple(PROMPT),
        array("i", PROMPT),
        np.array([[5, 5, 5], PROMPT], np.int32),
        b"\x00\x01\x02\x03\x04",
        Frame(memoryview(b"\x01\x02\x03")),
        {"prompt": Message(PROMPT)},
        [[Message(PROMPT)]],
    ],
)
def test_a_container_a_message_or_a_buffer_holds_the_value(holder: Any) -> None:
    assert VALUE.is_in(holder)


@pytest.mark.parametrize(
    "other",
    [None, 1201, True, "1201", [1201, 1208], [1201, 5, 1208, 1215], np.array(PROMPT, np.float32), Message, b"\x01\x02"],
)
def test_another_value_does_not_hold_it(other: Any) -> None:
    assert not VALUE.is_in(other)


def test_one_number_is_also_found_alone() -> None:
    token = Value("token", [777], [])
    assert token.is_in(777) and token.is_in([3, 777]) and not token.is_in(77)


@pytest.mark.parametrize("owner", [Session(PROMPT), Owner(PROMPT)])
def test_the_value_of_a_resting_or_a_serving_object_is_not_followed(owner: object) -> None:
    assert not VALUE.is_in(owner) and not VALUE.is_in([owner])
