from __future__ import annotations

import struct

import pytest

from djinnd.messages import PromptScored
from djinnd.server.runs.prompt_scores import ReceivedScores


def part(*values: float) -> PromptScored:
    ids = struct.pack(f"<{len(values)}i", *(int(-value) for value in values))
    numbers = b"".join(struct.pack("<2f", value, value / 2) for value in values)
    return PromptScored(1, len(values), numbers, ids)


def test_parts_become_one_entry_a_token() -> None:
    scores = ReceivedScores(4, session_tokens=0, likeliest=1)
    assert scores.wanted() == 1
    scores.add(part(-2.0))
    assert scores.told() is None
    scores.add(part(-4.0, -6.0))
    told = scores.told()
    assert told is not None and len(told) == 4
    assert told[0] is None
    assert [(entry.token, entry.top) for entry in told if entry] == [(-2, {2: -1}), (-4, {4: -2}), (-6, {6: -3})]
    assert told[-1] == told[3]
    with pytest.raises(IndexError):
        told[4]


def test_the_first_token_behind_others_has_an_entry() -> None:
    scores = ReceivedScores(1, session_tokens=7, likeliest=1)
    scores.add(part(-2.0))
    told = scores.told()
    assert told is not None and told[0] is not None


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_prompt_of_which_nothing_can_be_told(tokens: int) -> None:
    scores = ReceivedScores(tokens, session_tokens=0, likeliest=0)
    assert scores.wanted() is None
    told = scores.told()
    assert told is not None and list(told) == [None] * tokens


def test_the_next_engine_is_asked_for_all_that_a_lost_one_had_not_finished() -> None:
    scores = ReceivedScores(3, session_tokens=9, likeliest=1)
    scores.add(part(-2.0))
    assert scores.wanted() == 1
    scores.add(part(-4.0, -6.0, -8.0))
    assert scores.wanted() is None
    told = scores.told()
    assert told is not None and [entry.token for entry in told if entry] == [-4, -6, -8]
