"""Pages over the bus: the same bits come back while other sessions run."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from djinnd.core.batch import Batch
from djinnd.core.session import Session
from djinnd.engine.memory.host_pages import HostPages, object_bytes
from djinnd.engine.paging import page_copies
from djinnd.engine.paging.transfers import Transfers
from djinnd.kvcache.page_file import PageFile
from djinnd.model.sampling.sampler import Sampled
from tests.support import reference
from tests.support.cuda import cuda_device
from tests.support.loaded import Served, random_prompt, small_pages
from tests.support.models import reduced_model
from tests.support.overwritten import overwrite_free_pages
from tests.support.paged import same_bytes

pytestmark = pytest.mark.gpu

FOLDER = reduced_model("llama-3.1")
SLOTS = 200
PROMPT, NEW = random_prompt(150, 512, 1), 40


class Tiered:
    """A model with tiers. Page copies go on between its steps."""

    def __init__(self, served: Served, folder: Path) -> None:
        self.served = served
        runner = served.runner
        self.page_bytes = runner.model.pool.shape[1]
        self.residency = served.scheduler.queues["m"].residency
        self.transfers = Transfers(
            served.device, self.residency.paging, runner.pages.bytes_now, runner.pages.half_bytes
        )
        memory = torch.frombuffer(mmap.mmap(-1, object_bytes(SLOTS, self.page_bytes)), dtype=torch.uint8)
        pages = HostPages(memory, self.page_bytes, served.device)
        self.transfers.attach_host(pages)
        until = time.monotonic() + 60
        while pages.pinned < pages.capacity:  # otherwise pages on disk may be computed again instead of read
            assert time.monotonic() < until
            time.sleep(0.01)
        self.transfers.note_ready()
        self.transfers.attach_disk(PageFile(str(folder), "m", self.page_bytes, SLOTS, "f"))

    def turn(self) -> None:
        """One turn of an engine's loop."""
        self.served.scheduler.queues["m"].over(self.transfers.turn())
        batch = self.served.scheduler.next_batch()
        if batch is None:
            self.transfers.begin_copies()
            self.served.scheduler.queues["m"].over(self.transfers.follow())
        else:

            def beside() -> bool:
                self.transfers.begin_copies()
                self.served.scheduler.queues["m"].over(self.transfers.end())
                return self.residency.paging.is_busy

            self.served.complete(batch, self.served.runner.run(batch, beside))
            self.served.scheduler.queues["m"].over([])
            self.served.runner.settle()

    def settle(self) -> None:
        self.served.scheduler.queues["m"].over(self.transfers.settle())
        self.served.scheduler.check_integrity()

    def away(self, session: Session, tier: str) -> None:
        """Pauses the session while others run, until its pages are in `tier`."""
        self.served.scheduler.pause(session.id)
        while self.residency.paging.is_busy:
            self.turn()
        keys = self.residency.lower_tiers.keys(session)
        if tier == "disk":
            self.residency.paging.write_out(session.id, keys)
            while self.residency.paging.is_busy:
                self.turn()
            self.residency.paging.forget_on_host(keys)
        host, disk = self.residency.paging.count(keys)
        assert (disk if tier == "disk" else host) == len(keys) and session.computed == 0

    def overwrite(self) -> None:
        """Overwrites all free pages, as other sessions would."""
        kv = self.served.runner.kv
        self.served.runner.model.pool[1:] = 0xAB
        torch.cuda.synchronize()  # copies to them do not wait for the test's stream
        overwrite_free_pages(kv)

    def run(self, *sessions: Session) -> None:
        while any(session.request is not None for session in sessions):
            self.turn()


@pytest.fixture
def tiered(tmp_path: Path) -> Iterator[Tiered]:
    """Runs in float32, in which other rows of the batch change only the last bits of a row."""
    with (
        cuda_device() as device,
        Served(FOLDER, device, dtype="float32", plan=small_pages(60), max_batch_tokens=64) as served,
    ):
        served.shuffle_pages()
        tiered = Tiered(served, tmp_path)
        yield tiered
        tiered.settle()
        tiered.transfers.close()


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_pages_come_back_bit_by_bit(tiered: Tiered, tier: str) -> None:
    served, kv = tiered.served, tiered.served.runner.kv
    session = served.open()
    served.submit(session, PROMPT, max_tokens=3)
    tiered.run(session)
    before = served.runner.model.pool[kv.pages_of(session.id)].clone()
    tiered.away(session, tier)
    tiered.overwrite()
    served.scheduler.resume(session.id)
    tiered.settle()
    assert session.computed == len(PROMPT) + 2
    assert same_bytes(served.runner.model.pool[kv.pages_of(session.id)], before)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_session_continues_from_its_paged_out_kv_while_others_decode(tiered: Tiered, tier: str) -> None:
    served = tiered.served
    sessions = [served.open() for _ in range(4)]
    prompts = [PROMPT, *(random_prompt(length, 512, 2) for length in (5, 40, 90))]
    for session, prompt in zip(sessions, prompts, strict=True):
        served.submit(session, prompt, max_tokens=NEW)
    first = sessions[0]
    for resumed_at in (160, 170):
        while len(first.tokens) < resumed_at - 5:
            tiered.turn()
        tiered.away(first, tier)
        for _ in range(3):
            tiered.turn()
        served.scheduler.resume(first.id)
    tiered.run(*sessions)
    for session, prompt in zip(sessions, prompts, strict=True):
        assert session.tokens == [*prompt, *reference.greedy(FOLDER, prompt, NEW)]


def test_a_step_that_begins_with_the_first_halves_of_its_pages_gives_the_same_tokens(
    tiered: Tiered, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Repeats this, also with graphs."""
    monkeypatch.setattr(page_copies, "HALF_BYTES", 1)
    served, late = tiered.served, list[bool]()
    session = served.open()
    served.submit(session, PROMPT, max_tokens=NEW)
    run = served.runner.run

    def noted(batch: Batch, meanwhile: Callable[[], bool]) -> Sampled:
        late.append(served.device.is_behind)
        sampled = run(batch, meanwhile)
        assert not served.device.is_behind
        return sampled

    monkeypatch.setattr(served.runner, "run", noted)
    for length in range(len(PROMPT) + 4, len(PROMPT) + NEW - 4, 4):
        while len(session.tokens) < length:
            tiered.turn()
        tiered.away(session, "host")
        tiered.overwrite()
        served.scheduler.resume(session.id)
    tiered.run(session)
    assert session.tokens == [*PROMPT, *reference.greedy(FOLDER, PROMPT, NEW)]
    assert any(late)
