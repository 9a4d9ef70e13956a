from __future__ import annotations

import dataclasses
import mmap
import os
import socket
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import posix_ipc
import pytest
import torch

from djinn_client.errors import DjinnError, InvalidRequest, ModelRejected, OutOfMemory
from djinn_client.files.model_files import ModelFiles
from djinn_client.protocol import FrameDecoder
from djinn_client.protocol.fields.kv_layout import BlockShape
from djinnd.device.cpu import CpuDevice
from djinnd.engine.io.channel import ServerChannel
from djinnd.engine.load.loading import LoadQueue, PagesResult, WantFile, WantPages, map_arena, model_shape
from djinnd.engine.memory.host_pages import object_bytes
from djinnd.kvcache.tier import Tier
from djinnd.messages import (
    MAX_FRAME,
    ArenaFilled,
    ArenaReady,
    ArenaRefused,
    FromEngine,
    Load,
    NeedArena,
    Plan,
    Planned,
    decode_from_engine,
)
from tests.support.descriptors import open_descriptors
from tests.support.engine_thread import FOREVER
from tests.support.loaded import MEMORY
from tests.support.models import reduced_model
from tests.support.open_files import loader_of


@pytest.fixture
def arena() -> Iterator[posix_ipc.SharedMemory]:
    arena = posix_ipc.SharedMemory(f"/djinnd-test-{uuid.uuid4().hex}", posix_ipc.O_CREX, size=4 * mmap.PAGESIZE)
    yield arena
    arena.close_fd()
    arena.unlink()


def test_the_arena_is_mapped_after_its_header(arena: posix_ipc.SharedMemory) -> None:
    before = open_descriptors()
    tensor = map_arena(ArenaReady(1, arena.name, mmap.PAGESIZE, complete=False), 2 * mmap.PAGESIZE)
    assert (tensor.dtype, tensor.numel(), tensor.data_ptr() % mmap.PAGESIZE) == (torch.uint8, 2 * mmap.PAGESIZE, 0)
    tensor.fill_(7)
    with mmap.mmap(arena.fd, arena.size) as seen:
        assert seen[:] == bytes(mmap.PAGESIZE) + b"\x07" * 2 * mmap.PAGESIZE + bytes(mmap.PAGESIZE)
    del tensor
    assert open_descriptors() == before


def test_too_small_an_arena_is_detected_before_it_is_touched(arena: posix_ipc.SharedMemory) -> None:
    with pytest.raises(AssertionError):
        map_arena(ArenaReady(1, arena.name, mmap.PAGESIZE, complete=False), 4 * mmap.PAGESIZE)


@pytest.mark.parametrize(
    ("family", "kv_heads", "head_dim", "widest", "max_positions"),
    [
        ("llama-2", 4, 16, 160, 2048),
        ("qwen3", 2, 32, 160, 2048),
        ("gpt2", 4, 16, 256, 1024),
        ("gpt-j", 4, 16, 256, 2048),
        ("mixtral", 2, 16, 192, 2048),
    ],
)
def test_the_shape_of_a_family(family: str, kv_heads: int, head_dim: int, widest: int, max_positions: int) -> None:
    device = CpuDevice(MEMORY)
    shape = model_shape(loader_of(reduced_model(family), device, "float16"))
    assert (shape.num_blocks, shape.width, shape.vocab, shape.itemsize) == (4, 64, 512, 2)
    assert shape.kv == (BlockShape(kv_heads, head_dim, head_dim),) * shape.num_blocks
    assert shape.max_positions == max_positions
    assert shape.widest == widest
    device.close()


class Queue:
    """A load queue; the test is its engine."""

    def __init__(self) -> None:
        ours, self.server = socket.socketpair()
        self.device = CpuDevice(MEMORY)
        self.channel = ServerChannel(ours.detach())
        self.loads = LoadQueue(self.channel, self.device, max_batch_tokens=64)
        self.server.settimeout(FOREVER)
        self._decoder = FrameDecoder(MAX_FRAME)
        self._incoming: list[FromEngine] = []

    def error_of(self, load: Load) -> DjinnError:
        self.loads.submit(load)
        self.channel.receive(FOREVER)  # wakes the engine
        result = self.loads.results.get(timeout=FOREVER)
        assert result.load is load and result.weights is None and result.error is not None
        return result.error

    def asked(self) -> FromEngine:
        """The next message for the server."""
        while not self._incoming:
            self._incoming += [decode_from_engine(f.payload) for f in self._decoder.feed(self.server.recv(1 << 16))]
        return self._incoming.pop(0)

    def pages(self) -> PagesResult:
        """The result of the running job of a host tier."""
        while (result := self.loads.take_pages()) is None:
            self.channel.receive(FOREVER)
        return result

    def close(self) -> None:
        self.loads.close()
        self.channel.close()
        self.server.close()
        self.device.close()


