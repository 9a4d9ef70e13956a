from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from msgspec import structs
from torch import Tensor

from djinn_client.protocol import Sampling
from djinnd.core.batch import Batch
from djinnd.core.request import Request
from djinnd.core.session import Session
from djinnd.engine.tuning import LOGIT_ROWS
from djinnd.model.step.inputs import StepInputs
from tests.support import reference
from tests.support.checkpoints import Tensors, altered, cast
from tests.support.loaded import Served, by_block, random_prompt, small_pages
from tests.support.models import reduced_model
from tests.support.parameters import long_except

VOCAB = 512
FOLDER = reduced_model("llama-2")


@pytest.fixture
def served() -> Iterator[Served]:
    with Served(FOLDER, plan=small_pages(100), max_batch_tokens=48) as served:
        yield served


def prompt(length: int, seed: int = 0) -> list[int]:
    return random_prompt(length, VOCAB, seed)


def assert_logits(got: Tensor, tokens: list[int], folder: Path = FOLDER) -> None:
    """`got`: logits of the last positions of `tokens`. Compares them with transformers."""
    wanted = torch.from_numpy(reference.logits(folder, tokens))[-len(got) :]
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)


def went_back(batches: list[Batch], session: Session) -> bool:
    """True if the session has lost KV and recomputed it, maybe in part: pages that were not reused are shared again."""
    rows = [row for batch in batches for row in batch.rows if row.session is session]
    return any(later.start < row.end for row, later in pairwise(rows))


# --- greedy tokens --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama-2", "qwen3"])
def test_sessions_that_join_and_leave_get_the_tokens_of_transformers(family: str) -> None:
    """16 sessions with different prompts and lengths. A new one starts every other step; then each goes on once
    more."""
    folder, chance = reduced_model(family), random.Random(family)
    lengths = [1, 200, *(chance.randint(1, 200) for _ in range(14))]
    wishes = [chance.randint(1, 24) for _ in lengths]
    with Served(folder, plan=small_pages(260), max_batch_tokens=64) as served:
        served.shuffle_pages()
        sessions: list[Session] = []
        for number, (length, wish) in enumerate(zip(lengths, wishes, strict=True)):
            sessions.append(served.open())
            served.submit(sessions[-1], prompt(length, seed=number), max_tokens=wish)
            for _ in range(2):
                served.step()
        served.run()
        for session, length, wish in zip(sessions, lengths, wishes, strict=True):
            told = session.tokens[length:]
            assert told == reference.greedy(folder, session.tokens[:length], wish, told)
        for session in sessions:
            served.submit(session, [], max_tokens=3)
        served.run()
        for session in sessions:
            told = session.tokens[-3:]
            assert told == reference.greedy(folder, session.tokens[:-3], 3, told)


def test_preempted_sessions_get_the_same_tokens() -> None:
    """Six sessions in a pool for two. KV is dropped and recomputed."""
    prompts = [prompt(length, seed=9) for length in (60, 61, 62, 63, 64, 65)]
    with Served(FOLDER, plan=small_pages(12), max_batch_tokens=40) as served:
        sessions = [served.open() for _ in prompts]
        for session, tokens in zip(sessions, prompts, strict=True):
            served.submit(session, tokens, max_tokens=20)
        batches = served.run()
    assert any(went_back(batches, session) for session in sessions), "nobody was preempted"
    for session, tokens in zip(sessions, prompts, strict=True):
        assert session.tokens == tokens + reference.greedy(FOLDER, tokens, 20)


# --- forward passes -------------------------------------------------------------------------------------------------


def test_a_forward_pass_returns_the_logits_of_each_position(served: Served) -> None:
    session = served.open()
    first = served.submit(session, prompt(100))
    assert len(served.run()) == 3  # in chunks
    logits = served.logits_of(first)
    assert logits.shape == (100, VOCAB)
    assert_logits(logits, session.tokens)
    second = served.submit(session, prompt(30, seed=1))
    served.run()
    logits = served.logits_of(second)
    assert logits.shape == (30, VOCAB)
    assert_logits(logits, session.tokens)


