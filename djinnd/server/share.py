"""What a client has handed over of its model: small files, copied into a folder, and the weights, in a window, which is
the client's memfd.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from djinn_client.errors import InvalidRequest, OutOfMemory
from djinn_client.image import Dtype
from djinn_client.model_files import SMALL_FILE
from djinn_client.placing import Placing
from djinnd.server.client import Client
from djinnd.server.handed_over import expect_memfd, open_window
from djinnd.server.ledger import Ledger

FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_PIECE = 1 << 20  # bytes of a file that are copied at once


@dataclass(slots=True, eq=False)
class Share:
    """Owns folder and window until `release`.

    described ──weights──► a model ──ended──► (its last session goes) ──► released
        └────────────────── ended ──────────────────────────────────────────┘
    """

    id: str
    model: str  # its name
    user: int
    public: bool
    client: Client | None  # None: its connection is gone
    folder: Path
    stored: Dtype
    dtype: Literal["auto", "float32", "bfloat16", "float16"]  # to compute in
    kv_bytes: int
    placing: Placing
    nbytes: int = 0  # of the image
    window: int = -1  # a descriptor for reading; -1 before the weights have come
    ended: bool = False  # nobody new may use it
    grace: asyncio.TimerHandle | None = None  # runs while its connection is gone
    writing: asyncio.Task[None] | None = None  # of the files
    leaving: asyncio.Task[None] | None = None
    payer: Ledger | None = None  # that is charged for the window, from when it has come
    lock: int = -1  # on the folder, for as long as this daemon lives

    def is_open_to(self, client: Client) -> bool:
        return self.public or self.is_of(client)

    def is_of(self, client: Client) -> bool:
        return client.user == self.user or client.is_admin

    def write_files(self, fd: int, sizes: Mapping[str, int]) -> None:
        """Copies the files from a memfd, which is closed; for a thread. Raises InvalidRequest, OutOfMemory."""
        try:
            expect_memfd(fd)
            self.folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder.mkdir(mode=0o700)
            self.lock = _lock(self.folder)
            offset = 0
            for name, size in sizes.items():
                with (self.folder / name).open("xb") as file:
                    _copy(fd, offset, size, name, file)
                offset += size
        except OSError as error:
            raise OutOfMemory(f"the files of {self.model} cannot be kept in {self.folder.parent}: {error}") from error
        finally:
            os.close(fd)

    def open_window(self, fd: int) -> None:
        """Takes the weights: a descriptor of this daemon's own, for reading. Raises InvalidRequest."""
        self.window = open_window(fd, self.nbytes, f"the weights of {self.model}", for_good=True)

    def release(self) -> None:
        """For a thread: where the client is gone, gigabytes are given back here."""
        if self.window >= 0:
            os.close(self.window)
            self.window = -1
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1


def check_files(sizes: Mapping[str, int]) -> None:
    """Raises InvalidRequest."""
    if unknown := sorted(sizes.keys() - set(FILES)):
        raise InvalidRequest(f"a model has the files {', '.join(FILES)}, and no {unknown[0][:80]!r}", field="files")
    if "config.json" not in sizes:
        raise InvalidRequest("a model must bring its config.json", field="files")
    for name, size in sizes.items():
        if not 0 <= size <= SMALL_FILE:
            raise InvalidRequest(f"{name} has {size:,} bytes; at most {SMALL_FILE:,}", field="files", limit=SMALL_FILE)


def _copy(fd: int, offset: int, size: int, name: str, file: BinaryIO) -> None:
    """Raises InvalidRequest where the memfd ends before that."""
    done = 0
    while done < size:
        piece = os.pread(fd, min(_PIECE, size - done), offset + done)
        if not piece:
            raise InvalidRequest(f"{name} ends after {done:,} of {size:,} bytes", field="files")
        done += file.write(piece)


def sweep(parent: Path) -> None:
    """Removes the folders of daemons that are gone."""
    for folder in parent.glob("*"):
        with suppress(OSError):  # BlockingIOError: its daemon lives
            lock = _lock(folder)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _lock(folder: Path) -> int:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(fd)
        raise
    return fd
