from __future__ import annotations

import pytest
import torch

from djinn_client.protocol import Sampling
from djinnd.core.session import Session
from djinnd.model.sampling.token_marks import BLANK, GENERATED, SEEN, Penalties, TokenMarks, penalised
from tests.support.sampling import wanting

VOCAB = 10
BOTH = SEEN | GENERATED


def marks_of(marks: TokenMarks, session: Session) -> dict[int, int]:
    assert session.request is not None
    row = marks.rows(torch.tensor([marks.slot(session.request)]))[0].tolist()
    return {token: mark for token, mark in enumerate(row) if mark}


def followed(marks: TokenMarks, session: Session) -> dict[int, int]:
    assert session.request is not None
    marks.slot(session.request)
    marks.follow([session])
    return marks_of(marks, session)


def new_marks() -> TokenMarks:
    return TokenMarks(VOCAB, torch.device("cpu"))


def test_the_prompt_is_marked_and_the_output_is_counted():
    marks = followed(new_marks(), wanting(Sampling(), [1, 2, 2], [2, 3, 3, 3]))
    assert marks == {1: SEEN, 2: BOTH, 3: 3 * GENERATED}


def test_only_new_tokens_are_marked():
    marks, session = new_marks(), wanting(Sampling(), [1])
    assert followed(marks, session) == {1: SEEN}
    session.tokens += [4, 1]
    assert followed(marks, session) == {1: BOTH, 4: GENERATED}
    session.tokens[0] = 9  # would be marked if it were read again
    session.tokens.append(4)
    assert followed(marks, session) == {1: BOTH, 4: 2 * GENERATED}


def test_counts_do_not_overflow() -> None:
    marks, session = new_marks(), wanting(Sampling(), [1], [1] * 40_000)
    assert followed(marks, session) == {1: 32_001}
    session.tokens += [1, 1]
    assert followed(marks, session) == {1: 32_001}


def test_tokens_past_the_head_are_left_out():
    assert followed(new_marks(), wanting(Sampling(), [1, VOCAB, VOCAB + 5])) == {1: SEEN}


def test_a_slot_is_blank_for_its_next_owner():
    marks = new_marks()
    first, second = wanting(Sampling(), [1, 2]), wanting(Sampling(), [3])
    assert followed(marks, first) == {1: SEEN, 2: SEEN}
    assert first.request is not None and second.request is not None
    slot = marks.slot(first.request)
    marks.forget(first.request)
    assert marks.slot(second.request) == slot
    assert followed(marks, second) == {3: SEEN}


def test_slots_grow_and_keep_what_they_hold():
    marks = new_marks()
    sessions = [wanting(Sampling(), [token]) for token in range(VOCAB)]
    for session in sessions:
        followed(marks, session)
    assert [marks_of(marks, session) for session in sessions] == [{token: SEEN} for token in range(VOCAB)]
    slots = {marks.slot(session.request) for session in sessions if session.request}
    assert len(slots) == VOCAB and BLANK not in slots
    assert not marks.rows(torch.tensor([BLANK])).any()


def test_truncation_during_a_request_needs_forget():
    marks, session = new_marks(), wanting(Sampling(), [1, 2], [3])
    followed(marks, session)
    session.tokens.pop()
    with pytest.raises(AssertionError):
        marks.follow([session])
    assert session.request is not None
    marks.forget(session.request)
    assert followed(marks, session) == {1: SEEN, 2: SEEN}


def test_penalties_follow_their_formulas():
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0, 2.0, -torch.inf]])
    marks = torch.tensor([[SEEN, SEEN, BOTH, 3 * GENERATED, 0, SEEN]], dtype=torch.int16)
    repetition, presence, frequency = torch.tensor([[4.0]]), torch.tensor([[0.5]]), torch.tensor([[0.25]])
    result = penalised(logits, marks, Penalties(repetition, presence))
    assert result.tolist() == [[0.5, -8.0, 0.0, -8.5, 2.0, -torch.inf]]
    result = penalised(logits, marks, Penalties(repetition, presence, frequency))
    assert result.tolist() == [[0.5, -8.0, -0.25, -9.25, 2.0, -torch.inf]]


def test_penalties_that_are_off_change_no_bit():
    logits = torch.tensor([[0.1, -0.0, 0.0, -3.3, 1e-40, -torch.inf]])
    marks = torch.full(logits.shape, BOTH, dtype=torch.int16)
    result = penalised(logits, marks, Penalties(torch.ones(1, 1), torch.zeros(1, 1), torch.zeros(1, 1)))
    assert torch.equal(result.view(torch.int32), logits.view(torch.int32))
