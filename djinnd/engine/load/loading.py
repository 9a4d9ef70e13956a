"""Loads models while other models step, and plans loads.

    engine thread:  submit ─────────────────────────────────────────────► adopt: KV pool, check, graphs → Loaded
    job's thread:      read ─ NeedArena ─ wait ─ fill ─ pin ─ upload ─┘
                                     ▲
    engine thread:          arena_ready / arena_refused (from the server)

Each job has a thread, and the threads take turns on the device (`turns.py`). Loads run one after another; only a load
that waits for slow files lets others go first (`job_files.py`). When the engine ends, a load stops at the next buffer.
After a load, the memory of the model's host tier is mapped and pinned by a job of the same kind:

    engine thread:  submit(WantPages) ───────────────────────────────► take_pages
    job's thread:      NeedArena ─ wait ─ map ─ pin ───────────────┘
"""

from __future__ import annotations

import logging
import mmap
import os
import queue
import threading
import time
from dataclasses import dataclass

import posix_ipc
import torch
from torch import Tensor

from djinn_client.errors import DjinnError, OutOfMemory, from_code
from djinn_client.transport.shm import map_read_only
from djinnd.device import Device
from djinnd.engine.io.channel import ServerChannel, ServerGone
from djinnd.engine.load.job_files import JobFiles, WithFiles
from djinnd.engine.load.planning import describe, reserved_bytes
from djinnd.engine.load.turns import DeviceQueue, DeviceTurn
from djinnd.engine.memory.host_pages import HostPages, object_bytes
from djinnd.engine.memory.memory import ModelShape, pages_share
from djinnd.engine.tuning import ANY_POSITIONS
from djinnd.kvcache.page_file import PageFile
from djinnd.kvcache.page_folder import remove_abandoned
from djinnd.messages import (
    ArenaFilled,
    ArenaReady,
    ArenaRefused,
    DescribeDevice,
    DeviceDescribed,
    DeviceFigures,
    ImageDescribed,
    Load,
    Loading,
    NeedArena,
    Plan,
    Planned,
)
from djinnd.model.placing.image import image_of
from djinnd.model.placing.loader import ModelLoader, Weights
from djinnd.model.states.layout import state_bytes
from djinnd.model.states.workspace import largest

log = logging.getLogger("djinnd.engine")


@dataclass(frozen=True, slots=True)
class WantFile:
    """The files of a model's disk tier."""

    folder: str
    name: str
    slots: int
    any_size: bool  # see PageFile


@dataclass(frozen=True, slots=True)
class WantPages:
    """A job that maps the tiers below the device for a loaded model. `file` None: host only."""

    request: int  # of the model's Load
    model: str
    slots: int  # wanted; the arena may have more or fewer if an earlier engine left pages of the same fingerprint
    page_bytes: int
    fingerprint: str
    file: WantFile | None = None


Job = WithFiles | DescribeDevice | WantPages
Answers = queue.SimpleQueue[ArenaReady | ArenaRefused | None]  # None: the queue is closing