def test_a_forward_pass_of_one_token_beside_sessions_that_generate(served: Served) -> None:
    talker, session = served.open(), served.open()
    generating = served.submit(talker, prompt(9), max_tokens=8)
    for token in prompt(4, seed=2):
        forward = served.submit(session, [token])
        batch = served.step()
        assert batch is not None and len(batch.rows) == 2
        assert_logits(served.logits_of(forward), session.tokens)
    served.run()
    assert generating.finish_reason == "length"
    assert talker.tokens[9:] == reference.greedy(FOLDER, talker.tokens[:9], 8)


def test_more_logits_are_returned_than_exist_at_once() -> None:
    count = 2 * LOGIT_ROWS + 44
    with Served(FOLDER, plan=small_pages(100), max_batch_tokens=700) as served:
        sessions = [served.open() for _ in range(2)]
        long = served.submit(sessions[0], prompt(count))
        short = served.submit(sessions[1], prompt(5))
        assert len(served.run()) == 1
        assert_logits(served.logits_of(long), sessions[0].tokens)
        assert_logits(served.logits_of(short), sessions[1].tokens)


def test_a_preempted_forward_pass_is_recomputed() -> None:
    with Served(FOLDER, plan=small_pages(7), max_batch_tokens=24) as served:
        reader = served.open()
        served.submit(reader, prompt(20, seed=3), max_tokens=1)
        served.run()
        talker = served.open()
        served.submit(talker, prompt(15, seed=4), max_tokens=40)
        served.step()  # otherwise the forward pass, which holds pages, comes first
        forward = served.submit(reader, prompt(75, seed=5))
        batches = served.run()
        assert went_back(batches, reader), "it was not preempted in its middle"
        logits = served.logits_of(forward)
        assert len(logits) == 75
        assert_logits(logits, reader.tokens)


def test_a_forgotten_request_s_window_passes_to_the_caller(served: Served) -> None:
    session = served.open()
    forward = served.submit(session, prompt(3))
    window = served.runner.forget(forward)
    assert window is not None and not served.runner.windows
    assert served.runner.forget(forward) is None
    window.close()
    served.scheduler.cancel(forward.id)


# --- checkpoints ----------------------------------------------------------------------------------------------------


def test_a_bf16_checkpoint_is_computed_in_float32(tmp_path: Path) -> None:
    folder = altered(tmp_path, change=lambda tensors: cast(tensors, torch.bfloat16))
    with Served(folder, plan=small_pages(20)) as served:
        session = served.open()
        request = served.submit(session, prompt(40))
        served.run()
        assert_logits(served.logits_of(request), session.tokens, folder)


