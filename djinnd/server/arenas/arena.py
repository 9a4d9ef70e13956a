"""The arena: shared-memory objects that hold the weights of models and pages of their sessions. They outlive engines,
and a killed daemon. A model has at most one object for weights and one for pages.

An object is a header (header.py) and the payload. The owner holds a lock (flock) on each of its objects as long
as it lives. So the kernel knows if an owner lives, also across pid namespaces. The pid and start time in the header are
for people and for `djinnctl doctor`.

    weights    filling ──the engine has filled it──► complete ◄──the model sleeps, and is granted again──► asleep
    pages      complete as soon as they are reserved: a table at their beginning says which pages are whole

A daemon adopts the complete objects that an earlier daemon with the same state directory has left. The state directory
tells several daemons on one machine apart.

All memory of an object is reserved before a process maps it. So a full /dev/shm is an error here, and not a SIGBUS
later.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import posix_ipc

from djinn_client.errors import OutOfMemory
from djinn_client.transport.host_memory import tightest
from djinnd.messages import Holding
from djinnd.server.arenas.header import HEADER_BYTES, MAGIC, VERSION, FillState, Header, start_ticks
from djinnd.server.system.shared_objects import PREFIX, SHM, own_objects

log = logging.getLogger("djinnd.server")

Key = tuple[str, Holding]  # name of the model, kind of content


@dataclass(slots=True)
class _Object:
    """One shared-memory object of this daemon."""

    name: str
    fd: int  # holds the owner's lock
    header: Header

    @property
    def nbytes(self) -> int:
        return HEADER_BYTES + self.header.payload

    def write_header(self, header: Header) -> None:
        self.header = header
        os.pwrite(self.fd, self.header.pack(), 0)


class Grant(NamedTuple):
    """An object as an engine maps it: its name, and where its payload begins."""

    name: str
    offset: int
    complete: bool
    identity: str = ""  # of complete weights


class Arena:
    """Owns the shared-memory objects of this daemon. `grant` blocks while it reserves memory, and belongs in a thread.
    The state directory decides which objects `adopt` takes."""

    def __init__(self, state_dir: str) -> None:
        self._state_dir = os.path.abspath(state_dir)
        self._objects: dict[Key, _Object] = {}

    def adopt(self) -> list[str]:
        """Takes over the complete objects of this state directory that no daemon owns, and returns the names of their
        models. Removes incomplete ones, and objects of state directories that are gone. Called at startup, before
        `grant`."""
        for name, fd in own_objects(SHM, PREFIX):
            if not self._take(f"/{name}", fd):
                os.close(fd)
        return sorted(self.models)

    def grant(
        self, model: str, nbytes: int, fingerprint: str, holds: Holding = "weights", *, any_size: bool = False
    ) -> Grant:
        """Returns the object for a model's weights or pages, for one engine to map. An object that holds them already
        is reused; its size must be `nbytes` unless `any_size`. Raises OutOfMemory, with the sizes, if /dev/shm has no
        room."""
        there = self._objects.get((model, holds))
        if there is not None and not _fits(there.header, fingerprint, None if any_size else nbytes):
            log.info(
                "arena_removed name=%s model=%s holds=%s reason=the checkpoint or its layout has changed",
                *(there.name, model, holds),
            )
            self.remove(model, holds)
            there = None
        if there is None:
            there = self._create(model, nbytes, fingerprint, holds)
        state = FillState.COMPLETE if there.header.is_whole else there.header.state
        there.write_header(there.header._replace(state=state, generation=there.header.generation + 1))
        return Grant(there.name, HEADER_BYTES, there.header.is_whole, there.header.identity)

    def bytes_to_grant(self, model: str, nbytes: int, fingerprint: str, holds: Holding, *, any_size: bool) -> int:
        """Bytes of shared memory that the object of such a `grant` will have."""
        there = self._objects.get((model, holds))
        if there is not None and _fits(there.header, fingerprint, None if any_size else nbytes):
            return there.nbytes
        return HEADER_BYTES + nbytes

    def is_complete(self, model: str) -> bool:
        """True if the model has objects, and all of them are complete."""
        there = self._objects_of(model)
        return bool(there) and all(each.header.is_whole for each in there)

    def is_asleep(self, model: str) -> bool:
        """True if `rest` was called last for the model, by this daemon or the one before."""
        there = self._objects_of(model)
        return bool(there) and all(each.header.state is FillState.ASLEEP for each in there)

    def rest(self, model: str) -> None:
        """Marks the model's objects as asleep: they stay without an engine, and the next daemon does not load them at
        start."""
        for there in self._objects_of(model):
            if there.header.is_whole:
                there.write_header(there.header._replace(state=FillState.ASLEEP))

    def complete(self, model: str, identity: str = "") -> None:
        """Marks the model's weights as complete, after the engine has filled them. `identity`: see Header."""
        there = self._objects[model, "weights"]
        there.write_header(there.header._replace(state=FillState.COMPLETE, identity=identity))

    def remove(self, model: str, holds: Holding | None = None) -> None:
        """Removes the model's object of one kind, or all of them. Does nothing if there is none. A process that still
        maps an object keeps its memory until it unmaps it."""
        for there in self._objects_of(model):
            if holds in (None, there.header.holds):
                del self._objects[model, there.header.holds]
                _unlink(there.name)
                os.close(there.fd)

    def remove_incomplete(self, model: str) -> None:
        """Removes the objects of the model that an engine has filled only in part."""
        for there in self._objects_of(model):
            if not there.header.is_whole:
                self.remove(model, there.header.holds)

    def close(self) -> None:
        for model in self.models:
            self.remove(model)

    def leave(self) -> None:
        """Called instead of `close`: keeps complete objects for the next daemon to adopt."""
        for model in self.models:
            self.remove_incomplete(model)
        for there in self._objects.values():
            os.close(there.fd)
        self._objects.clear()

    @property
    def nbytes(self) -> int:
        return sum(there.nbytes for there in list(self._objects.values()))

    def nbytes_of(self, model: str, holds: Holding) -> int:
        """Size of the model's object; 0 if there is none."""
        there = self._objects.get((model, holds))
        return 0 if there is None else there.nbytes

    @property
    def models(self) -> set[str]:
        return {model for model, _ in list(self._objects)}

    def findings(self) -> list[str]:
        """Lists differences between this daemon's table and its objects in /dev/shm. Other threads may create and
        remove objects meanwhile, so only names that are in the table before and after count."""
        before, present, after = self._names(), _owned_by(os.getpid()), self._names()
        missing = [f"arena object {name} is gone" for name in sorted((before & after) - present)]
        return missing + [f"arena object {name} belongs to no model" for name in sorted(present - before - after)]

    def _names(self) -> set[str]:
        return {there.name.removeprefix("/") for there in list(self._objects.values())}

    def _objects_of(self, model: str) -> list[_Object]:
        return [there for (name, _), there in list(self._objects.items()) if name == model]

    def _create(self, model: str, nbytes: int, fingerprint: str, holds: Holding) -> _Object:
        """Creates an object. It is in the table before it has a header, so that `findings` knows each object with a
        header."""
        _check_room(model, HEADER_BYTES + nbytes, holds)
        name, fd = self._open_new(model)
        owner = (os.getpid(), start_ticks(os.getpid()))
        header = Header(*owner, VERSION, FillState.FILLING, nbytes, 0, fingerprint, holds, model, self._state_dir)
        there = self._objects[model, holds] = _Object(name, fd, header)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            there.write_header(header)  # before the memory: without a header it would never be removed
            os.posix_fallocate(fd, 0, HEADER_BYTES + nbytes)
            if holds == "pages":
                there.write_header(header._replace(state=FillState.COMPLETE))
        except OSError as error:
            self.remove(model, holds)
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                raise _no_room(model, HEADER_BYTES + nbytes, holds) from error
            raise
        return there

    def _open_new(self, model: str) -> tuple[str, int]:
        """Creates a shared-memory object; returns its name and descriptor. The name is random, so that no process can
        take it before."""
        digest = hashlib.sha256(model.encode()).hexdigest()[:12]
        while True:
            name = f"/{PREFIX}{os.getpid()}-{digest}-{secrets.token_hex(8)}"
            with suppress(posix_ipc.ExistentialError):
                return name, posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600).fd

    # --- objects of earlier daemons -----------------------------------------------------------------------------------

    def _take(self, name: str, fd: int) -> bool:
        """Adopts an object if it is fit. Returns True if it, and the descriptor with the lock, now belong to this
        daemon."""
        data = os.pread(fd, HEADER_BYTES, 0)
        if not data and _is_creator_gone(name) and _lock(fd):
            _discard(name, "its daemon died before it wrote a header")
        if not data.startswith(MAGIC) or self._belongs_to_other(data) or not _lock(fd):
            return False
        data = os.pread(fd, HEADER_BYTES, 0)  # as its owner left it
        if why := self._why_unfit(data, os.fstat(fd)):
            _discard(name, why)
            return False
        header = Header.unpack(data)
        there = self._objects[header.model, header.holds] = _Object(name, fd, header)
        there.write_header(header._replace(pid=os.getpid(), start_ticks=start_ticks(os.getpid())))
        log.info(
            "arena_adopted name=%s model=%s holds=%s bytes=%d owner=%d",
            *(name, header.model, header.holds, header.payload, header.pid),
        )
        return True

    def _belongs_to_other(self, data: bytes) -> bool:
        """True if the object belongs to another state directory that exists. The daemon there adopts or removes it.
        Checked before the lock is tried, because that daemon may be starting now."""
        with suppress(ValueError):
            header = Header.unpack(data)
            return header.state_dir != self._state_dir and os.path.isdir(header.state_dir)
        return False

    def _why_unfit(self, data: bytes, stat: os.stat_result) -> str:
        """Why an object without an owner must not be adopted; empty if it may be."""
        try:
            header = Header.unpack(data)
        except ValueError as error:
            return str(error)
        if not header.is_whole:
            return f"the {header.holds} of {header.model} are incomplete"
        if header.state_dir != self._state_dir:
            return f"its daemon's state directory {header.state_dir} is gone"
        if stat.st_size != HEADER_BYTES + header.payload:
            return f"it has {stat.st_size:,} bytes and should have {HEADER_BYTES + header.payload:,}"
        another = (header.model, header.holds) in self._objects
        return f"there is another one with the {header.holds} of {header.model}" if another else ""


