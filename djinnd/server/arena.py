"""The arena: POSIX shared-memory objects that hold models' weights and pages of their sessions, and outlive engine and
daemon. A model has one object of each, at most.

An object is a header (arena_header.py) and the payload. The owner holds a lock (flock) on each of its objects for as
long as it lives, so whether an owner lives is the kernel's word and holds across pid namespaces; pid and start time in
the header are for people and for `djinnctl doctor`.

    weights    filling ──the engine has filled it──► complete ◄──the model sleeps, and is granted again──► asleep
    pages      complete as soon as they are reserved: the table they begin with says which of them are whole

An object that its owner has left complete is adopted by the next daemon with the same state directory: that is what
makes one daemon the successor of another, where several run on a machine.

All of its memory is reserved before anybody maps the object: a full /dev/shm is an error here and never a SIGBUS later.
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
from djinn_client.host_memory import tightest
from djinnd.messages import Holding
from djinnd.server.arena_header import HEADER_BYTES, MAGIC, VERSION, Header, State, start_ticks
from djinnd.server.shared_objects import PREFIX, SHM, own_objects

log = logging.getLogger("djinnd.server")

Key = tuple[str, Holding]  # the model's name, and what of it


@dataclass(slots=True)
class _Object:
    name: str
    fd: int  # holds the lock
    header: Header

    @property
    def nbytes(self) -> int:
        return HEADER_BYTES + self.header.payload

    def write_header(self, header: Header) -> None:
        self.header = header
        os.pwrite(self.fd, self.header.pack(), 0)


class Grant(NamedTuple):
    name: str
    offset: int
    complete: bool
    identity: str = ""  # of weights that are complete


class Arena:
    """Owns this daemon's objects. `grant` blocks while memory is reserved; it belongs in a thread.

    `state_dir` is the daemon's: see `adopt`.
    """

    def __init__(self, state_dir: str) -> None:
        self._state_dir = os.path.abspath(state_dir)
        self._objects: dict[Key, _Object] = {}

    def adopt(self) -> list[str]:
        """At start, before this daemon has objects: takes over those whose owner is gone and which are complete and of
        this state directory; removes what is left of that and of use to nobody, and what no daemon will come for.
        Answers with the models that it then has something of.
        """
        for name, fd in own_objects(SHM, PREFIX):
            if not self._take(f"/{name}", fd):
                os.close(fd)
        return sorted(self.models)

    def grant(
        self, model: str, nbytes: int, fingerprint: str, holds: Holding = "weights", *, any_size: bool = False
    ) -> Grant:
        """The object for a model's weights or pages, for one engine to map. One that holds them already is handed out
        again; with `any_size`, also where it has another size than `nbytes`.

        Raises OutOfMemory with the figures where /dev/shm has no room.
        """
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
        state = State.COMPLETE if there.header.is_whole else there.header.state
        there.write_header(there.header._replace(state=state, generation=there.header.generation + 1))
        return Grant(there.name, HEADER_BYTES, there.header.is_whole, there.header.identity)

    def bytes_to_grant(self, model: str, nbytes: int, fingerprint: str, holds: Holding, *, any_size: bool) -> int:
        """Of shared memory that the object will have which `grant` hands out."""
        there = self._objects.get((model, holds))
        if there is not None and _fits(there.header, fingerprint, None if any_size else nbytes):
            return there.nbytes
        return HEADER_BYTES + nbytes

    def is_complete(self, model: str) -> bool:
        """Whether there is something of the model, and all of it is complete."""
        there = self._objects_of(model)
        return bool(there) and all(each.header.is_whole for each in there)

    def is_asleep(self, model: str) -> bool:
        """Whether `rest` was the last that was said of the model, by this daemon or the one before it."""
        there = self._objects_of(model)
        return bool(there) and all(each.header.state is State.ASLEEP for each in there)

    def rest(self, model: str) -> None:
        """No engine has the model, and what there is of it stays; the next daemon is not to load it at its start."""
        for there in self._objects_of(model):
            if there.header.is_whole:
                there.write_header(there.header._replace(state=State.ASLEEP))

    def complete(self, model: str, identity: str = "") -> None:
        """The engine has filled the object of the model's weights, with those of this identity."""
        there = self._objects[model, "weights"]
        there.write_header(there.header._replace(state=State.COMPLETE, identity=identity))

    def remove(self, model: str, holds: Holding | None = None) -> None:
        """What `holds` says of the model; None: everything. Does nothing where there is no such object. Who still maps
        it keeps the memory until it lets go."""
        for there in self._objects_of(model):
            if holds in (None, there.header.holds):
                del self._objects[model, there.header.holds]
                _unlink(there.name)
                os.close(there.fd)

    def remove_incomplete(self, model: str) -> None:
        """What of the model an engine has left behind half filled."""
        for there in self._objects_of(model):
            if not there.header.is_whole:
                self.remove(model, there.header.holds)

    def close(self) -> None:
        for model in self.models:
            self.remove(model)

    def leave(self) -> None:
        """Instead of `close`: what is complete stays, for the next daemon to adopt."""
        for model in self.models:
            self.remove_incomplete(model)
        for there in self._objects.values():
            os.close(there.fd)
        self._objects.clear()

    @property
    def nbytes(self) -> int:
        return sum(there.nbytes for there in list(self._objects.values()))

    def nbytes_of(self, model: str, holds: Holding) -> int:
        """0 where there is no such object."""
        there = self._objects.get((model, holds))
        return 0 if there is None else there.nbytes

    @property
    def models(self) -> set[str]:
        return {model for model, _ in list(self._objects)}

    def findings(self) -> list[str]:
        """What this daemon's objects in /dev/shm and its own account of them do not agree on.

        Another thread may be creating or removing one: only what the account said before and after counts.
        """
        before, present, after = self._names(), _owned_by(os.getpid()), self._names()
        missing = [f"arena object {name} is gone" for name in sorted((before & after) - present)]
        return missing + [f"arena object {name} belongs to no model" for name in sorted(present - before - after)]

    def _names(self) -> set[str]:
        return {there.name.removeprefix("/") for there in list(self._objects.values())}

    def _objects_of(self, model: str) -> list[_Object]:
        return [there for (name, _), there in list(self._objects.items()) if name == model]

    def _create(self, model: str, nbytes: int, fingerprint: str, holds: Holding) -> _Object:
        """In the account before it has a header, so that the audit knows whatever has one."""
        _check_room(model, HEADER_BYTES + nbytes, holds)
        name, fd = self._open_new(model)
        owner = (os.getpid(), start_ticks(os.getpid()))
        header = Header(*owner, VERSION, State.FILLING, nbytes, 0, fingerprint, holds, model, self._state_dir)
        there = self._objects[model, holds] = _Object(name, fd, header)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            there.write_header(header)  # before the memory: without it nobody would ever remove the object
            os.posix_fallocate(fd, 0, HEADER_BYTES + nbytes)
            if holds == "pages":
                there.write_header(header._replace(state=State.COMPLETE))
        except OSError as error:
            self.remove(model, holds)
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                raise _no_room(model, HEADER_BYTES + nbytes, _free(), holds) from error
            raise
        return there

    def _open_new(self, model: str) -> tuple[str, int]:
        """Name and descriptor. Nobody can know the name before, and take it."""
        digest = hashlib.sha256(model.encode()).hexdigest()[:12]
        while True:
            name = f"/{PREFIX}{os.getpid()}-{digest}-{secrets.token_hex(8)}"
            with suppress(posix_ipc.ExistentialError):
                return name, posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600).fd

    # --- what other daemons have left -------------------------------------------------------------------------------

    def _take(self, name: str, fd: int) -> bool:
        """Whether the object is this daemon's from now on, and with it the descriptor, which holds the lock."""
        data = os.pread(fd, HEADER_BYTES, 0)
        if not data and _has_no_maker(name) and _lock(fd):
            _discard(name, "its daemon has died before it wrote anything there")
        if not data.startswith(MAGIC) or self._is_for_another(data) or not _lock(fd):
            return False
        data = os.pread(fd, HEADER_BYTES, 0)  # as its owner left it
        if why := self._unfit(data, os.fstat(fd)):
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

    def _is_for_another(self, data: bytes) -> bool:
        """A daemon with another state directory adopts it or removes it, if that is still there. Looked at before the
        lock is tried: that daemon may be starting just now."""
        with suppress(ValueError):
            header = Header.unpack(data)
            return header.state_dir != self._state_dir and os.path.isdir(header.state_dir)
        return False

    def _unfit(self, data: bytes, stat: os.stat_result) -> str:
        """Why an object that nobody owns is not to be adopted."""
        try:
            header = Header.unpack(data)
        except ValueError as error:
            return str(error)
        if not header.is_whole:
            return f"the {header.holds} of {header.model} were not brought in to their end"
        if header.state_dir != self._state_dir:
            return f"its daemon's state directory {header.state_dir} is gone"
        if stat.st_size != HEADER_BYTES + header.payload:
            return f"it has {stat.st_size:,} bytes and should have {HEADER_BYTES + header.payload:,}"
        another = (header.model, header.holds) in self._objects
        return f"there is another one with the {header.holds} of {header.model}" if another else ""


