from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from djinn_client.protocol import PromptLogprobs
from djinnd.core.batch import Row
from djinnd.core.request import Request
from djinnd.core.session import Session
from djinnd.engine.run import prompt_scores
from djinnd.messages import PromptScored
from tests.support import reference
from tests.support.loaded import Served, random_prompt, small_pages
from tests.support.models import reduced_model

VOCAB = 512
FOLDER = reduced_model("llama-2")
TOP = 3


def prompt(length: int, seed: int = 0) -> list[int]:
    return random_prompt(length, VOCAB, seed)


class Scores:
    """Runs all requests, and joins the scores of each."""

    def __init__(self, served: Served) -> None:
        self._parts: dict[int, list[PromptScored]] = {}
        while served.step() is not None:
            for part in served.runner.scores.take():
                self._parts.setdefault(part.request, []).append(part)

    def of(self, request: Request) -> PromptLogprobs:
        parts = self._parts.get(request.id, [])
        known = sum(part.tokens for part in parts)
        values, ids = b"".join(part.values for part in parts), b"".join(part.ids for part in parts)
        return PromptLogprobs(known, 0, request.prompt_logprobs or 0, values, ids)


def assert_scores(scores: PromptLogprobs, tokens: Sequence[int], folder: Path = FOLDER) -> None:
    """Compares the scores with transformers' log probabilities of the last of these tokens."""
    wanted = torch.from_numpy(reference.logits(folder, tokens)).log_softmax(-1)[-len(scores) - 1 : -1]
    for entry, row, token in zip(scores, wanted, tokens[-len(scores) :], strict=True):
        assert entry is not None
        top = row.topk(scores.likeliest)
        assert entry.token == pytest.approx(row[token].item(), abs=1e-4)
        assert [*entry.top] == top.indices.tolist()
        assert [*entry.top.values()] == pytest.approx(top.values.tolist(), abs=1e-4)


@pytest.fixture(scope="module")
def served():
    with Served(FOLDER, plan=small_pages(200), max_batch_tokens=48) as served:
        yield served


def test_each_token_after_the_first_is_scored_as_transformers_scores_it(served: Served) -> None:
    session = served.open()
    request = served.submit(session, prompt(100), max_tokens=5, prompt_logprobs=TOP)
    scores = Scores(served).of(request)
    assert len(scores) == 99
    assert_scores(scores, session.tokens[:100])


def test_a_continued_prompt_is_scored_from_its_first_token(served: Served) -> None:
    """Whether or not the token before it has been computed, and with a prefix in shared pages too."""
    session = served.open()
    served.submit(session, prompt(40), max_tokens=4)
    Scores(served)
    length = len(session.tokens)
    request = served.submit(session, prompt(30, seed=1), prompt_logprobs=TOP)
    scores = Scores(served).of(request)
    assert (len(scores), request.computed) == (30, 31)
    assert_scores(scores, session.tokens)
    fork = served.fork(session)
    request = served.submit(fork, prompt(1, seed=2), max_tokens=2, prompt_logprobs=0)
    scores = Scores(served).of(request)
    assert (len(scores), request.computed) == (1, 2), "the token before it once more, of which KV was there"
    assert_scores(scores, fork.tokens[: length + 31])


def test_a_prompt_with_all_kv_cached_is_recomputed(served: Served) -> None:
    tokens = prompt(64, seed=3)
    first = served.submit(served.open(), tokens, max_tokens=1)
    Scores(served)
    second = served.submit(served.open(), tokens, max_tokens=1)
    Scores(served)
    scored = served.submit(served.open(), tokens, max_tokens=1, prompt_logprobs=0)
    scores = Scores(served).of(scored)
    assert (first.computed, scored.computed) == (64, 64) and second.computed < 64
    assert_scores(scores, tokens)


def test_many_prompts_are_scored_beside_generation_and_forward_passes(served: Served) -> None:
    sessions = [served.open() for _ in range(6)]
    talker, reader = served.open(), served.open()
    requests = [
        served.submit(session, prompt(12 + number, seed=4), prompt_logprobs=number % 2)
        for number, session in enumerate(sessions)
    ]
    generating = served.submit(talker, prompt(9), max_tokens=8)
    forward = served.submit(reader, prompt(20, seed=5))
    scores = Scores(served)
    for session, request in zip(sessions, requests, strict=True):
        assert_scores(scores.of(request), session.tokens)
    assert len(scores.of(generating)) == 0
    assert talker.tokens[9:] == reference.greedy(FOLDER, talker.tokens[:9], 8)
    wanted = torch.from_numpy(reference.logits(FOLDER, reader.tokens))
    torch.testing.assert_close(served.logits_of(forward), wanted, rtol=0, atol=1e-4)


def test_no_more_logits_exist_at_once_than_a_group_has(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_scores, "GROUP_LOGITS", 5 * VOCAB)
    seen: Counter[int] = Counter()
    plain = prompt_scores.token_logprobs

    def watched(logits: torch.Tensor, picked: torch.Tensor, likeliest: int) -> object:
        seen[len(logits)] += 1
        return plain(logits, picked, likeliest)

    monkeypatch.setattr(prompt_scores, "token_logprobs", watched)
    session = served.open()
    request = served.submit(session, prompt(33, seed=6), prompt_logprobs=TOP)
    assert_scores(Scores(served).of(request), session.tokens)
    assert seen == {5: 6, 2: 1}


def test_scores_of_a_failed_step_are_dropped(served: Served) -> None:
    session = Session("s", "m", 0, "agent", tokens=[1, 2])
    row = Row(session, Request(1, 0, 2, 0, prompt_logprobs=0, seen_from=0), 0, 2, 0, 4, samples=False)
    served.runner.scores.add(row, range(1), [torch.zeros(1, VOCAB)])
    served.runner.recover()
    assert served.runner.scores.take() == []
