"""A head changes no token. It guesses what transformers' model of heads guesses, in sessions that live."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from djinn_client.protocol import Sampling
from djinnd.core.batch import Batch
from djinnd.core.guesser import Record
from djinnd.core.headed import Headed
from djinnd.core.session import Session
from djinnd.core.tuning import HEADS
from djinnd.engine.run import hidden_states
from tests.support.drafted import WithDraft, lives
from tests.support.heads import Reference, alike, no_reference, with_head
from tests.support.loaded import random_prompt, small_pages

VOCAB = 300


@pytest.fixture(scope="module", params=["deepseek_v3", "glm4_moe"])
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_head(tmp_path_factory.mktemp("models") / family, family)


@pytest.fixture(scope="module")
def same(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_head(tmp_path_factory.mktemp("alike") / family, family, alike)


def served_by_head(folder: Path, pages: int = 200, head_pages: int = 200, **more: int) -> WithDraft:
    return WithDraft(folder, folder, small_pages(head_pages), is_head=True, plan=small_pages(pages), **more)


@pytest.mark.parametrize(("temperature", "pages", "head_pages"), [(0.0, 60, 60), (0.7, 400, 20)])
def test_a_head_changes_no_token(folder: Path, temperature: float, pages: int, head_pages: int) -> None:
    tokens, requests, _, guesses = lives(folder, folder, pages, head_pages, temperature, is_head=True)
    expected, *_ = lives(folder, None, pages, head_pages, temperature)
    assert tokens == expected
    assert guesses > 0 and sum(request.guessed for request in requests) > 0


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_head_that_thinks_as_its_target_saves_steps(same: Path, temperature: float) -> None:
    tokens, requests, steps, _ = lives(same, same, 400, 400, temperature, is_head=True)
    expected, _, most, _ = lives(same, None, 400, 400, temperature)
    assert tokens == expected
    guessed, kept = (sum(getattr(request, what) for request in requests) for what in ("guessed", "kept"))
    assert kept > 0.9 * guessed > 0  # a few guesses come from texts, and those in prompts are wrong
    assert steps < (0.6 if temperature else 0.8) * most  # without a temperature lookups save steps, too


def test_a_pass_gives_several_tokens_of_a_text_without_repetition(same: Path) -> None:
    with served_by_head(same) as served:
        sampling = Sampling(temperature=1.2, seed=3)
        request = served.submit(served.open(), random_prompt(90, VOCAB, 1), 150, sampling, may_guess=True)
        steps = len(served.run())
    assert request.kept > 0
    assert 150 / (steps - 1) > 1.7


def test_a_text_longer_than_the_head_s_context_is_known_from_later_on(same: Path) -> None:
    with WithDraft(same, same, small_pages(50, max_context=96), is_head=True, plan=small_pages(50)) as served:
        session = served.open()
        request = served.submit(session, [5, 6, 7], 300, Sampling(temperature=1.2, seed=3), may_guess=True)
        served.run()
        assert len(session.tokens) == 303 and request.kept > 150
        assert isinstance(session.drafted, Headed) and session.drafted.first > 200


@pytest.mark.parametrize("places", [0, 8, 40])
def test_with_too_few_places_for_hidden_states_sessions_have_fewer_guesses(
    folder: Path, monkeypatch: pytest.MonkeyPatch, places: int
) -> None:
    monkeypatch.setattr(hidden_states, "HEADS", replace(HEADS, places=places))
    with served_by_head(folder) as served:
        sessions = [served.open() for _ in range(6)]
        for number, session in enumerate(sessions):
            served.submit(session, random_prompt(20 * number + 3, VOCAB, number), 20, may_guess=True)
        served.run()
        tokens = [session.tokens for session in sessions]
        assert served.drafter is not None
        for session in sessions:
            served.drafter.close(session.id)
        assert served.draft.hidden is not None and served.draft.hidden.free == places, "all places come back"
    with WithDraft(folder, None, small_pages(1), plan=small_pages(200)) as served:
        for number in range(6):
            session = served.open()
            served.submit(session, random_prompt(20 * number + 3, VOCAB, number), 20)
            served.run()
            assert session.tokens == tokens[number]


def test_a_step_that_fails_leaves_no_hidden_state_behind(folder: Path) -> None:
    with served_by_head(folder) as served:
        session = served.open()
        served.submit(session, random_prompt(20, VOCAB, 1), 20, may_guess=True)
        for _ in range(3):
            served.step()
        batch = served.scheduler.next_batch()
        assert batch is not None and served.drafter is not None
        served.runner.launch(batch)
        served.drafter.failed()
        headed = session.drafted
        assert isinstance(headed, Headed) and not headed.kept
        served.finish(batch)
        served.run()
        assert headed.first > 20


class Compared:
    """Compares the guesses of each step with those of transformers' model of heads."""

    def __init__(self, served: WithDraft, reference: Reference) -> None:
        self._served = served
        self._reference = reference
        self.guesses = 0
        self.firsts: set[int] = set()  # positions at which the head's texts began

    def step(self) -> Batch | None:
        """A step of the model, if there is anything to run."""
        batch = self._served.scheduler.next_batch()
        if batch is None:
            return None
        of_texts = {row.session.id for row in batch.rows if row.guess}
        for row in batch.rows:
            if row.session.drafted is not None:
                row.session.drafted.record = Record(0.9)  # or a head with random weights would soon guess no more
        assert self._served.drafter is not None
        batch = self._served.drafter.added(batch, lambda: False)
        for row in batch.rows:
            if row.guess and row.session.id not in of_texts:
                assert [*row.guess] == self._expected(row.session, len(row.guess))
                self.guesses += 1
        self._served.finish(batch)
        return batch

    def _expected(self, session: Session, count: int) -> list[int]:
        headed = session.drafted
        assert isinstance(headed, Headed)
        self.firsts.add(headed.first)
        return self._reference.guesses(session.tokens, headed.first, count)


@no_reference
def test_each_guess_is_that_of_transformers(folder: Path) -> None:
    chance = random.Random(3)
    with served_by_head(folder, max_batch_tokens=48) as served:
        compared, sessions = Compared(served, Reference(folder)), list[Session]()

        def ask(session: Session, tokens: int) -> None:
            served.submit(session, random_prompt(tokens, VOCAB, len(session.tokens)), 30, may_guess=True)

        for prompt in (2, 33, 90, 150):
            sessions.append(served.open())
            ask(sessions[-1], prompt)
            compared.step()
        while compared.step() is not None:
            pass
        sessions.append(served.fork(sessions[3]))
        served.scheduler.truncate(sessions[2].id, 60)
        served.scheduler.truncate(sessions[1].id, len(sessions[1].tokens) - 3)
        for session in sessions:
            ask(session, chance.randint(1, 40))
        while compared.step() is not None:
            pass
    assert compared.guesses > 60
    assert 1 in compared.firsts and max(compared.firsts) > 100, "a fork begins behind the KV that it shares"
