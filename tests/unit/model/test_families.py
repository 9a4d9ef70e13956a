"""Every family against transformers: mixed batches of several sessions over shuffled pages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers.models.gptj import modeling_gptj

from djinnd.model.families import PATCHED
from djinnd.model.hf_attention import NAME
from tests.support import reference
from tests.support.loaded import Served, random_prompt, small_pages
from tests.support.models import FAMILIES, reduced_model
from tests.support.paged import same_bytes


@pytest.fixture(params=FAMILIES, scope="module")
def family(request: pytest.FixtureRequest) -> str:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def served(family: str) -> Iterator[Served]:
    with Served(reduced_model(family), plan=small_pages(120, max_context=512), max_batch_tokens=48) as served:
        served.shuffle_pages()
        yield served


def prompt(length: int, seed: int = 0) -> list[int]:
    return random_prompt(length, 512, seed)


def largest_difference(got: Tensor, family: str, tokens: list[int]) -> float:
    """Of the logits of a session's last tokens, which `got` has."""
    wanted = torch.from_numpy(reference.logits(reduced_model(family), tokens))[-len(got) :]
    return (got - wanted).abs().max().item()


def test_logits_in_mixed_batches_are_those_of_transformers(family: str, served: Served) -> None:
    lengths = [1, 7, 40, 90, 150]  # page and, for Mistral, window are passed
    sessions = [served.open() for _ in lengths]
    forwards = [served.submit(s, prompt(n)) for s, n in zip(sessions, lengths, strict=True)]
    talker = served.open()
    generating = served.submit(talker, prompt(33), max_tokens=20)
    batches = served.run()
    assert any(not batch.decode_only and min(row.count for row in batch.rows) == 1 for batch in batches)
    assert any(row.start > 0 and row.count > 1 for batch in batches for row in batch.rows)
    for session, request in zip(sessions, forwards, strict=True):
        assert largest_difference(served.logits_of(request), family, session.tokens) < 1e-4
    assert generating.finish_reason == "length"
    assert talker.tokens[33:] == reference.greedy(reduced_model(family), prompt(33), 20)


def test_a_session_goes_on_from_its_pages(family: str, served: Served) -> None:
    session = served.open()
    for length in (21, 1, 64, 5):
        request = served.submit(session, prompt(length, seed=length))
        served.run()
        assert largest_difference(served.logits_of(request), family, session.tokens) < 1e-4


def test_nobody_else_s_pages_are_touched(served: Served) -> None:
    kv, pool = served.runner.kv, served.runner.model.pool
    bystanders = [served.open() for _ in range(3)]
    for bystander in bystanders:
        served.submit(bystander, prompt(37), max_tokens=2)
    served.run()
    before = pool.clone()
    sessions = [served.open() for _ in range(3)]
    for session, length in zip(sessions, (5, 60, 100), strict=True):
        served.submit(session, prompt(length), max_tokens=10)
    served.run()
    mine = {page for session in sessions for page in kv.pages_of(session.id)}
    assert mine
    others = [page for page in range(1, len(pool)) if page not in mine]
    assert same_bytes(pool[others], before[others])
    assert not same_bytes(pool[sorted(mine)], before[sorted(mine)])


def test_the_scratch_page_is_not_read(family: str, served: Served) -> None:
    served.runner.model.pool[0].fill_(float("nan"))
    sessions = [served.open() for _ in range(4)]
    requests = [served.submit(s, prompt(n)) for s, n in zip(sessions, (3, 17, 64, 31), strict=True)]
    served.run()
    for session, request in zip(sessions, requests, strict=True):
        assert largest_difference(served.logits_of(request), family, session.tokens) < 1e-4


def test_gpt_j_gets_our_subclass() -> None:
    PATCHED["gptj"]()
    assert issubclass(modeling_gptj.GPTJ_ATTENTION_CLASSES[NAME], modeling_gptj.GPTJAttention)