def _fits(header: Header, fingerprint: str, nbytes: int | None) -> bool:
    return header.fingerprint == fingerprint and nbytes in (None, header.payload)


def _lock(fd: int) -> bool:
    """Tries to lock an object. Returns False if its owner lives, or if the object was removed meanwhile."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.fstat(fd).st_nlink > 0


def _is_creator_gone(name: str) -> bool:
    """True if the process that has created the object, by the pid in its name, is gone."""
    pid = name.removeprefix(f"/{PREFIX}").partition("-")[0]
    return pid.isdecimal() and not os.path.exists(f"/proc/{pid}")


def _owned_by(pid: int) -> set[str]:
    """Names of the objects that have this owner in their header."""
    owner, names = (pid, start_ticks(pid)), set()
    for name, fd in own_objects(SHM, PREFIX):
        with open(fd, "rb") as file, suppress(OSError, ValueError):
            if Header.unpack(file.read(HEADER_BYTES))[:2] == owner:
                names.add(name)
    return names


def _check_room(model: str, nbytes: int, holds: Holding) -> None:
    room = os.statvfs(SHM)
    if nbytes > room.f_bavail * room.f_frsize:
        raise _no_room(model, nbytes, holds)
    bound = tightest()
    if bound is not None and nbytes > bound.left:  # beyond it the kernel kills a process instead of returning an error
        raise OutOfMemory(
            f"{_content(model, holds)} needs {nbytes:,} bytes of host memory and {bound.name} leaves {bound.left:,}: "
            "unload another model or ask for less",
            needed=nbytes,
            free=bound.left,
        )


def _no_room(model: str, nbytes: int, holds: Holding) -> OutOfMemory:
    room = os.statvfs(SHM)
    free = room.f_bavail * room.f_frsize
    size = (room.f_blocks * room.f_frsize + nbytes - free + (1 << 30) - 1) >> 30
    way = "unload another model" if holds == "weights" else "ask for less"
    return OutOfMemory(
        f"{_content(model, holds)} needs {nbytes:,} bytes of shared memory and {SHM} has {free:,} free: {way}, or make "
        f"it larger: mount -o remount,size={size}G {SHM} (in a container: --shm-size={size}g)",
        needed=nbytes,
        free=free,
    )


def _content(model: str, holds: Holding) -> str:
    """Names an object's content in errors, by the setting of its size if it has one."""
    return model if holds == "weights" else f"host_kv of {model}"


def _discard(name: str, why: str) -> None:
    """Removes an object that another daemon has left."""
    log.info("arena_removed name=%s reason=%s", name, why)
    with suppress(PermissionError):
        _unlink(name)


def _unlink(name: str) -> None:
    with suppress(posix_ipc.ExistentialError):
        posix_ipc.unlink_shared_memory(name)
