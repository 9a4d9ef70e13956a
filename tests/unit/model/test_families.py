"""Compares every family with transformers, in mixed batches of several sessions over shuffled pages."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from transformers.models.falcon import modeling_falcon
from transformers.models.gptj import modeling_gptj

from djinn_client.protocol.fields.placing import Placing
from djinnd.model.attention.hf_attention import NAME
from djinnd.model.families import PATCHED
from tests.support import reference
from tests.support.loaded import Served, random_prompt, small_pages
from tests.support.models import reduced_model
from tests.support.paged import same_bytes
from tests.support.parameters import ALL_FAMILIES, BUILDS

SEED = 3  # with this seed no family comes to a near-tie: the two highest logits differ by at least 1e-3


@pytest.fixture(params=BUILDS, scope="module")
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
    """Largest difference between `got`, the logits of a session's last tokens, and those of transformers."""
    wanted = torch.from_numpy(reference.logits(reduced_model(family), tokens))[-len(got) :]
    return (got - wanted).abs().max().item()


@pytest.mark.parametrize("family", ALL_FAMILIES, indirect=True)
def test_logits_in_mixed_batches_equal_transformers(family: str, served: Served) -> None:
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
    told = talker.tokens[33:]
    assert told == reference.greedy(reduced_model(family), prompt(33), 20, told)


def test_sessions_that_join_and_leave_generate_the_tokens_of_transformers(family: str, served: Served) -> None:
    """Each session joins when the one before it has generated for a while. Prompts and outputs exceed the windows of 64
    tokens."""
    plans = ((300, 12), (1, 40), (50, 30), (64, 8), (120, 20), (17, 16))
    sessions = [served.open() for _ in plans]
    for session, (length, new_tokens) in zip(sessions, plans, strict=True):
        served.submit(session, prompt(length, SEED), max_tokens=new_tokens)
        while len(session.tokens) < length + 4:
            assert served.step()
    served.run()
    for session, (length, new_tokens) in zip(sessions, plans, strict=True):
        told = session.tokens[length:]
        expected = reference.greedy(reduced_model(family), prompt(length, SEED), new_tokens, told)
        assert told == expected, f"prompt of {length} tokens"


def test_a_far_longer_neighbour_does_not_change_a_session_s_logits(family: str, served: Served) -> None:
    """It would with RoPE that depends on the longest row of a batch, at that time or ever after."""

    def read() -> list[Tensor]:
        requests = [served.submit(served.open(), prompt(length)) for length in (5, 60)]
        batches = served.run()
        assert len(batches) > 1
        return [served.logits_of(request) for request in requests]

    alone = read()
    neighbour = served.open()
    served.submit(neighbour, prompt(400), max_tokens=40)
    while len(neighbour.tokens) == 400:
        served.step()
    beside, afterwards = read(), read()
    assert len(neighbour.tokens) == 440
    for logits in (beside, afterwards):
        for got, wanted in zip(logits, alone, strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)


def test_a_session_goes_on_from_its_pages(family: str, served: Served) -> None:
    session = served.open()
    for length in (21, 1, 64, 5):
        request = served.submit(session, prompt(length, seed=length))
        served.run()
        assert largest_difference(served.logits_of(request), family, session.tokens) < 1e-4


def test_blocks_that_pass_through_the_ring_compute_the_same(family: str) -> None:
    """Three of four blocks are streamed; the blocks of Qwen3-MoE differ in size."""
    folder = reduced_model(family)
    with Served(folder, plan=small_pages(60), max_batch_tokens=48, placing=Placing(resident=1)) as served:
        reader, talker = served.open(), served.open()
        forward = served.submit(reader, prompt(90))
        served.submit(talker, prompt(33), max_tokens=12)
        served.run()
        assert largest_difference(served.logits_of(forward), family, reader.tokens) < 1e-4
    told = talker.tokens[33:]
    assert told == reference.greedy(folder, prompt(33), 12, told)


def test_pages_of_other_sessions_are_not_touched(served: Served) -> None:
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
    served.runner.model.pool.view(served.runner.model.dtype)[0].fill_(float("nan"))
    sessions = [served.open() for _ in range(4)]
    requests = [served.submit(s, prompt(n)) for s, n in zip(sessions, (3, 17, 64, 31), strict=True)]
    served.run()
    for session, request in zip(sessions, requests, strict=True):
        assert largest_difference(served.logits_of(request), family, session.tokens) < 1e-4


@pytest.mark.parametrize(
    ("family_type", "module", "table", "own"),
    [
        ("gptj", modeling_gptj, "GPTJ_ATTENTION_CLASSES", modeling_gptj.GPTJAttention),
        ("falcon", modeling_falcon, "FALCON_ATTENTION_CLASSES", modeling_falcon.FalconAttention),
    ],
    ids=["gptj", "falcon"],
)
def test_families_with_a_table_of_attention_classes_get_a_paged_one(
    family_type: str, module: ModuleType, table: str, own: type[nn.Module]
) -> None:
    """Only some releases of transformers have the table."""
    PATCHED[family_type]()
    classes = getattr(module, table, None)
    assert classes is None or issubclass(classes[NAME], own)
