"""A draft changes no token, whatever it guesses, and stops where it does not pay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from djinn_client.protocol import Sampling
from djinnd.core.tuning import DRAFTS
from djinnd.engine.drafts import drafter
from tests.support.checkpoints import Tensors, altered
from tests.support.drafted import WithDraft, lives
from tests.support.loaded import small_pages
from tests.support.models import reduced_model

FOLDER = reduced_model("llama-2")
VOCAB = 512


def confuse(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"].roll(7, 0)


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model with the same tokens, which thinks otherwise."""
    return altered(tmp_path_factory.mktemp("stranger"), change=confuse)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(("pages", "draft_pages"), [(400, 400), (60, 60), (400, 20)])
def test_a_draft_that_thinks_as_its_target_is_right_and_changes_no_token(
    temperature: float, pages: int, draft_pages: int
) -> None:
    tokens, requests, steps, guesses = lives(FOLDER, FOLDER, pages, draft_pages, temperature)
    expected, _, most, none = lives(FOLDER, None, pages, draft_pages, temperature)
    assert tokens == expected
    assert guesses > none == 0
    guessed, kept = (sum(getattr(request, what) for request in requests) for what in ("guessed", "kept"))
    assert kept > 0.95 * guessed > 0
    if draft_pages == 400:
        assert steps < 0.6 * most


def resized(vocab: int) -> Callable[[Tensors], None]:
    """Gives a model that many tokens: the first ones of its own, and others that it never likes."""

    def change(tensors: Tensors) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            own = tensors[name][:vocab]
            tensors[name] = torch.cat([own, torch.zeros(vocab - len(own), own.shape[1])])

    return change


@pytest.mark.parametrize("vocab", [505, 600])
def test_a_draft_may_have_rows_for_fewer_or_more_tokens_than_its_target(tmp_path: Path, vocab: int) -> None:
    draft = altered(tmp_path, change=resized(vocab), config={"vocab_size": vocab})
    tokens, requests, _, guesses = lives(FOLDER, draft, 400, 400, 0.0)
    expected, *_ = lives(FOLDER, None, 400, 400, 0.0)
    assert tokens == expected and guesses > 10
    assert sum(request.kept for request in requests) > 10


@pytest.mark.parametrize(("seconds", "is_worth"), [(1e-6, False), (10.0, True)])
def test_a_draft_guesses_only_if_its_passes_are_short_beside_the_target_s_steps(seconds: float, is_worth: bool) -> None:
    with WithDraft(FOLDER, FOLDER, small_pages(100), seconds, plan=small_pages(100)) as served:
        for tenant in range(2):
            before = served.guesses
            sampling = Sampling(temperature=1.5, seed=3)  # text without repetition, which lookups cannot guess
            request = served.submit(served.open(tenant=tenant), [5, 6, 7], 200, sampling, may_guess=True)
            served.run()
        assert (request.kept > 150) == is_worth
        assert is_worth or served.guesses == before


def test_a_session_longer_than_the_draft_s_context_goes_on_without_guesses() -> None:
    with WithDraft(FOLDER, FOLDER, small_pages(100, max_context=64), plan=small_pages(100)) as served:
        sessions = []
        for tenant in range(3):
            sessions.append(served.open(tenant=tenant))
            served.submit(sessions[-1], [5, 6, 7], 120, Sampling(temperature=1.5, seed=3), may_guess=True)
            for _ in range(8):
                served.step()
        served.run()
        assert all(len(session.tokens) == 123 and session.tokens == sessions[0].tokens for session in sessions)
        assert 3 < served.guesses < 120


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_draft_that_is_wrong_changes_no_token_and_soon_guesses_no_more(temperature: float, stranger: Path) -> None:
    tokens, requests, _, guesses = lives(FOLDER, stranger, 400, 400, temperature)
    expected, *_ = lives(FOLDER, None, 400, 400, temperature)
    assert tokens == expected
    assert 0 < guesses < 0.25 * sum(map(len, tokens))
    assert sum(request.guessed for request in requests) < 300


def test_new_sessions_are_guessed_for_again_when_the_draft_has_been_idle_for_long(
    stranger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafter, "DRAFTS", replace(DRAFTS, again=150, hopeful=1 << 20))
    with WithDraft(FOLDER, stranger, small_pages(100), plan=small_pages(100)) as served:
        guesses = []
        for seed in range(5):
            before = served.guesses
            served.submit(served.open(), [5, 6, 7], 100, Sampling(temperature=0.7, seed=seed), may_guess=True)
            served.run()
            guesses.append(served.guesses - before)
        assert guesses[0] > 0 == guesses[1], "the second session expects what the first one got"
        assert any(guesses[2:])