@pytest.fixture
def queue() -> Iterator[Queue]:
    queue = Queue()
    yield queue
    queue.close()


def load() -> Load:
    return Load(1, "m", str(reduced_model("llama-2")))


def test_an_unexpected_failure_is_reported_and_the_next_load_is_served(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object) -> None:
        raise ZeroDivisionError("nobody foresaw this")

    monkeypatch.setattr("djinnd.engine.load.loading.model_shape", fails)
    for _ in range(2):
        error = queue.error_of(load())
        assert type(error) is DjinnError and "ZeroDivisionError('nobody foresaw this')" in error.message
    assert queue.device.budget.used == 0


def test_a_device_without_memory_is_reported_as_such(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise torch.OutOfMemoryError("2.00 GiB more")

    monkeypatch.setattr("djinnd.engine.load.loading.model_shape", fails)
    error = queue.error_of(load())
    assert isinstance(error, OutOfMemory) and "loading m: 2.00 GiB more" in error.message


# --- host tiers -----------------------------------------------------------------------------------------------------

WANTED = WantPages(request=7, model="m", slots=3, page_bytes=5000, fingerprint="ab" * 32)
NEED = NeedArena(7, "m", object_bytes(3, 5000), "ab" * 32, "pages")


@pytest.fixture
def reserved() -> Iterator[posix_ipc.SharedMemory]:
    """Shared memory as the server grants for WANTED."""
    size = mmap.PAGESIZE + NEED.nbytes
    reserved = posix_ipc.SharedMemory(f"/djinnd-test-{uuid.uuid4().hex}", posix_ipc.O_CREX, size=size)
    yield reserved
    reserved.close_fd()
    reserved.unlink()


def test_a_host_tier_s_memory_is_mapped_on_a_thread(queue: Queue, reserved: posix_ipc.SharedMemory) -> None:
    queue.loads.submit(WANTED)
    assert queue.asked() == NEED
    assert not queue.loads.is_busy, "no load is under way"
    assert queue.loads.take_pages() is None
    queue.loads.arena(ArenaReady(7, reserved.name, mmap.PAGESIZE, complete=True))
    result = queue.pages()
    assert (result.request, result.model, result.why) == (7, "m", "")
    assert result.pages is not None and result.pages.capacity == 3
    result.pages.slot(2).fill_(5)
    with mmap.mmap(reserved.fd, reserved.size) as seen:
        start = mmap.PAGESIZE + Tier.table_bytes(3) + 2 * 8192
        assert seen[start : start + 8192] == b"\x05" * 5000 + bytes(3192)
    result.pages.release()
    assert queue.loads.take_pages() is None


def test_a_disk_tier_s_file_is_opened_on_a_thread(
    queue: Queue, reserved: posix_ipc.SharedMemory, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    for folder, has_file in ((tmp_path / "pages", True), (tmp_path / "file" / "none", False)):
        queue.loads.submit(dataclasses.replace(WANTED, file=WantFile(str(folder), "m", 20, any_size=False)))
        queue.asked()
        queue.loads.arena(ArenaReady(7, reserved.name, mmap.PAGESIZE, complete=True))
        result = queue.pages()
        assert result.pages is not None
        if has_file:
            assert result.file is not None and (result.file.slots, result.why_no_file) == (20, "")
        else:
            assert result.file is None and str(folder) in result.why_no_file
        result.release()


def test_a_host_tier_has_the_pages_that_an_earlier_engine_left(queue: Queue, reserved: posix_ipc.SharedMemory) -> None:
    queue.loads.submit(dataclasses.replace(WANTED, slots=50))
    assert isinstance(queue.asked(), NeedArena)
    queue.loads.arena(ArenaReady(7, reserved.name, mmap.PAGESIZE, complete=True))
    pages = queue.pages().pages
    assert pages is not None and pages.capacity == 3
    pages.release()


def test_a_refused_host_tier_gives_its_reason_and_the_next_job_is_done(
    queue: Queue, reserved: posix_ipc.SharedMemory
) -> None:
    queue.loads.submit(WANTED)
    queue.asked()
    queue.loads.arena(ArenaRefused(7, "host_kv of m needs 10 bytes", {"needed": 10}))
    assert queue.pages() == PagesResult(7, "m", None, "host_kv of m needs 10 bytes")
    queue.loads.submit(WANTED)
    queue.asked()
    queue.loads.arena(ArenaReady(7, reserved.name, mmap.PAGESIZE, complete=True))
    result = queue.pages()
    assert result.pages is not None
    result.pages.release()


def test_an_unloaded_model_has_no_arena(queue: Queue) -> None:
    queue.loads.submit(WANTED)
    queue.asked()
    queue.loads.arena(ArenaReady(7, "/djinnd-test-is-gone", mmap.PAGESIZE, complete=True))
    assert queue.pages() == PagesResult(7, "m", None, "m has been unloaded")


def test_closing_does_not_wait_for_pages(queue: Queue) -> None:
    queue.loads.submit(WANTED)
    queue.asked()
    queue.loads.close()
    assert queue.loads.take_pages() is None
    assert not [thread for thread in threading.enumerate() if thread.name == "djinn-load"]


def test_loaded_weights_have_their_fingerprint(queue: Queue) -> None:
    load_ = load()
    queue.loads.submit(load_)
    while not isinstance(need := queue.asked(), NeedArena):
        pass
    assert need.holds == "weights"
    memory = posix_ipc.SharedMemory(f"/djinnd-test-{uuid.uuid4().hex}", posix_ipc.O_CREX, size=4096 + need.nbytes)
    try:
        queue.loads.arena(ArenaReady(1, memory.name, 4096, complete=False))
        result = queue.loads.results.get(timeout=FOREVER)
        assert result.weights is not None
        identity, fingerprint = result.weights.identity, result.weights.fingerprint
        assert len({identity, fingerprint, need.fingerprint}) == 3, "before reading, after it, and with the layout"
        while not isinstance(filled := queue.asked(), ArenaFilled):
            pass
        assert filled.identity == identity
        result.weights.release(queue.device)
    finally:
        memory.close_fd()
        memory.unlink()


# --- files that do not come -------------------------------------------------------------------------------------------


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Reads of weights block until this event is set, for files that came with their job."""
    event, read = threading.Event(), ModelFiles.read_into

    def read_into(files: ModelFiles, name: str, offset: int, memory: memoryview) -> int:
        if files.folder == "stuck":
            assert event.wait(FOREVER)
        return read(files, name, offset, memory)

    monkeypatch.setattr(ModelFiles, "read_into", read_into)
    monkeypatch.setattr("djinnd.weights.reading.TICK", 0.01)
    monkeypatch.setattr("djinnd.weights.reading.SECONDS", 2.0)
    monkeypatch.setattr("djinnd.weights.reading._LET_END", 0.1)
    yield event
    event.set()


def handed_over(request: int) -> Load:
    with ModelFiles.open(str(reduced_model("llama-2"))) as files:
        fds = [os.dup(files.descriptor(name)) for name in files]
        return Load(request, "stuck", "stuck", files=list(files), fds=fds)


def serve(queue: Queue, memory: posix_ipc.SharedMemory, until: type[FromEngine]) -> FromEngine:
    """Plays the server until a message of that type comes."""
    while not isinstance(message := queue.asked(), until):
        if isinstance(message, NeedArena):
            os.ftruncate(memory.fd, 4096 + message.nbytes)
            queue.loads.arena(ArenaReady(message.request, memory.name, 4096, complete=False))
    return message


def test_a_load_without_its_files_delays_no_other_and_is_given_up(
    queue: Queue, stuck: threading.Event, reserved: posix_ipc.SharedMemory
) -> None:
    before, job = open_descriptors(), handed_over(1)
    queue.loads.submit(job)
    queue.loads.submit(Plan(2, "m", str(reduced_model("llama-2"))))
    planned = serve(queue, reserved, Planned)
    assert isinstance(planned, Planned) and planned.request == 2 and queue.loads.results.empty()
    result = queue.loads.results.get(timeout=FOREVER)
    assert result.load is job and isinstance(result.error, ModelRejected) and "given up" in result.error.message
    assert queue.device.budget.used == 0
    stuck.set()
    queue.loads.close()
    for thread in threading.enumerate():
        if thread.name in ("djinn-load", "djinn-open", "djinn-read"):
            thread.join(FOREVER)
    del result  # frames of its error hold the arena
    assert open_descriptors() == before


def test_closing_does_not_wait_for_files(
    queue: Queue, stuck: threading.Event, reserved: posix_ipc.SharedMemory
) -> None:
    before = open_descriptors()
    queue.loads.submit(handed_over(1))
    serve(queue, reserved, NeedArena)
    queue.loads.submit(handed_over(2))
    queue.loads.close()
    stuck.set()
    assert open_descriptors() <= before and queue.loads.results.empty()


@pytest.mark.parametrize("files", [["config.json", "config.json"], ["../config.json"], ["config.json"] * 3])
def test_impossible_files_are_closed_and_refused(queue: Queue, files: list[str]) -> None:
    before = open_descriptors()
    fds = [os.memfd_create("f") for _ in files[:2]]
    error = queue.error_of(Load(1, "m", "theirs", files=files, fds=fds))
    assert isinstance(error, InvalidRequest)
    queue.loads.close()
    assert open_descriptors() == before
