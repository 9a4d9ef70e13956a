from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from djinnd.core.batch import Batch, Row
from djinnd.core.request import Request
from djinnd.core.session import Session
from djinnd.engine.run.step_threads import StepThreads, ThreadChoice
from djinnd.engine.tuning import FIRST_THREAD_TRIAL, RAREST_THREAD_TRIAL, THREAD_TRIAL_STEPS

QUIET = {1: 0.060, 2: 0.035, 4: 0.020, 8: 0.012}  # seconds of a step, by threads
BUSY = {1: 0.060, 2: 0.080, 4: 0.120, 8: 0.480}
A_WHILE = 20 * FIRST_THREAD_TRIAL


def run(choice: ThreadChoice, steps: int, seconds: dict[int, float]) -> list[int]:
    """The threads of each step."""
    used = []
    for _ in range(steps):
        used.append(choice.threads)
        choice.took(seconds[choice.threads])
    return used


@pytest.mark.parametrize("most", [2, 4, 8])
def test_all_threads_stay_where_they_are_fastest(most: int) -> None:
    used = run(ThreadChoice(most), A_WHILE, QUIET)
    assert used[0] == used[-1] == most
    assert set(used) == {most, most // 2}


@pytest.mark.parametrize("most", [2, 4, 8])
def test_one_thread_stays_where_others_wait_for_a_core(most: int) -> None:
    late = run(ThreadChoice(most), A_WHILE, BUSY)[A_WHILE // 2 :]
    assert late.count(1) > 0.9 * len(late)
    assert set(late) <= {1, 2}


def test_a_number_in_between_is_found() -> None:
    used = run(ThreadChoice(8), A_WHILE, {1: 0.05, 2: 0.03, 4: 0.04, 8: 0.06})
    assert used[-1] == 2
    assert {1, 4} < set(used)  # both neighbours lost


def test_the_choice_follows_the_machine() -> None:
    choice = ThreadChoice(2)
    assert run(choice, A_WHILE, BUSY)[-1] == 1
    assert run(choice, RAREST_THREAD_TRIAL + A_WHILE, QUIET)[-1] == 2
    assert run(choice, RAREST_THREAD_TRIAL + A_WHILE, BUSY)[-1] == 1


def test_trials_become_rare() -> None:
    choice = ThreadChoice(2)
    run(choice, 4 * RAREST_THREAD_TRIAL, QUIET)
    tried = run(choice, 10 * RAREST_THREAD_TRIAL, QUIET).count(1)
    assert 0 < tried <= 10 * THREAD_TRIAL_STEPS


def test_a_trial_that_takes_much_longer_ends_after_one_step() -> None:
    used = run(ThreadChoice(2), FIRST_THREAD_TRIAL + 2, {1: 0.5, 2: 0.1})
    assert used == [*[2] * FIRST_THREAD_TRIAL, 1, 2]


def test_steps_of_a_trial_are_apart() -> None:
    used = run(ThreadChoice(2), 2 * FIRST_THREAD_TRIAL, QUIET)
    at = [step for step, threads in enumerate(used) if threads == 1]
    assert at == [FIRST_THREAD_TRIAL + 3 * step for step in range(THREAD_TRIAL_STEPS)]


def test_one_slow_step_changes_nothing() -> None:
    choice = ThreadChoice(2)
    run(choice, FIRST_THREAD_TRIAL - 1, QUIET)
    choice.took(100 * QUIET[2])
    assert run(choice, A_WHILE, QUIET)[-1] == 2


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def batch(*counts: int) -> Batch:
    rows = []
    for number, count in enumerate(counts):
        session = Session(f"s{number}", "m", 0, "interactive", tokens=[1] * count)
        rows.append(Row(session, Request(number, 0, count, 0), 0, count, 0, 4, samples=True))
    return Batch("m", tuple(rows), 1)


@pytest.mark.usefixtures("four_threads")
def test_torch_has_all_threads_between_steps_and_for_chunks() -> None:
    threads = StepThreads()
    used = []
    for _ in range(FIRST_THREAD_TRIAL + 1):
        with threads.of(batch(1, 1)):
            used.append(torch.get_num_threads())
        assert torch.get_num_threads() == 4
    assert used == [*[4] * FIRST_THREAD_TRIAL, 2]
    with threads.of(batch(1, 9)):
        assert torch.get_num_threads() == 4
    with threads.of(batch(1)):  # steps of another size have a choice of their own
        assert torch.get_num_threads() == 4


@pytest.mark.usefixtures("four_threads")
def test_a_step_that_fails_gives_the_threads_back() -> None:
    threads = StepThreads()
    for _ in range(FIRST_THREAD_TRIAL + 1):
        with pytest.raises(ZeroDivisionError), threads.of(batch(1)):
            raise ZeroDivisionError
        assert torch.get_num_threads() == 4