_JOIN_S = 30.0  # seconds


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Loaded weights and their shape, or the error."""

    load: Load
    weights: Weights | None
    shape: ModelShape | None
    error: DjinnError | None


@dataclass(frozen=True, slots=True)
class PagesResult:
    """The receiver must release the pages, even if the model has been unloaded meanwhile. A later load of the same name
    has another `request`."""

    request: int
    model: str
    pages: HostPages | None
    why: str = ""  # reason why `pages` is None
    file: PageFile | None = None
    why_no_file: str = ""

    def release(self) -> None:
        """Closes the file and releases the pages, if the model does not need them."""
        if self.file is not None:
            self.file.close()
        if self.pages is not None:
            self.pages.release()


class _Closing(Exception):
    """The engine ends, so the job stops."""


class LoadQueue:
    """Owns the jobs' threads. The engine's thread takes `results` and `_pages`; each new one wakes it."""

    def __init__(self, channel: ServerChannel, device: Device, max_batch_tokens: int) -> None:
        self._channel = channel
        self._device = device
        self._max_batch_tokens = max_batch_tokens
        self._closing = False
        self._device_queue = DeviceQueue()
        self._threads: list[threading.Thread] = []
        self._unfinished = 0  # loads without a result that the engine has taken
        self._arenas: dict[int, Answers] = {}  # by request that waits for an arena
        self.results: queue.SimpleQueue[LoadResult] = queue.SimpleQueue()
        self._pages: queue.SimpleQueue[PagesResult] = queue.SimpleQueue()

    def submit(self, job: Job) -> None:
        self._unfinished += isinstance(job, Load)
        thread = threading.Thread(
            target=self._work, args=(job, DeviceTurn(self._device_queue)), name="djinn-load", daemon=True
        )
        self._threads = [*(each for each in self._threads if each.is_alive()), thread]
        thread.start()

    @property
    def is_busy(self) -> bool:
        """True while a load has taken device memory that no runner owns yet."""
        return self._unfinished > 0

    def take(self) -> LoadResult | None:
        """The next finished load, or None."""
        if self.results.empty():
            return None
        self._unfinished -= 1
        return self.results.get()

    def take_pages(self) -> PagesResult | None:
        """The next finished job of a host tier, or None."""
        return None if self._pages.empty() else self._pages.get()

    def arena(self, answer: ArenaReady | ArenaRefused) -> None:
        answers = self._arenas.get(answer.request)
        if answers is not None:
            answers.put(answer)
        elif isinstance(answer, ArenaReady) and answer.fd >= 0:
            os.close(answer.fd)

    def _work(self, job: Job, turn: DeviceTurn) -> None:
        """The thread of one job. It keeps no reference to the result, because the memory must go with the model."""
        files = None if isinstance(job, WantPages | DescribeDevice) else JobFiles(job, turn, self._check_open)
        try:
            turn.take()
            self._check_open()
            self._run_job(job, files)
            self._channel.wake()
        except (_Closing, ServerGone):
            pass
        finally:
            turn.give_way()
            if files is not None:
                files.close()  # no one waits for this any more

    def _check_open(self) -> None:
        if self._closing:
            raise _Closing

    def _run_job(self, job: Job, files: JobFiles | None) -> None:
        try:
            if isinstance(job, WantPages):
                self._pages.put(PagesResult(job.request, job.model, self._bring_pages(job), "", *_file(job)))
            elif isinstance(job, DescribeDevice):
                self._channel.send(DeviceDescribed(job.request, self._figures(job.held_bytes)))
            else:
                assert files is not None
                self._run_with_files(files, job)
            return
        except (_Closing, ServerGone):
            raise
        except DjinnError as error:
            told = error
        except torch.OutOfMemoryError as error:
            told = OutOfMemory(f"loading {job.model}: {error}")
        except Exception as error:
            log.exception("load_failed model=%s", job.model)
            told = DjinnError(f"loading {job.model} failed: {error!r}")
        if isinstance(job, Load):
            self.results.put(LoadResult(job, None, None, told))
        elif isinstance(job, WantPages):
            log.warning("pages_refused model=%s reason=%s", job.model, told.message)
            self._pages.put(PagesResult(job.request, job.model, None, told.message))
        else:
            self._channel.refuse(job.request, told)

    def _figures(self, held_bytes: int) -> DeviceFigures:
        device = self._device
        return DeviceFigures(
            device.torch_device.type,
            device.budget.total,
            device.budget.free + held_bytes,
            device.reserved,
            device.rates(),
            self._max_batch_tokens,
        )

    def _run_with_files(self, files: JobFiles, job: WithFiles) -> None:
        if isinstance(job, Load):
            self.results.put(self._load(job, files))
            return
        loader = self._loader(job, files)
        if isinstance(job, Plan):
            plan = describe(job, loader, model_shape(loader), self._device, self._max_batch_tokens)
            self._channel.send(Planned(job.request, plan))
        else:
            self._channel.send(ImageDescribed(job.request, image_of(loader)))

    def _loader(self, job: WithFiles, files: JobFiles) -> ModelLoader:
        return ModelLoader(job.model, files.checkpoint(), self._device, job.dtype, job.placing, job.shared)

    def _load(self, load: Load, files: JobFiles) -> LoadResult:
        def progress(stage: str, done: int, total: int) -> None:
            self._check_open()
            self._channel.send(Loading(load.model, stage, done, total))

        progress("opening", 0, 0)
        self._device.rates()  # while the device has room for the measurement
        loader = self._loader(load, files)
        shape = model_shape(loader)
        budget = self._device.budget
        reserved = reserved_bytes(loader, shape, load.kv_bytes, self._max_batch_tokens, budget.total, budget.free)

        def arena(nbytes: int, fingerprint: str) -> tuple[Tensor, str | None]:
            answer = self._ask_arena(NeedArena(load.request, load.model, nbytes, fingerprint))
            memory = map_arena(answer, nbytes) if answer.fd < 0 else map_image(answer.fd, nbytes)
            return memory, answer.identity if answer.complete else None

        weights = loader.run(arena, progress, reserved, pages_share(load.kv_bytes), files.reading)
        if load.shared is None:
            self._channel.send(ArenaFilled(load.model, weights.identity))
        return LoadResult(load, weights, shape, None)

    def _bring_pages(self, wanted: WantPages) -> HostPages:
        """Raises OutOfMemory, or DjinnError if the model has been unloaded meanwhile."""
        nbytes = object_bytes(wanted.slots, wanted.page_bytes)
        began = time.monotonic()
        answer = self._ask_arena(NeedArena(wanted.request, wanted.model, nbytes, wanted.fingerprint, holds="pages"))
        try:
            pages = HostPages(map_arena(answer), wanted.page_bytes, self._device)
        except posix_ipc.ExistentialError as error:
            raise DjinnError(f"{wanted.model} has been unloaded") from error
        seconds = time.monotonic() - began
        log.info(
            "host_pages model=%s pages=%d bytes=%d seconds=%.2f", wanted.model, pages.capacity, pages.nbytes, seconds
        )
        return pages

    def _ask_arena(self, need: NeedArena) -> ArenaReady:
        answers = self._arenas[need.request] = queue.SimpleQueue()
        try:
            self._check_open()  # `close` finds the queue, or this sees that it has begun
            self._channel.send(need)
            answer = answers.get()
        finally:
            del self._arenas[need.request]
        if answer is None:
            raise _Closing
        if isinstance(answer, ArenaRefused):
            raise from_code(answer.code, answer.message, answer.data)
        return answer

    def close(self) -> None:
        """Stops all jobs and waits for their threads, for up to `_JOIN_S` seconds: a file system may hold one."""
        self._closing = True
        self._device_queue.close()
        for answers in list(self._arenas.values()):
            answers.put(None)
        until = time.monotonic() + _JOIN_S
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0))


def _file(wanted: WantPages) -> tuple[PageFile | None, str]:
    """→ the file or None, and the reason why there is none. Reserving its space takes as long as the disk takes."""
    file = wanted.file
    if file is None:
        return None, ""
    try:
        for gone in remove_abandoned(file.folder, but=file.name):
            log.info("page_file_removed name=%s reason=the disk is short, and no model has used it for longest", gone)
        size, fingerprint = wanted.page_bytes, wanted.fingerprint
        return PageFile(file.folder, file.name, size, file.slots, fingerprint, any_size=file.any_size), ""
    except OSError as error:
        log.warning("page_file_refused model=%s error=%s", wanted.model, error)
        return None, f"{file.folder}: {error}"


def map_arena(answer: ArenaReady, nbytes: int | None = None) -> Tensor:
    """The model's part of shared memory as uint8 [nbytes]; None: all of it. The tensor owns the mapping."""
    memory = posix_ipc.SharedMemory(answer.name)
    try:
        nbytes = memory.size - answer.offset if nbytes is None else nbytes
        assert memory.size >= answer.offset + nbytes, (memory.size, answer.offset, nbytes)
        mapping = mmap.mmap(memory.fd, answer.offset + nbytes)
    finally:
        memory.close_fd()
    return torch.frombuffer(mapping, dtype=torch.uint8, offset=answer.offset, count=nbytes)


