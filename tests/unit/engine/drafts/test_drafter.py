"""A draft changes no token, whatever it guesses, and stops where it does not pay."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from djinn_client.protocol import Sampling
from djinnd.core.request import Request
from djinnd.core.session import Session
from tests.support.checkpoints import Tensors, altered
from tests.support.drafted import WithDraft
from tests.support.loaded import random_prompt, small_pages
from tests.support.models import reduced_model

FOLDER = reduced_model("llama-2")
VOCAB = 512
SESSIONS = 12


def confuse(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"].roll(7, 0)


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model with the same tokens, which thinks otherwise."""
    return altered(tmp_path_factory.mktemp("stranger"), change=confuse)


def lives(
    draft: Path | None, pages: int, draft_pages: int, temperature: float
) -> tuple[list[list[int]], list[Request], int, int]:
    """The tokens of sessions that join, leave, are cut, forked and paused; their requests; steps, and guesses."""
    chance, requests, steps = random.Random(5), list[Request](), 0
    options = {"plan": small_pages(pages), "max_batch_tokens": 128}
    with WithDraft(FOLDER, draft, small_pages(draft_pages), **options) as served:

        def ask(session: Session, prompt: list[int]) -> None:
            sampling = Sampling(temperature=temperature, seed=len(requests))
            more = {"may_guess": True, "stop_tokens": frozenset([chance.randrange(VOCAB)])}
            requests.append(served.submit(session, prompt, chance.randint(8, 40), sampling, **more))

        sessions = [served.open(tenant=number % 2) for number in range(SESSIONS)]
        for number, session in enumerate(sessions):
            ask(session, random_prompt(chance.randint(3, 90), VOCAB, number))
            steps += sum(served.step() is not None for _ in range(2))
        steps += len(served.run())
        forks = []
        for session in sessions[::2]:
            served.scheduler.truncate(session.id, chance.randrange(5, len(session.tokens)))
            forks.append(served.fork(session))
            for one in (session, forks[-1]):
                ask(one, random_prompt(chance.randint(1, 50), VOCAB, 7))
        steps += len(served.run())
        for session in sessions[1::4]:
            served.scheduler.pause(session.id)
            served.scheduler.resume(session.id)
            ask(session, [3, 4])
        steps += len(served.run())
        return [session.tokens for session in (*sessions, *forks)], requests, steps, served.guesses


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(("pages", "draft_pages"), [(400, 400), (60, 60), (400, 20)])
def test_a_draft_that_thinks_as_its_target_is_right_and_changes_no_token(
    temperature: float, pages: int, draft_pages: int
) -> None:
    tokens, requests, steps, guesses = lives(FOLDER, pages, draft_pages, temperature)
    expected, _, most, none = lives(None, pages, draft_pages, temperature)
    assert tokens == expected
    assert guesses > none == 0
    guessed, kept = (sum(getattr(request, what) for request in requests) for what in ("guessed", "kept"))
    assert kept > 0.97 * guessed > 0
    if draft_pages == 400:
        assert steps < 0.6 * most


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_draft_that_is_wrong_changes_no_token_and_soon_guesses_no_more(temperature: float, stranger: Path) -> None:
    tokens, requests, _, guesses = lives(stranger, 400, 400, temperature)
    expected, *_ = lives(None, 400, 400, temperature)
    assert tokens == expected
    assert 0 < guesses < 0.25 * sum(map(len, tokens))
    assert sum(request.guessed for request in requests) < 200
