"""The arena: POSIX shared-memory objects that hold models' blocks, one object a model, and outlive an engine.

    byte 0        8      16            24       28     32             40          48           112
         ┌────────┬──────┬─────────────┬────────┬──────┬──────────────┬───────────┬────────────┬────────────────────┐
         │DJARENA1│ pid  │ start ticks │version │state │ payload bytes│ generation│ fingerprint│ model, UTF-8, 0 …  │
         └────────┴──────┴─────────────┴────────┴──────┴──────────────┴───────────┴────────────┴────────────────────┘
    byte 4096: payload. Numbers are little-endian; pid and start ticks (field 22 of /proc/<pid>/stat) name the owner.

The owner holds a lock (flock) on each of its objects for as long as it lives, so whether an owner lives is the kernel's
word and holds across pid namespaces; the numbers in the header are for people and for `djinnctl doctor`.

Every page is reserved before anybody maps the object: a full /dev/shm is an error here and never a SIGBUS later.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import logging
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import posix_ipc

from djinn_client.errors import OutOfMemory

log = logging.getLogger("djinnd.server")

SHM = Path("/dev/shm")
PREFIX = "djinnd-"
MAGIC = b"DJARENA1"
VERSION = 1
HEADER_BYTES = 4096
_HEADER = struct.Struct("<8sQQIIQQ64s")
_MODEL_BYTES = HEADER_BYTES - _HEADER.size


class State(IntEnum):
    FILLING = 1
    COMPLETE = 2


class Header(NamedTuple):
    pid: int
    start_ticks: int
    version: int
    state: State
    payload: int  # bytes
    generation: int  # how many engines have been given this object
    fingerprint: str  # sha256 of checkpoint and layout, in hex
    model: str

    def pack(self) -> bytes:
        fixed = (MAGIC, *self[:6], self.fingerprint.encode())
        return (_HEADER.pack(*fixed) + self.model.encode()[:_MODEL_BYTES]).ljust(HEADER_BYTES, b"\0")

    @classmethod
    def unpack(cls, data: bytes) -> Header:
        """Raises ValueError where the bytes are no header of this version."""
        if len(data) < HEADER_BYTES or not data.startswith(MAGIC):
            raise ValueError("no arena header")
        _, pid, ticks, version, state, payload, generation, fingerprint = _HEADER.unpack_from(data)
        if version != VERSION:
            raise ValueError(f"arena version {version}, this daemon knows {VERSION}")
        model = data[_HEADER.size :].rstrip(b"\0").decode(errors="replace")
        return cls(pid, ticks, version, State(state), payload, generation, fingerprint.rstrip(b"\0").decode(), model)


@dataclass(slots=True)
class _Object:
    name: str
    fd: int  # holds the lock
    header: Header

    def write_header(self, header: Header) -> None:
        self.header = header
        os.pwrite(self.fd, self.header.pack(), 0)


class Grant(NamedTuple):
    name: str
    offset: int
    complete: bool


class Arena:
    """Owns this daemon's objects, one a model. `grant` blocks while pages are reserved; it belongs in a thread."""

    def __init__(self) -> None:
        self._objects: dict[str, _Object] = {}
        self._numbers = itertools.count(1)

    def grant(self, model: str, nbytes: int, fingerprint: str) -> Grant:
        """The object for a model's blocks, for one engine to map. One that holds them already is handed out again.

        Raises OutOfMemory with the figures where /dev/shm has no room.
        """
        there = self._objects.get(model)
        if there is not None and (there.header.fingerprint, there.header.payload) != (fingerprint, nbytes):
            self.remove(model)
            there = None
        if there is None:
            there = self._objects[model] = self._create(model, nbytes, fingerprint)
        there.write_header(there.header._replace(generation=there.header.generation + 1))
        return Grant(there.name, HEADER_BYTES, self.is_complete(model))

    def is_complete(self, model: str) -> bool:
        return model in self._objects and self._objects[model].header.state is State.COMPLETE

    def complete(self, model: str) -> None:
        """The engine has filled the model's object."""
        there = self._objects[model]
        there.write_header(there.header._replace(state=State.COMPLETE))

    def remove(self, model: str) -> None:
        """Does nothing where the model has no object. Who still maps it keeps the memory until it lets go."""
        there = self._objects.pop(model, None)
        if there is not None:
            _unlink(there.name)
            os.close(there.fd)

    def close(self) -> None:
        for model in list(self._objects):
            self.remove(model)

    @property
    def nbytes(self) -> int:
        return sum(HEADER_BYTES + there.header.payload for there in self._objects.values())

    @property
    def models(self) -> set[str]:
        return set(self._objects)

    def findings(self) -> list[str]:
        """What this daemon's objects in /dev/shm and its own account of them do not agree on."""
        named = {there.name.removeprefix("/") for there in self._objects.values()}
        present = {path.name for path in SHM.glob(f"{PREFIX}{os.getpid()}-*")}
        missing = [f"arena object {name} is gone" for name in sorted(named - present)]
        return missing + [f"arena object {name} belongs to no model" for name in sorted(present - named)]

    def _create(self, model: str, nbytes: int, fingerprint: str) -> _Object:
        _check_room(model, HEADER_BYTES + nbytes)
        digest = hashlib.sha256(model.encode()).hexdigest()[:12]
        name = f"/{PREFIX}{os.getpid()}-{digest}-{next(self._numbers)}"
        header = Header(os.getpid(), start_ticks(os.getpid()), VERSION, State.FILLING, nbytes, 0, fingerprint, model)
        memory = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600)
        try:
            fcntl.flock(memory.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pwrite(memory.fd, header.pack(), 0)  # first of all: without it nobody would sweep the object
            os.posix_fallocate(memory.fd, 0, HEADER_BYTES + nbytes)
        except OSError as error:
            _unlink(name)
            os.close(memory.fd)
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                raise _no_room(model, HEADER_BYTES + nbytes, _free()) from error
            raise
        return _Object(name, memory.fd, header)


def sweep() -> None:
    """At start, before this daemon has objects: deals with those whose owner is gone. To adopt them belongs here."""
    for path, header in _orphans():
        with suppress(PermissionError):
            _unlink(f"/{path.name}")
            log.info("arena_removed name=%s model=%s owner=%d", path.name, header.model, header.pid)


def _orphans() -> Iterator[tuple[Path, Header]]:
    """Objects of daemons that are gone, as far as this user may see them."""
    for path in SHM.glob(f"{PREFIX}*"):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused while the owner lives
            yield path, Header.unpack(os.pread(fd, HEADER_BYTES, 0))
        except (OSError, ValueError):
            continue
        finally:
            os.close(fd)


def start_ticks(pid: int) -> int:
    """Field 22 of /proc/<pid>/stat: with the pid it names a process for good."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat[stat.rindex(")") + 2 :].split()[19])


def _check_room(model: str, nbytes: int) -> None:
    free = _free()
    if nbytes > free:
        raise _no_room(model, nbytes, free)


def _free() -> int:
    room = os.statvfs(SHM)
    return room.f_bavail * room.f_frsize


def _no_room(model: str, nbytes: int, free: int) -> OutOfMemory:
    room = os.statvfs(SHM)
    size = (room.f_blocks * room.f_frsize + nbytes - free + (1 << 30) - 1) >> 30
    return OutOfMemory(
        f"{model} needs {nbytes:,} bytes of shared memory and {SHM} has {free:,} free: unload another model, or make "
        f"it larger: mount -o remount,size={size}G {SHM} (in a container: --shm-size={size}g)",
        needed=nbytes,
        free=free,
    )


def _unlink(name: str) -> None:
    with suppress(posix_ipc.ExistentialError):
        posix_ipc.unlink_shared_memory(name)
