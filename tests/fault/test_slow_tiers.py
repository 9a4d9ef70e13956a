"""A slow disk and a slow bus, and pages that change tenant on their way: other sessions' steps go on, and no session
ever has a page on the device with data of another tenant."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from djinnd import messages
from djinnd.engine.run.model_runner import ModelRunner
from djinnd.kvcache.page_file import Bytes, PageFile
from tests.support import reference
from tests.support.engine_thread import EngineThread
from tests.support.loaded import random_prompt
from tests.support.models import reduced_model

pytestmark = pytest.mark.smoke

FOLDER = reduced_model("llama-2")
PAGE_BYTES = 512 << 10  # 256 tokens
NEW = 6
FOREVER = 60.0  # seconds
ALICE, BOB = 1000, 1001


class SlowDisk:
    """Delays writes and reads until the test opens the gate."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.gate, self.waits = threading.Event(), threading.Event()
        for name in ("_write", "_read"):
            patch.setattr(PageFile, name, self._behind_the_gate(getattr(PageFile, name)))

    def _behind_the_gate(self, act: Any) -> Any:
        def late(file: PageFile, slot: int, buffer: Bytes, *more: int) -> Any:
            self.waits.set()
            assert self.gate.wait(FOREVER)
            return act(file, slot, buffer, *more)

        return late


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SlowDisk:
    return SlowDisk(monkeypatch)


@pytest.fixture
def engine(tmp_path: Path, disk: SlowDisk) -> Iterator[EngineThread]:
    """An engine with three pages on the device."""
    with EngineThread(max_batch_tokens=512) as engine:
        try:
            tiers = {"host_kv_bytes": 9 * PAGE_BYTES, "disk_kv_bytes": 8 * PAGE_BYTES, "disk_folder": str(tmp_path)}
            engine.loaded(FOLDER, kv_bytes=4 * PAGE_BYTES, **tiers)
            need = engine.until(messages.NeedArena)
            engine.send(engine.grant(need))
            while not engine.report().models[0].disk_pages:
                time.sleep(0.01)
            yield engine
        finally:
            disk.gate.set()
            engine.socket.close()
            engine.join()
            transfers = engine.transfers()  # an engine process would have ended them
            transfers.settle()
            transfers.close()


def runner(engine: EngineThread) -> ModelRunner:
    return engine.runner()


def kv_of(engine: EngineThread, page: Tensor) -> Tensor:
    """The page's KV as [blocks, 2, tokens, the rest]."""
    return page.view(torch.float32).view(runner(engine).model.num_blocks, 2, 256, -1)


def greedy(text: list[int]) -> list[int]:
    return reference.greedy(FOLDER, text, NEW)


def ask(engine: EngineThread, session: str, tenant: int, prompt: list[int]) -> list[int]:
    engine.open(session, tenant=tenant)
    tokens, _ = engine.outcome(engine.run(session, prompt, NEW))
    assert tokens == greedy(prompt)
    return prompt + tokens


def pause(engine: EngineThread, session: str, tier: str) -> int:
    number = engine.number()
    engine.send(messages.Pause(number, session, tier))  # type: ignore[arg-type]
    return number


def test_other_sessions_continue_while_one_moves_to_a_slow_disk_and_back(engine: EngineThread, disk: SlowDisk) -> None:
    text = ask(engine, "a", ALICE, random_prompt(300, 512, seed=1))
    number = pause(engine, "a", "disk")
    assert disk.waits.wait(FOREVER)
    ask(engine, "b", ALICE, random_prompt(30, 512, seed=2))  # only its tokens have come: the pause is not answered
    disk.gate.set()
    told = engine.until(messages.Paused)
    assert (told.request, told.pages) == (number, 2)

    engine.send(messages.Close("b"))
    ask(engine, "c", ALICE, random_prompt(700, 512, seed=3))  # takes all pages of the device
    engine.send(messages.Close("c"))
    disk.gate.clear()
    disk.waits.clear()
    engine.send(messages.Resume("a"))
    assert disk.waits.wait(FOREVER)
    ask(engine, "d", ALICE, random_prompt(30, 512, seed=4))
    request = engine.run_message("a", [], NEW)
    engine.send(request)
    disk.gate.set()
    tokens, reply = engine.outcome(request.request)
    assert tokens == greedy(text)
    assert isinstance(reply, messages.Finished) and reply.computed == 1


def test_a_page_that_failed_to_come_holds_no_data_of_the_previous_tenant(
    engine: EngineThread, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that will be filled completely are not zeroed first. If filling one fails, it is zeroed after all."""
    disk.gate.set()
    text = ask(engine, "a", ALICE, random_prompt(300, 512, seed=1))
    pause(engine, "a", "disk")
    assert engine.until(messages.Paused).pages == 2
    pages = runner(engine).model.pool
    ask(engine, "b", BOB, random_prompt(700, 512, seed=2))
    bobs = pages.clone()
    assert all(bobs[page].any() for page in (1, 2, 3))
    engine.send(messages.Close("b"))

    def broken(*_: Any) -> None:
        raise OSError("the disk has caught fire")

    monkeypatch.setattr(PageFile, "_read", broken)
    engine.send(messages.Resume("a"))
    tokens, _ = engine.outcome(engine.run("a", [], NEW))
    assert tokens == greedy(text)
    engine.report()
    held = runner(engine).kv.pages_of("a")
    tail = len(text) + NEW - 256  # tokens of its second page; behind them comes free room
    kv = kv_of(engine, pages[held[1]])
    assert kv[:, :, : tail - 1].any() and not kv[:, :, tail:].any()


def test_promoted_pages_are_overwritten_completely(engine: EngineThread, disk: SlowDisk) -> None:
    disk.gate.set()
    text = ask(engine, "a", ALICE, random_prompt(300, 512, seed=1))
    pages = runner(engine).model.pool
    before = [pages[page].clone() for page in runner(engine).kv.pages_of("a")]
    pause(engine, "a", "host")
    assert engine.until(messages.Paused).pages == 2
    ask(engine, "b", BOB, random_prompt(700, 512, seed=2))
    engine.send(messages.Close("b"), messages.Resume("a"))
    message = engine.run_message("a", [], 1)
    engine.send(message)
    tokens, reply = engine.outcome(message.request)
    assert tokens == greedy(text)[:1]
    assert isinstance(reply, messages.Finished) and reply.computed == 1
    first, last = runner(engine).kv.pages_of("a")
    assert torch.equal(pages[first], before[0])
    length = len(text) - 256
    now, then = kv_of(engine, pages[last]), kv_of(engine, before[1])
    assert torch.equal(now[:, :, : length - 1], then[:, :, : length - 1])
    assert not now[:, :, length:].any(), "no data of the tenant in between"
