"""Open files of a checkpoint, and their marks, which identify the checkpoint under any name."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from djinn_client.errors import DjinnError, ModelNotFound, OutOfMemory
from djinn_client.files.model_files import GGUF, ModelFiles
from djinn_client.files.other_files import what_instead
from djinnd.gguf.files import gguf_names
from djinnd.server.system.closer import close_fds

CONFIG = "config.json"


class FileIdentity(NamedTuple):
    """The identity of a file. `changed` is its ctime in nanoseconds, which no program can set back."""

    device: int
    inode: int
    changed: int


Marks = dict[str, FileIdentity]  # by the file's name


class OpenFiles(NamedTuple):
    """The open files of a checkpoint with their marks."""

    files: ModelFiles
    marks: Marks

    def close(self) -> None:
        self.files.close()


def open_folder(folder: str) -> OpenFiles:
    """Opens a checkpoint's folder, or GGUF file; for a thread. Raises ModelNotFound, ModelRejected, InvalidRequest."""
    return _checked(ModelFiles.open(folder))


def take_over(folder: str, names: Sequence[str], fds: list[int], others: Sequence[str]) -> OpenFiles:
    """Checks files that a client has handed over; for a thread. Takes the descriptors out of the list. Raises
    InvalidRequest, ModelNotFound."""
    return _checked(ModelFiles.handed_over(folder, names, taken_out(fds), others))


def taken_out(fds: list[int]) -> list[int]:
    """Takes all descriptors out of the list. If two threads do this at once, each descriptor goes to one of them."""
    taken = []
    with suppress(IndexError):
        while True:
            taken.append(fds.pop(0))
    return taken


def _checked(files: ModelFiles) -> OpenFiles:
    try:
        if not gguf_names(files) and CONFIG not in files:
            told = f"{files.folder} is not a checkpoint: it has no config.json; {what_instead([*files, *files.others])}"
            raise ModelNotFound(told, path=files.folder)
        return OpenFiles(files, {name: mark(files.stat(name)) for name in files})
    except BaseException:
        files.close()
        raise


def duplicates(files: ModelFiles) -> list[int]:
    """Copies of the descriptors, for an engine, in the order of the names. Raises OutOfMemory if this process may open
    no more."""
    copies: list[int] = []
    try:
        for name in files:
            copies.append(os.dup(files.descriptor(name)))
    except OSError as error:
        close_fds(copies)
        raise OutOfMemory(f"the daemon cannot pass on the files of {files.folder}: {error.strerror}") from error
    return copies


def are_same(one: Marks, other: Marks) -> bool:
    """True if both are marks of the same files, also if their contents have changed."""
    return {name: mark[:2] for name, mark in one.items()} == {name: mark[:2] for name, mark in other.items()}


def digest(marks: Marks) -> str:
    """A short text that tells these files from others with the same path."""
    return hashlib.sha256(repr(sorted(marks.items())).encode()).hexdigest()[:8]


def is_at(folder: str, marks: Marks) -> bool:
    """True if the folder has these files; for a thread."""
    try:
        if CONFIG in marks:
            stat = os.stat(os.path.join(folder, CONFIG))
            if mark(stat)[:2] != marks[CONFIG][:2]:
                return False  # the usual case
        elif not folder.endswith(GGUF) and os.path.exists(os.path.join(folder, CONFIG)):
            return False
        opened = open_folder(folder)
    except (DjinnError, OSError):
        return False
    try:
        return are_same(opened.marks, marks)
    finally:
        opened.close()


def mark(stat: os.stat_result) -> FileIdentity:
    return FileIdentity(stat.st_dev, stat.st_ino, stat.st_ctime_ns)
