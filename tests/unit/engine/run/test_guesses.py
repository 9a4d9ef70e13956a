"""Steps with guesses give the tokens of steps without them, whatever else runs."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from djinn_client.protocol import Placing, Sampling
from djinnd.core.batch import Batch
from djinnd.core.session import Session
from tests.families.configurations import reduced
from tests.support.checkpoints import Tensors, altered, random_model
from tests.support.loaded import Served, random_prompt, small_pages
from tests.support.models import reduced_model, tiny_model

VOCAB = 512
SESSIONS = 16
POISON = 400
FOLDER = reduced_model("llama-2")


def lives(folder: Path, pages: int, may_guess: bool, temperature: float) -> tuple[list[list[int]], int, int]:
    """The tokens of sessions that join and leave, some cut and some forked, how many steps they took, and the tokens of
    guesses that were kept."""
    chance, requests, steps = random.Random(5), [], 0
    with Served(folder, plan=small_pages(pages), max_batch_tokens=64) as served:

        def ask(session: Session, prompt: list[int]) -> None:
            sampling = Sampling(temperature=temperature, seed=len(requests))
            more = {"may_guess": may_guess, "stop_tokens": frozenset([chance.randrange(VOCAB)])}
            requests.append(served.submit(session, prompt, chance.randint(8, 40), sampling, **more))

        sessions = [served.open(tenant=number % 2) for number in range(SESSIONS)]
        for number, session in enumerate(sessions):
            ask(session, random_prompt(chance.randint(3, 12), VOCAB, number) * 3)
            steps += sum(served.step() is not None for _ in range(2))
        steps += len(served.run())
        forks = []
        for session in sessions[::2]:
            served.scheduler.truncate(session.id, chance.randrange(5, len(session.tokens)))
            forks.append(served.fork(session))
            for one in (session, forks[-1]):
                ask(one, one.tokens[-4:])
        steps += len(served.run())
        kept = sum(request.kept for request in requests)
        return [session.tokens for session in (*sessions, *forks)], steps, kept


@pytest.mark.parametrize("temperature", [0.0, 0.3])
@pytest.mark.parametrize("pages", [400, 40], ids=["all fit", "they evict each other"])
def test_guesses_change_no_token(pages: int, temperature: float) -> None:
    tokens, steps, kept = lives(tiny_model(), pages, True, temperature)
    expected, most, none = lives(tiny_model(), pages, False, temperature)
    assert tokens == expected
    assert steps < most and kept > 100 and none == 0


def test_a_tenant_s_next_sessions_take_half_of_the_steps_of_the_first_and_another_s_do_not() -> None:
    """They write the same text, which has no repetition. Step times are unknown: guesses seem to cost nothing."""
    sampling = Sampling(temperature=1.5, seed=3)
    with Served(tiny_model(), plan=small_pages(400)) as served:
        sessions, rates = [], []
        for tenant in (1, 1, 2, 2):
            sessions.append(served.open(tenant=tenant))
            served.submit(sessions[-1], [5, 6, 7], 120, sampling, may_guess=True)
            rates.append(120 / len(served.run()))
        for session in sessions[2:]:
            served.scheduler.close(session.id)
        sessions.append(served.open(tenant=2))
        served.submit(sessions[-1], [5, 6, 7], 120, sampling, may_guess=True)
        rates.append(120 / len(served.run()))
    assert all(session.tokens == sessions[0].tokens for session in sessions)
    assert min(rates[1], rates[3]) >= 2.0
    assert max(rates[0], rates[2], rates[4]) < 1.1


def with_guess(batch: Batch, session: Session, *guess: int) -> Batch:
    """The batch, in which the session's row has this guess."""
    rows = [
        structs.replace(row, count=1 + len(guess), guess=guess) if row.session is session else row for row in batch.rows
    ]
    return replace(batch, rows=tuple(rows))


def poison(tensors: Tensors) -> None:
    tensors["model.embed_tokens.weight"][POISON] = float("nan")


def test_a_guess_with_logits_that_are_no_numbers_costs_a_step_and_no_token(tmp_path: Path) -> None:
    found = []
    for folder, guess in ((FOLDER, ()), (altered(tmp_path, change=poison), (POISON,))):
        with Served(folder, plan=small_pages(100)) as served:
            sessions = [served.open() for _ in range(2)]
            for number, session in enumerate(sessions):
                served.submit(session, random_prompt(9, POISON, number), 4)
            served.step()
            batch = served.scheduler.next_batch()
            assert batch is not None
            sampled = served.runner.run(with_guess(batch, sessions[0], *guess))
            assert list(sampled.late) == ([0] if guess else [])
            served.complete(with_guess(batch, sessions[0], *guess), sampled)
            served.run()
            found.append([session.tokens for session in sessions])
    assert found[0] == found[1]


def test_rows_with_guesses_beside_rows_whose_logits_are_returned() -> None:
    with Served(FOLDER, plan=small_pages(100)) as served:
        session = served.open()
        served.submit(session, random_prompt(9, VOCAB, 1), 8)
        served.run()
        expected, guess = session.tokens[9:], session.tokens[11:14]
        again = served.open(tenant=1)
        served.submit(again, random_prompt(9, VOCAB, 1), 8, logprobs=2)
        for _ in range(2):
            served.step()
        forward = served.submit(served.open(), random_prompt(9, VOCAB, 1))
        batch = served.scheduler.next_batch()
        assert batch is not None and len(batch.rows) == 2
        batch = with_guess(batch, again, *guess)
        sampled = served.runner.run(batch)
        (further,) = sampled.further.values()
        assert [token for token, _ in further] == expected[3:6]
        assert all(logprobs is not None and token in logprobs.top for token, logprobs in further)
        served.complete(batch, sampled)
        assert served.logits_of(forward)[-1].argmax() == expected[0]
        served.run()
        assert again.tokens[9:] == expected


def test_a_model_whose_states_cannot_be_taken_back_runs_no_guesses(tmp_path: Path) -> None:
    hybrid = random_model(tmp_path, reduced("qwen3_5_text"))
    found = []
    for folder, speculation in ((FOLDER, True), (FOLDER, False), (hybrid, True)):
        with Served(folder, placing=Placing(speculation=speculation)) as served:
            found.append(served.runner.speculates)
    assert found == [True, False, False]