def map_image(fd: int, nbytes: int) -> Tensor:
    """A client's image as uint8 [nbytes], mapped read-only. Closes `fd`; the tensor owns the mapping."""
    try:
        return torch.frombuffer(map_read_only(fd, nbytes), dtype=torch.uint8)
    finally:
        os.close(fd)


def model_shape(loader: ModelLoader) -> ModelShape:
    skeleton = loader.skeleton
    config = skeleton.config
    layouts = [buffer.layout for buffer in loader.store.buffers[:-1]]  # of blocks and experts
    projections = [entry.shape for layout in layouts for entry in layout.entries.values() if len(entry.shape) > 1]
    # On a CPU keys and values are made of latents in pieces of EXPANDED_BYTES, without pages of their own.
    expands = loader.device.torch_device.type != "cpu"
    return ModelShape(
        num_blocks=skeleton.num_blocks,
        kv=skeleton.kv,
        state_bytes=state_bytes(skeleton.stateful),
        states=largest(told.workspace for told in skeleton.stateful),
        width=skeleton.points.width,
        widest=max(max(shape[-2:]) for shape in projections),  # both dimensions: GPT-2's weights are stored transposed
        vocab=config.vocab_size,
        itemsize=loader.dtype.itemsize,
        has_fp8_kv=loader.placing.kv_dtype == "fp8",
        max_positions=getattr(config, "max_position_embeddings", ANY_POSITIONS),
        expanded_width=max((at.expanded_width for at in skeleton.attentions if expands), default=0),
    )
