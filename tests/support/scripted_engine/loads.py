"""Loads of the scripted engine: it asks for an arena, writes the weights, and asks for the host's pages."""

from __future__ import annotations

import mmap
import os
import signal
import time

import posix_ipc

from djinnd import messages
from djinnd.server.arenas.header import HEADER_BYTES
from tests.support.scripted_engine.channel import Channel
from tests.support.scripted_engine.models import Models
from tests.support.scripted_engine.script import ARENA_BYTES, LATE_S, Script
from tests.support.scripted_engine.session import Session

WEIGHTS = b"W" * ARENA_BYTES


class Loads:
    def __init__(self, script: Script, channel: Channel, models: Models, sessions: dict[str, Session]) -> None:
        self._script = script
        self._channel = channel
        self._models = models
        self._sessions = sessions
        self._loads: dict[int, messages.Load] = {}  # by request: they have asked for their arena
        self._page_loads: dict[int, messages.Load] = {}  # by request: they have asked for their host tier
        self._pages: dict[str, mmap.mmap] = {}  # by model
        self._late: dict[float, messages.Load] = {}  # loads, by the time when they begin

    def on_load(self, load: messages.Load) -> None:
        assert load.model not in self._models.infos
        match self._script.on_load.get(load.model):
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "fail":
                self._channel.fail(load.request, "model_rejected", f"{load.model} lacks a tensor")
                return
            case "full":
                self._channel.refuse(load.request, "there is no room on the device", 1)
                return
            case "big":
                self._loads[load.request] = load
                self._channel.send(messages.NeedArena(load.request, load.model, 1 << 60, "f" * 64))
                return
            case "late":
                self._late[time.monotonic() + LATE_S] = load
                return
        self._begin(load)

    def begin_late(self) -> None:
        for at in [at for at in self._late if at <= time.monotonic()]:
            self._begin(self._late.pop(at))

    def _begin(self, load: messages.Load) -> None:
        self._loads[load.request] = load
        self._channel.send(messages.Loading(load.model, "reading", 10, 100))
        self._channel.send(messages.NeedArena(load.request, load.model, ARENA_BYTES, fingerprint(load.path)))

    def on_arenarefused(self, refused: messages.ArenaRefused) -> None:
        if refused.request in self._page_loads:
            self._note_pages(self._page_loads.pop(refused.request).model, refused.message)
            return
        del self._loads[refused.request]
        self._channel.send(messages.Failed(refused.request, refused.code, refused.message, refused.data))

    def on_arenaready(self, ready: messages.ArenaReady) -> None:
        if ready.request in self._page_loads:
            self._bring_pages(self._page_loads.pop(ready.request), ready)
            return
        load = self._loads.pop(ready.request)
        memory = posix_ipc.SharedMemory(ready.name)
        with mmap.mmap(memory.fd, ready.offset + ARENA_BYTES) as arena:
            memory.close_fd()
            block = slice(ready.offset, ready.offset + ARENA_BYTES)
            if ready.complete:
                assert arena[block] == WEIGHTS
            arena[block] = WEIGHTS
        if not ready.complete:
            self._channel.send(messages.ArenaFilled(load.model))
        info = self._models.add(load, self._script.context)
        self._channel.send(messages.Loading(load.model, "adopted" if ready.complete else "filled", 100, 100))
        self._channel.send(messages.Loaded(load.request, info))
        if not self._script.keep_host:
            self._channel.send(messages.HostReleased(load.model))
        self._want_pages(load)

    def on_unload(self, unload: messages.Unload) -> None:
        own = {name: session for name, session in self._sessions.items() if session.model == unload.model}
        assert not any(session.run for session in own.values()) and (unload.keep_pages or not own)
        for name in own:
            del self._sessions[name]
        pages = self._pages.pop(unload.model, None)
        if pages is not None and unload.keep_pages:
            _keep(pages)
        del self._models.infos[unload.model]
        self._channel.send(messages.Unloaded(unload.request))

    # --- pages on the host --------------------------------------------------------------------------------------------

    def _want_pages(self, load: messages.Load) -> None:
        nbytes = self._script.pages if load.host_kv_bytes is None else load.host_kv_bytes
        if nbytes:
            self._page_loads[load.request] = load
            wanted = messages.NeedArena(load.request, load.model, nbytes, fingerprint(load.path), holds="pages")
            self._channel.send(wanted)

    def _bring_pages(self, load: messages.Load, ready: messages.ArenaReady) -> None:
        """Adds a note with the first bytes of the pages, which say how the engine that wrote them ended."""
        assert ready.complete
        memory = posix_ipc.SharedMemory(ready.name)
        pages = mmap.mmap(memory.fd, memory.size)
        memory.close_fd()
        told = pages[ready.offset : ready.offset + 8].rstrip(b"\0").decode() or "new"
        self._note_pages(load.model, f"pages: {told}, {len(pages) - ready.offset} bytes, disk: {load.disk_folder}")
        pages[ready.offset : ready.offset + 8] = b"used\0\0\0\0"
        self._pages[load.model] = pages

    def _note_pages(self, model: str, told: str) -> None:
        if model in self._models.infos:
            self._models.change(model, notes=[told])

    def keep_pages(self) -> None:
        """Marks the pages of all models as kept for the next engine."""
        for pages in self._pages.values():
            _keep(pages)


def _keep(pages: mmap.mmap) -> None:
    pages[HEADER_BYTES : HEADER_BYTES + 8] = b"kept\0\0\0\0"


def fingerprint(path: str) -> str:
    return (path.encode().hex() * 64)[:64]
