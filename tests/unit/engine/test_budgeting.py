"""Changes of the budget between the steps of sessions that generate."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from djinn_client.errors import OutOfMemory
from djinn_client.protocol import Class
from djinnd import messages
from djinnd.core.session import Session
from djinnd.device.cpu import CpuDevice
from djinnd.engine.budgeting import change_budget
from djinnd.weights.plan import BlockPlace
from tests.support import reference
from tests.support.checkpoints import altered, cast
from tests.support.engine_thread import EngineThread
from tests.support.loaded import MEMORY, Served, random_prompt
from tests.support.models import reduced_model
from tests.support.parameters import long_except

VOCAB = 512
FOLDER = reduced_model("llama-3.1")
WISH = 24  # tokens that each session generates


@pytest.fixture(scope="module")
def sixteen_bit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bf16") / "m"
    return altered(folder, "llama-3.1", lambda tensors: cast(tensors, torch.bfloat16))


@contextmanager
def serving(folder: Path = FOLDER, memory: int = MEMORY, **options: object) -> Iterator[Served]:
    device = CpuDevice(memory)
    with Served(folder, device, **options) as served:  # type: ignore[arg-type]
        yield served
    assert device.budget.used == 0
    device.close()


def set_budget(served: Served, total: int) -> None:
    """Sets the budget, then checks the integrity of everything."""
    runner, device = served.runner, served.device
    change_budget(device, [runner], served.scheduler, total)
    assert device.budget.total == total
    device.budget.check_integrity()
    served.scheduler.check_integrity()
    runner.model.placement.check_integrity()
    assert device.budget.used == runner.nbytes <= total
    assert runner.model.pool.nbytes == runner.pages.nbytes == (runner.kv.pool.capacity + 1) * runner.plan.page_bytes


def least(served: Served) -> int:
    with pytest.raises(OutOfMemory) as told:
        change_budget(served.device, [served.runner], served.scheduler, 1)
    needed: int = told.value.data["needed"]
    return needed


def prompts(count: int, longest: int) -> list[list[int]]:
    chance = random.Random(longest)
    return [random_prompt(chance.randint(1, longest), VOCAB, seed) for seed in range(count)]


def begin(served: Served, texts: list[list[int]], wish: int = WISH, priority: Class = "agent") -> list[Session]:
    sessions = [served.open(priority=priority) for _ in texts]
    for session, text in zip(sessions, texts, strict=True):
        served.submit(session, text, max_tokens=wish)
    return sessions


# --- tokens ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", long_except((0,), range(3)))
def test_sixteen_sessions_get_the_same_tokens_while_the_budget_changes(seed: int) -> None:
    """In float32, compared with transformers. Blocks come and go, and sessions lose their pages."""
    chance, texts = random.Random(seed), prompts(16, 400)
    with serving(max_batch_tokens=128) as served:
        sessions = begin(served, texts)
        seen: set[int] = set()
        lost = 0
        while served.step() is not None:
            if chance.random() < 0.3:
                held = {s.id for s in sessions if s.computed}
                room = chance.choice([0, 1 << 18, 1 << 19, 1 << 20, 1 << 22, 1 << 24, MEMORY - least(served)])
                set_budget(served, least(served) + chance.randint(0, room))
                seen.add(served.runner.places.count(BlockPlace.STREAMED))
                lost += len([s for s in sessions if s.id in held and not s.computed])
        assert len(seen) >= 3 and lost > 0
        for session, text in zip(sessions, texts, strict=True):
            told = session.tokens[len(text) :]
            assert session.tokens == text + reference.greedy(FOLDER, text, WISH, told)


def test_plain_packed_and_streamed_blocks_give_the_same_bits_in_bfloat16(sixteen_bit: Path) -> None:
    """The batches are the same, so products are tiled alike: no budget here takes a page from a session, and in this
    class all prompts are read at once."""
    texts = prompts(16, 200)
    with serving(sixteen_bit, dtype="bfloat16", max_batch_tokens=1024) as served:
        undisturbed = begin(served, texts, priority="batch")
        served.run()
    chance = random.Random(0)
    with serving(sixteen_bit, dtype="bfloat16", max_batch_tokens=1024) as served:
        sessions = begin(served, texts, priority="batch")
        served.step()
        needed = least(served) + 14 * served.runner.plan.page_bytes  # one page for each session
        seen: set[BlockPlace] = set()
        while served.step() is not None:
            begun = [session for session in sessions if session.computed]
            set_budget(served, needed + chance.randint(0, 300 << 10))
            seen |= set(served.runner.places.places)
            assert all(session.computed for session in begun)
        assert seen == set(BlockPlace)
        assert [s.tokens for s in sessions] == [s.tokens for s in undisturbed]


def test_sessions_that_begin_after_a_change_are_served_as_well() -> None:
    with serving() as served:
        for total in (least(served), MEMORY, least(served) + (1 << 20)):
            set_budget(served, total)
            text = random_prompt(300, VOCAB, 5)
            (session,) = begin(served, [text], 4)
            served.run()
            assert session.tokens[300:] == reference.greedy(FOLDER, text, 4)


# --- figures --------------------------------------------------------------------------------------------------------


def test_blocks_and_pages_come_back_with_the_memory(sixteen_bit: Path) -> None:
    with serving(sixteen_bit, dtype="bfloat16") as served:
        (session,) = begin(served, prompts(1, 100))
        served.step()
        places, pages = served.runner.places.places, served.runner.plan.num_pages
        assert places == (BlockPlace.PLAIN,) * 4
        set_budget(served, least(served))
        assert served.runner.places.count(BlockPlace.STREAMED) == 4 and served.runner.plan.num_pages < pages
        set_budget(served, MEMORY)
        assert served.runner.places.places == places and served.runner.plan.num_pages >= pages
        served.run()
        assert len(session.tokens) > WISH


@pytest.mark.parametrize("dtype", long_except(("bfloat16",), ("float32", "bfloat16")))
def test_too_small_a_budget_is_refused_with_a_figure_that_works(sixteen_bit: Path, dtype: str) -> None:
    with serving(sixteen_bit, dtype=dtype) as served:
        sessions = begin(served, prompts(16, 600))
        for _ in range(3):
            served.step()
        needed = least(served)
        before = (served.runner.places, served.runner.plan, served.device.budget.used, served.device.budget.total)
        with pytest.raises(OutOfMemory, match=r"a budget of .* is too small: .* loaded need") as told:
            set_budget(served, needed - 1)
        assert told.value.data == {"needed": needed, "budget": needed - 1}
        assert before == (
            served.runner.places,
            served.runner.plan,
            served.device.budget.used,
            served.device.budget.total,
        )
        set_budget(served, needed)
        served.run()
        assert all(session.request is None for session in sessions)


@pytest.mark.long
def test_the_longest_session_can_finish_in_the_least_budget() -> None:
    texts = [random_prompt(900, VOCAB, 1), random_prompt(30, VOCAB, 2)]
    with serving(max_batch_tokens=128) as served:
        long, short = begin(served, texts, wish=200)
        served.step()
        set_budget(served, least(served))
        assert served.runner.kv.capacity_tokens >= 1100
        served.run()
        assert (len(long.tokens), len(short.tokens)) == (1100, 230)


def test_an_unbounded_session_needs_no_more_pages_than_the_pool_has() -> None:
    with serving() as served:
        (session,) = begin(served, prompts(1, 50), wish=(1 << 31) - 1)
        served.step()
        limit = served.scheduler.queues["m"].limit
        assert served.scheduler.queues["m"].reach == limit < 1 << 20
        set_budget(served, least(served))
        served.step()
        served.scheduler.cancel(session.request.id)  # type: ignore[union-attr]


def test_the_budget_may_change_without_sessions() -> None:
    with serving() as served:
        for total in (least(served), MEMORY, least(served) + 12345, MEMORY):
            set_budget(served, total)
        assert served.runner.places.places == (BlockPlace.PLAIN,) * 4


def test_idle_sessions_give_up_pages_before_running_ones() -> None:
    with serving() as served:
        idle = begin(served, [random_prompt(500, VOCAB, n) for n in range(6)], 1)
        served.run()
        (running,) = begin(served, [random_prompt(700, VOCAB, 9)])
        served.step()
        computed = running.computed
        set_budget(served, least(served))
        assert running.computed == computed
        assert sum(session.computed > 0 for session in idle) < 6
        served.run()
        assert running.tokens[700:] == reference.greedy(FOLDER, running.tokens[:700], WISH)


def test_a_configured_number_of_pages_is_kept_if_possible(sixteen_bit: Path) -> None:
    with serving() as served:
        served.runner.load.kv_bytes = 8 << 20
        set_budget(served, MEMORY - 1)
        set_budget(served, MEMORY)
        assert served.runner.pages.nbytes >= 8 << 20


def test_a_model_without_a_host_copy_gives_up_pages_but_no_block() -> None:
    with serving() as served:
        served.runner.weights.release_host(served.device)
        (session,) = begin(served, prompts(1, 100))
        served.step()
        needed = least(served)
        set_budget(served, needed)
        assert served.runner.places.places == (BlockPlace.PLAIN,) * 4
        with pytest.raises(OutOfMemory):
            set_budget(served, needed - 1)
        served.run()
        set_budget(served, MEMORY)
        assert session.tokens[-WISH:] == reference.greedy(FOLDER, session.tokens[:-WISH], WISH)


def test_a_budget_may_grow_beyond_its_first_value() -> None:
    with serving(memory=MEMORY) as served:
        set_budget(served, 2 * MEMORY)
        assert served.device.budget.total == 2 * MEMORY


# --- through the engine ----------------------------------------------------------------------------------------------


def set_through(engine: EngineThread, total: int) -> messages.FromEngine:
    """Sets the budget of an engine that runs nothing."""
    request = engine.number()
    engine.send(messages.SetBudget(request, total))
    reply = engine.until(messages.BudgetSet | messages.Failed)  # type: ignore[arg-type]
    assert reply.request == request
    return reply


def test_each_budget_message_gets_one_reply_while_requests_run() -> None:
    """The tokens do not depend on when the message comes."""
    chance, texts = random.Random(1), prompts(16, 300)
    with EngineThread(max_batch_tokens=128) as engine:
        engine.loaded(FOLDER)
        refusal = set_through(engine, 1)
        assert isinstance(refusal, messages.Failed) and refusal.code == "out_of_memory"
        needed = refusal.data["needed"] + (4 << 20)
        runs = [engine.run_message(f"s{n}", text, WISH) for n, text in enumerate(texts)]
        for n in range(16):
            engine.open(f"s{n}")
        engine.send(*runs)
        tokens: dict[int, list[int]] = {run.request: [] for run in runs}
        ended: dict[int, messages.FromEngine] = {}
        asked: dict[int, int] = {}
        while len(ended) < 16:
            message = engine.receive()
            if isinstance(message, messages.Stepped):
                for token in message.tokens:
                    tokens[token.request].append(token.token)
                if chance.random() < 0.3:
                    total = chance.choice([needed, needed + chance.randint(0, 1 << 22), MEMORY])
                    asked[request := engine.number()] = total
                    engine.send(messages.SetBudget(request, total))
            elif isinstance(message, messages.BudgetSet):
                assert message.budget_bytes == asked.pop(message.request) >= message.used_bytes
                (info,) = message.models
                assert info.blocks_plain + info.blocks_streamed == 4 and message.seconds >= 0
            else:
                ended[message.request] = message  # type: ignore[union-attr]
        for _ in range(len(asked)):
            engine.until(messages.BudgetSet)
        for run, text in zip(runs, texts, strict=True):
            assert isinstance(ended[run.request], messages.Finished), ended[run.request]
            assert tokens[run.request] == reference.greedy(FOLDER, text, WISH, tokens[run.request])
        report = engine.report()
        assert report.used_bytes <= report.budget_bytes


def test_two_models_share_a_smaller_budget() -> None:
    text, folders = random_prompt(40, VOCAB, 3), {"m": FOLDER, "n": reduced_model("qwen3")}
    with EngineThread() as engine:
        for name, folder in folders.items():
            engine.loaded(folder, name, kv_bytes=64 << 20)
            engine.open(name, name)
        refusal = set_through(engine, 1)
        assert isinstance(refusal, messages.Failed)
        needed = refusal.data["needed"]
        assert isinstance(set_through(engine, needed - 1), messages.Failed)
        for total in (needed, MEMORY, needed + (1 << 20), needed, MEMORY):
            reply = set_through(engine, total)
            assert isinstance(reply, messages.BudgetSet) and reply.used_bytes <= reply.budget_bytes == total
            streamed = sum(info.blocks_streamed for info in reply.models)
            assert streamed == {needed: 8, MEMORY: 0}.get(total, streamed)
            for name, folder in folders.items():
                tokens, _ = engine.outcome(engine.run(name, text, 6))
                assert tokens == reference.greedy(folder, text, 6, tokens)
                engine.send(messages.Truncate(name, 0))
            engine.report()


def test_the_budget_cannot_change_during_a_load() -> None:
    with EngineThread() as engine:
        seen: list[messages.FromEngine] = []

        def grant(need: messages.NeedArena) -> messages.ArenaReady:
            seen.append(set_through(engine, MEMORY // 2))
            return engine.grant(need)

        engine.loaded(FOLDER, grant=grant)
        (reply,) = seen
        assert isinstance(reply, messages.Failed) and "is being loaded" in reply.message
        assert isinstance(set_through(engine, MEMORY // 2), messages.BudgetSet)