def rename(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors.pop("wte.weight")


def test_tied_weights_saved_under_their_other_name_are_served(tmp_path: Path) -> None:
    with Served(altered(tmp_path, "gpt2", rename), plan=small_pages(20)) as served:
        session = served.open()
        request = served.submit(session, prompt(40))
        served.run()
        assert_logits(served.logits_of(request), session.tokens, reduced_model("gpt2"))


# --- memory ---------------------------------------------------------------------------------------------------------


def test_a_page_is_zeroed_before_another_tenant_gets_it(served: Served) -> None:
    pool, kv = served.runner.model.pool, served.runner.kv
    while kv.pool.free >= 4:
        served.submit(served.open(tenant=1), prompt(50), max_tokens=1)
        served.run()
    for session in list(served.scheduler.sessions()):
        served.scheduler.close(session.id)
    assert bool(pool[1:97].any(dim=-1).any())
    heir = served.open(tenant=2)
    served.submit(heir, prompt(3), max_tokens=1)
    served.step()
    (page,) = kv.pages_of(heir.id)
    there = by_block(served.runner.model)[page]
    assert bool(there[:, :, :3].any()) and not bool(there[:, :, 3:].any())


class Expected:
    """A copy that records when the compute stream waits for it."""

    def __init__(self, order: Callable[[], None]) -> None:
        self.order = order

    def wait(self) -> None:
        raise AssertionError("the host waits")

    def has_passed(self) -> bool:
        return False


@pytest.fixture
def seen(served: Served, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records a step's actions while the device expects a copy."""
    seen, model = list[str](), served.runner.model
    begin, zero_pages = model.placement.begin, model.zero_pages

    def begun(index: int) -> None:
        begin(index)
        seen.append(f"block {index}")

    def zeroed(pages: list[int]) -> None:
        seen.append("zeroed")
        zero_pages(pages)

    monkeypatch.setattr(model.placement, "begin", begun)
    monkeypatch.setattr(model, "zero_pages", zeroed)
    served.device.expect(Expected(lambda: seen.append("caught up")))
    return seen


def test_blocks_before_the_middle_do_not_wait_for_expected_copies(served: Served, seen: list[str]) -> None:
    served.submit(served.open(), prompt(3), max_tokens=2)
    served.step()
    assert seen == ["block 0", "block 1", "caught up", "block 2", "block 3"]


def test_expected_copies_are_waited_for_if_rows_end_before_the_middle(served: Served, seen: list[str]) -> None:
    served.submit(served.open(), prompt(3), max_tokens=2)
    batch = served.scheduler.next_batch()
    assert batch is not None
    rows = [structs.replace(row, last_block=1, samples=False) for row in batch.rows]
    served.runner.run(replace(batch, rows=rows))
    assert seen == ["block 0", "caught up"] and not served.device.is_behind


def test_pages_are_zeroed_after_expected_copies(
    served: Served, seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy may be on its way to one of these pages, for a session that has gone."""
    monkeypatch.setattr(served.runner.kv.pool, "take_stale", lambda: [7])
    served.submit(served.open(), prompt(3), max_tokens=2)
    served.step()
    assert seen[:3] == ["caught up", "zeroed", "block 0"]


def test_the_budget_has_nothing_of_the_model_after_its_release() -> None:
    served = Served(FOLDER, max_batch_tokens=64)
    served.submit(served.open(), prompt(300), max_tokens=1)
    served.run()
    served.close()
    assert served.device.budget.used == 0


# --- sampling -------------------------------------------------------------------------------------------------------


def run_with(served: Served, prompts: list[list[int]], sampling: Sampling) -> list[list[int]]:
    sessions = [served.open() for _ in prompts]
    for session, tokens in zip(sessions, prompts, strict=True):
        served.submit(session, tokens, max_tokens=12, sampling=sampling)
    served.run()
    return [session.tokens[-12:] for session in sessions]


def test_each_session_has_its_own_random_numbers(served: Served) -> None:
    sampling = Sampling(temperature=1.0, seed=7)
    prompts = [prompt(length, seed=6) for length in (5, 90, 33)]
    together = run_with(served, prompts, sampling)
    alone = [run_with(served, [tokens], sampling)[0] for tokens in prompts]
    assert together == alone
    assert together != run_with(served, prompts, Sampling())


def test_logprobs_are_returned_with_the_tokens(served: Served) -> None:
    session = served.open()
    served.submit(session, prompt(10), max_tokens=1, logprobs=2)
    batch = served.scheduler.next_batch()
    assert isinstance(batch, Batch)
    sampled = served.runner.run(batch)
    wanted = torch.from_numpy(reference.logits(FOLDER, prompt(10)))[-1].log_softmax(-1).topk(2)
    (told,) = sampled.logprobs
    assert told is not None
    assert list(told.top) == wanted.indices.tolist() and sampled.tokens == wanted.indices[:1].tolist()
    assert list(told.top.values()) == pytest.approx(wanted.values.tolist(), abs=1e-4)
    served.complete(batch, sampled)


def test_a_chunk_s_inputs_are_written_after_the_device_has_taken_the_last_chunk_s(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The results of a chunk are not read, so nothing else keeps the host from overwriting inputs that have not been
    sent yet."""
    said: list[tuple[str, StepInputs]] = []
    send, wait = StepInputs.send, StepInputs.wait
    monkeypatch.setattr(StepInputs, "send", lambda inputs: (said.append(("send", inputs)), send(inputs)))
    monkeypatch.setattr(StepInputs, "wait", lambda inputs: (said.append(("wait", inputs)), wait(inputs)))
    served.submit(served.open(), prompt(200), max_tokens=1)
    while served.step():
        pass
    sent = [inputs for name, inputs in said if name == "send"]
    assert len(sent) == 5 and [name for name, _ in said] == ["send", *["wait", "send"] * 4]
    assert [inputs for name, inputs in said if name == "wait"] == sent[:-1]


def test_a_step_without_a_token_samples_nothing(served: Served) -> None:
    session = served.open()
    request: Request = served.submit(session, prompt(100), max_tokens=1)
    batch = served.scheduler.next_batch()
    assert batch is not None
    sampled = served.runner.run(batch)
    assert (sampled.tokens, sampled.logprobs, sampled.unsound) == ([], [], [])
    served.complete(batch, sampled)
    served.scheduler.cancel(request.id)


# --- forks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", long_except(("qwen3",), ("llama-2", "qwen3")))
@pytest.mark.parametrize("pages", long_except((18,), (400, 18)))
def test_logits_of_forks_equal_those_of_sessions_with_the_whole_prompt(family: str, pages: int) -> None:
    """A tree that grows, is cut and loses parents at random. With few pages, its sessions also evict each other."""
    folder, chance = reduced_model(family), random.Random(f"{family} {pages}")
    with Served(folder, plan=small_pages(pages), max_batch_tokens=64) as served:
        served.shuffle_pages()
        sessions = [served.open(tenant=1)]
        served.submit(sessions[0], prompt(40), max_tokens=3)
        served.run()
        for generation in range(12):
            sessions += [served.fork(chance.choice(sessions)) for _ in range(2)]
            for session in chance.sample(sessions, 2):
                length = max(1, len(session.tokens) - chance.choice([0, 1, 16, 25]))
                served.scheduler.truncate(session.id, length)
            served.scheduler.check_integrity()
            calls = []
            for number, session in enumerate(sessions):
                tokens = prompt(chance.choice([1, 7, 20]), seed=100 * generation + number)
                calls.append((session, served.submit(session, tokens), list(session.tokens)))
            served.run()
            for _, request, tokens in calls:
                assert_logits(served.logits_of(request), tokens, folder)
            while len(sessions) > 4:
                served.scheduler.close(sessions.pop(chance.randrange(len(sessions))).id)
        for session in sessions:
            served.scheduler.close(session.id)
        assert served.runner.kv.pool.used == 0


def test_a_fork_into_another_tenant_s_old_page_keeps_the_copied_kv(served: Served) -> None:
    """All pages belonged to another tenant. The fork's page has neither that tenant's KV nor zeros."""
    strangers = [served.open(tenant=1) for _ in range(2)]
    for stranger in strangers:
        served.submit(stranger, prompt(799), max_tokens=1)
    served.run()
    for stranger in strangers:
        served.scheduler.close(stranger.id)
    parent = served.open(tenant=2)
    served.submit(parent, prompt(40), max_tokens=1)
    served.run()
    child = served.fork(parent)
    assert child.computed == parent.computed == 40
    served.scheduler.close(parent.id)
    request = served.submit(child, prompt(5, seed=1))
    served.run()
    assert_logits(served.logits_of(request), child.tokens)


def test_forks_generate_the_same_tokens_as_their_parent(served: Served) -> None:
    parent = served.open()
    served.submit(parent, prompt(40), max_tokens=8)
    served.run()
    forks = [served.fork(parent) for _ in range(3)]
    for session in (parent, *forks):
        served.submit(session, [], max_tokens=20)
    served.run()
    wanted = reference.greedy(FOLDER, prompt(40), 28)
    assert all(session.tokens[40:] == wanted for session in (parent, *forks))


# --- prefixes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pages", [400, 24])
def test_logits_over_shared_prefixes_equal_those_computed_without_sharing(pages: int) -> None:
    """Prompts with common prefixes, of two tenants; sessions stay and go. With few pages, they evict each other."""
    chance, starts = random.Random(pages), [prompt(70, seed=1), prompt(70, seed=2)]
    spared = 0
    with Served(FOLDER, plan=small_pages(pages), max_batch_tokens=64) as served:
        served.shuffle_pages()
        for _ in range(8):
            sessions = [served.open(tenant=chance.randrange(2)) for _ in range(4)]
            for session in sessions:
                tokens = chance.choice(starts)[: chance.choice([20, 48, 64, 70])] + prompt(chance.randint(1, 9))
                request = served.submit(session, tokens, max_tokens=2)
                if chance.random() < 0.5:
                    served.run()
                spared += len(tokens) - request.computed if request.computed else 0
            served.run()
            calls = [(served.submit(session, prompt(5)), list(session.tokens)) for session in sessions]
            served.run()
            for request, tokens in calls:
                assert_logits(served.logits_of(request), tokens)
            for session in chance.sample(sessions, 3):
                served.scheduler.close(session.id)
    assert spared > 100