def _fits(header: Header, fingerprint: str, nbytes: int | None) -> bool:
    return header.fingerprint == fingerprint and nbytes in (None, header.payload)


def _lock(fd: int) -> bool:
    """False while its owner lives, and where it has been removed in between."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.fstat(fd).st_nlink > 0


def _has_no_maker(name: str) -> bool:
    """Whether no process has the pid that an object's name begins with."""
    pid = name.removeprefix(f"/{PREFIX}").partition("-")[0]
    return pid.isdecimal() and not os.path.exists(f"/proc/{pid}")


def _owned_by(pid: int) -> set[str]:
    """The names of the objects whose header says so."""
    owner, names = (pid, start_ticks(pid)), set()
    for name, fd in own_objects(SHM, PREFIX):
        with open(fd, "rb") as file, suppress(OSError, ValueError):
            if Header.unpack(file.read(HEADER_BYTES))[:2] == owner:
                names.add(name)
    return names


def _check_room(model: str, nbytes: int, holds: Holding) -> None:
    free = _free()
    if nbytes > free:
        raise _no_room(model, nbytes, free, holds)
    bound = tightest()
    if bound is not None and nbytes > bound.left:  # the kernel would kill a process, and return no error
        what = model if holds == "weights" else f"host_kv of {model}"
        raise OutOfMemory(
            f"{what} needs {nbytes:,} bytes of host memory and {bound.name} leaves {bound.left:,}: "
            "unload another model or ask for less",
            needed=nbytes,
            free=bound.left,
        )


def _free() -> int:
    room = os.statvfs(SHM)
    return room.f_bavail * room.f_frsize


def _no_room(model: str, nbytes: int, free: int, holds: Holding) -> OutOfMemory:
    room = os.statvfs(SHM)
    size = (room.f_blocks * room.f_frsize + nbytes - free + (1 << 30) - 1) >> 30
    who, way = (model, "unload another model") if holds == "weights" else (f"host_kv of {model}", "ask for less")
    return OutOfMemory(
        f"{who} needs {nbytes:,} bytes of shared memory and {SHM} has {free:,} free: {way}, or make it "
        f"larger: mount -o remount,size={size}G {SHM} (in a container: --shm-size={size}g)",
        needed=nbytes,
        free=free,
    )


def _discard(name: str, why: str) -> None:
    """What another daemon has left."""
    log.info("arena_removed name=%s reason=%s", name, why)
    with suppress(PermissionError):
        _unlink(name)


def _unlink(name: str) -> None:
    with suppress(posix_ipc.ExistentialError):
        posix_ipc.unlink_shared_memory(name)
