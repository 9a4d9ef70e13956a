"""The parts of a model that a client shares: small files, copied into a folder, and the weights in a window, which is
the client's memfd."""

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
from djinn_client.files.model_files import SMALL_FILE
from djinn_client.protocol import ShareModel
from djinn_client.protocol.fields.image import Dtype, Image
from djinn_client.protocol.fields.placing import Placing
from djinnd.server.quotas.ledger import Ledger
from djinnd.server.wire.client import ConnectedClient
from djinnd.server.wire.memfds import expect_memfd, open_window

FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_PIECE = 1 << 20  # bytes of a file that are copied at once


@dataclass(slots=True, eq=False)
class Share:
    """One shared model. Owns its folder and window until `release`.

    described ──weights──► a model ──ended──► (its last session is closed) ──► released
        └────────────────── ended ──────────────────────────────────────────┘
    """

    id: str
    model: str  # name of the model
    user: int
    public: bool
    clients: set[ConnectedClient]  # that share it; empty after their connections have closed
    folder: Path
    stored: Dtype
    dtype: Literal["auto", "float32", "bfloat16", "float16"]  # type in which the model computes
    kv_bytes: int
    placing: Placing
    content: str = ""  # digest of files and weights; "": not known
    image: Image | None = None  # the layout of the weights, once described
    window: int = -1  # descriptor for reading; -1 before the weights have come
    ended: bool = False  # no new session may use it
    grace: asyncio.TimerHandle | None = None  # runs after its connection has closed
    writing: asyncio.Task[None] | None = None  # copies the files
    leaving: asyncio.Task[None] | None = None  # unloads the model and frees the memory
    payer: Ledger | None = None  # charged for the window while it exists
    lock: int = -1  # on the folder, while this daemon lives

    @property
    def nbytes(self) -> int:
        """The size of the weights' image; 0 before it is described."""
        return 0 if self.image is None else self.image.nbytes

    def is_as_in(self, request: ShareModel) -> bool:
        """True if the request's weights are here already, and are to be served in the same way."""
        names = ("content", "stored", "dtype", "kv_bytes", "placing", "public")
        is_same = all(getattr(self, name) == getattr(request, name) for name in names)
        return bool(self.content) and is_same and request.model in ("", self.model)

    def write_files(self, fd: int, sizes: Mapping[str, int]) -> None:
        """Copies the files from a memfd and closes it; for a thread. Raises InvalidRequest, OutOfMemory."""
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
        """Opens the memfd with the weights for reading, after checking it. Raises InvalidRequest."""
        self.window = open_window(fd, self.nbytes, f"the weights of {self.model}", for_good=True)

    def release(self) -> None:
        """Closes the window and removes the folder; for a thread, as this may free gigabytes."""
        if self.window >= 0:
            os.close(self.window)
            self.window = -1
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1


def check_files(sizes: Mapping[str, int]) -> None:
    """Checks the names and sizes of the files. Raises InvalidRequest."""
    if unknown := sorted(sizes.keys() - set(FILES)):
        raise InvalidRequest(f"a model has the files {', '.join(FILES)}, not {unknown[0][:80]!r}", field="files")
    if "config.json" not in sizes:
        raise InvalidRequest("a model must bring its config.json", field="files")
    for name, size in sizes.items():
        if not 0 <= size <= SMALL_FILE:
            raise InvalidRequest(f"{name} has {size:,} bytes; at most {SMALL_FILE:,}", field="files", limit=SMALL_FILE)


def _copy(fd: int, offset: int, size: int, name: str, file: BinaryIO) -> None:
    """Copies one file out of the memfd. Raises InvalidRequest if the memfd is too short."""
    done = 0
    while done < size:
        piece = os.pread(fd, min(_PIECE, size - done), offset + done)
        if not piece:
            raise InvalidRequest(f"{name} ends after {done:,} of {size:,} bytes", field="files")
        done += file.write(piece)


def sweep(parent: Path) -> None:
    """Removes the folders that dead daemons have left."""
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
