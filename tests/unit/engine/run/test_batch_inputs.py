from __future__ import annotations

import numpy as np
import pytest
from msgspec import structs

from djinnd.core.batch import Row
from djinnd.core.edits import FOREVER
from djinnd.core.request import Request
from djinnd.core.session import Session
from djinnd.device.cpu import CpuDevice
from djinnd.engine.run.batch_inputs import _compose_chunks, compose, in_order, told_positions
from djinnd.model.sampling.sampler import Sampled
from djinnd.model.step.inputs import StepInputs


def row(number: int, start: int, count: int, *, samples: bool = True, logits: bool = False, seen: int = FOREVER) -> Row:
    session = Session(f"s{number}", "m", 0, "agent", list(range(100 * number, 100 * number + 50)))
    return Row(session, Request(number, 0, 50, 0, logits=logits, seen_from=seen), start, count, 0, 4, samples)


def test_rows_are_contiguous_at_their_positions_and_pages() -> None:
    device = CpuDevice(1 << 20)
    inputs = StepInputs(device, tokens=8, rows=3, width=4)
    table = np.array([[7, 5, 0], [2, 9, 4]], np.int32)
    compose(inputs, [row(1, 3, 3), row(2, 8, 1)], table, page_size=4)
    host = inputs.host
    assert host["ids"][:4].tolist() == [103, 104, 105, 208]
    assert host["positions"][:4].tolist() == [3, 4, 5, 8]
    assert host["slots"][:4].tolist() == [7 * 4 + 3, 5 * 4, 5 * 4 + 1, 4 * 4]
    assert host["starts"][:3].tolist() == [0, 3, 4]
    assert host["lengths"][:2].tolist() == [6, 9]
    assert host["table"][:2, :3].tolist() == table.tolist()
    device.close()


def test_the_tokens_of_a_guess_follow_the_session_s_last_one() -> None:
    device = CpuDevice(1 << 20)
    inputs = StepInputs(device, tokens=8, rows=3, width=4)
    guessed = structs.replace(row(1, 49, 3), guess=(8, 9))
    compose(inputs, [row(2, 8, 1), guessed], np.arange(1, 9, dtype=np.int32).reshape(2, 4), page_size=16)
    assert inputs.host["ids"][:4].tolist() == [208, 149, 8, 9]
    assert inputs.host["positions"][:4].tolist() == [8, 49, 50, 51]
    assert inputs.host["lengths"][:2].tolist() == [9, 52]
    device.close()


@pytest.mark.parametrize("starts", [[0], [9], [3, 11, 4], [15, 0]])
def test_rows_of_one_token_are_composed_like_chunks_of_one(starts: list[int]) -> None:
    device = CpuDevice(1 << 20)
    found, wanted = (StepInputs(device, tokens=3, rows=3, width=4) for _ in range(2))
    rows = [row(number, start, 1) for number, start in enumerate(starts)]
    table = np.arange(1, 4 * len(rows) + 1, dtype=np.int32).reshape(len(rows), 4)
    compose(found, rows, table, page_size=4)
    _compose_chunks(wanted, rows, table, page_size=4)
    for name in ("ids", "positions", "slots", "starts", "lengths"):
        count = len(rows) + (name == "starts")
        assert found.host[name][:count].tolist() == wanted.host[name][:count].tolist(), name
    assert found.host["table"][: len(rows)].tolist() == table.tolist()
    device.close()


@pytest.mark.parametrize(("start", "told"), [(0, []), (8, [10, 11]), (10, [10, 11, 12, 13]), (20, [20, 21, 22, 23])])
def test_logits_are_returned_from_the_first_wanted_position(start: int, told: list[int]) -> None:
    assert list(told_positions(row(1, start, 4, logits=True, seen=10))) == told
    assert not told_positions(row(1, start, 4, seen=10))


@pytest.mark.parametrize(("start", "told"), [(0, []), (8, [10, 11]), (46, [46, 47, 48]), (49, []), (50, [])])
def test_a_prompt_is_scored_up_to_the_position_before_its_last_token(start: int, told: list[int]) -> None:
    scored = row(1, start, 4, seen=10)
    scored.request.prompt_logprobs = 0
    assert list(told_positions(scored)) == told


def test_sampled_tokens_are_put_into_the_wanted_order() -> None:
    a, b, c, silent = row(1, 0, 1), row(2, 0, 1), row(3, 0, 1), row(4, 0, 1, samples=False)
    sampled = Sampled([30, 10, 20], [None, None, None], [2], [1], {0: [(31, None)]})
    found = in_order(sampled, [c, a, b], [a, silent, b, c])
    assert (found.tokens, found.unsound, found.late, found.further) == ([10, 20, 30], [1], [0], {2: [(31, None)]})
