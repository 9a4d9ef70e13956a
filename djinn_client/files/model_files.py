"""The files of one checkpoint, each opened once with the rights of the process that opens them.

A path is a promise that its owner may break between two looks: the file may become a pipe, another file, or a shorter
one. So each file is opened once, looked at through its descriptor, and read through that descriptor from then on. A
descriptor also carries its opener's rights: a client that hands over open files proves that it may read them, and the
daemon, whoever runs it, opens nothing on the client's behalf.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Self

from djinn_client.errors import InvalidRequest, ModelNotFound, ModelRejected
from djinn_client.files.other_files import HEAD, what_it_is

MAX_FILES = 240  # descriptors of one hand-over: the kernel passes 253 with a message at the most
MAX_NAMES = 4096  # entries of a folder that are looked at
MAX_TEMPLATES = 32  # files in MORE_TEMPLATES
MAX_OTHERS = 64  # names of other entries that are remembered
SMALL_FILE = 64 << 20  # bytes of a file that is read whole, such as tokenizer.json

_NAMED = frozenset(
    {
        "config.json",
        "generation_config.json",
        "hf_quant_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "tokenizer.model",
        "chat_template.jinja",
        "chat_template.json",
        "adapter_config.json",
    }
)
MORE_TEMPLATES = "additional_chat_templates/"  # the one subfolder of a checkpoint that is read: its *.jinja files
GGUF = ".gguf"
PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.ASCII)  # of a split GGUF file
_ENDINGS = (".safetensors", ".safetensors.index.json")
_NO_WAIT = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe, a device or a lease does not block


class ModelFiles:
    """Name → descriptor. Owns the descriptors until `close`. Reads leave the descriptors' offsets alone, so that
    several threads, and processes that were passed duplicates, may read at once.

    `folder` is the opener's name of the folder; it is used in messages and never opened again. `others` are names of
    other entries of the folder: they explain a refusal."""

    def __init__(self, folder: str, descriptors: Mapping[str, int], others: Sequence[str] = ()) -> None:
        self.folder = folder
        self.others = list(others)
        self.bytes_read = 0  # so far, roughly where several threads read: a waiting load sees by it that reads go on
        self._descriptors = dict(descriptors)

    @classmethod
    def open(cls, folder: str) -> Self:
        """All files of `folder` that a checkpoint may have. Symbolic links are followed, as the hub's cache is made of
        them: they lead no further than this process's own rights do. A folder with safetensors is no GGUF checkpoint,
        so its GGUF files are left out. `folder` may also be the path of one GGUF file: then that file alone is opened,
        with the other parts of the model if it was split.

        Raises ModelNotFound if there is no such folder or this process may not look into it, InvalidRequest for a file
        that is not regular, and for more than MAX_FILES."""
        path, alone = os.path.split(folder) if _is_gguf_file(folder) else (folder, "")
        try:
            directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            raise _no_folder(folder, error) from error
        descriptors: dict[str, int] = {}
        others: list[str] = []
        try:
            names = sorted(_names(directory))
            wanted = gguf_parts(alone, names) if alone else [name for name in names if _is_of_checkpoint(name)]
            if any(name.endswith(_ENDINGS) for name in wanted):
                wanted = [name for name in wanted if not name.endswith(GGUF)]
            others = [] if alone else sorted({*names} - {*wanted})[:MAX_OTHERS]
            for name in wanted:
                if len(descriptors) == MAX_FILES:
                    raise InvalidRequest(f"{folder} has more than {MAX_FILES} files of a checkpoint", limit=MAX_FILES)
                with suppress(FileNotFoundError):  # a link that leads nowhere, or a file that has just gone
                    descriptors[name] = _open_regular(path, name, directory)
            if alone and not descriptors:
                raise _no_folder(folder, FileNotFoundError())
        except BaseException:
            _close(descriptors.values())
            raise
        finally:
            os.close(directory)
        return cls(folder, descriptors, others)

    @classmethod
    def handed_over(
        cls, folder: str, names: Sequence[str], descriptors: Sequence[int], others: Sequence[str] = ()
    ) -> Self:
        """Files that a peer has opened and sent. Takes the descriptors, even if it raises InvalidRequest: for invalid
        file names, and for descriptors that are not regular files open for reading. Only such a descriptor proves that
        the peer may read the file."""
        try:
            if len(names) != len(descriptors) or len(set(names)) != len(names):
                raise InvalidRequest(f"{len(names)} names of files came with {len(descriptors)} descriptors")
            for name, descriptor in zip(names, descriptors, strict=True):
                part = name.removeprefix(MORE_TEMPLATES)
                if part in ("", ".", "..") or "/" in part or "\0" in part or len(os.fsencode(name)) > 255:
                    raise InvalidRequest(f"{name[:80]!r} is no name of a file")
                _expect_readable(name, descriptor)
                _expect_regular(folder, name, descriptor)
        except BaseException:
            _close(descriptors)
            raise
        return cls(folder, dict(zip(names, descriptors, strict=True)), others)

    def __contains__(self, name: str) -> bool:
        return name in self._descriptors

    def __iter__(self) -> Iterator[str]:
        return iter(self._descriptors)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def descriptor(self, name: str) -> int:
        """Stays this object's."""
        return self._descriptors[name]

    def stat(self, name: str) -> os.stat_result:
        return os.fstat(self._descriptors[name])

    def size(self, name: str) -> int:
        """Bytes, at this moment."""
        return self.stat(name).st_size

    def read(self, name: str, limit: int = SMALL_FILE) -> bytes:
        """The whole of a text file. Raises ModelRejected if it is missing, has more than `limit` bytes, cannot be read,
        or is of another kind than its name says."""
        if name not in self:
            raise ModelRejected(f"{self.folder} has no {name}", file=name)
        size = self.size(name)
        if size > limit:
            raise ModelRejected(f"{name} has {size:,} bytes; at most {limit:,} are read", file=name, limit=limit)
        data = self.read_at(name, 0, size)
        if data and (other := what_it_is(data[:HEAD])):
            raise ModelRejected(f"{name} is {other}", file=name)
        return data

    def read_at(self, name: str, offset: int, count: int) -> bytes:
        """Up to `count` bytes from `offset`: fewer where the file ends. Raises ModelRejected on a read error."""
        pieces: list[bytes] = []
        try:
            # preadv, as in read_into, is not allowed in confined processes.
            while count and (piece := os.pread(self._descriptors[name], min(count, 16 << 20), offset)):
                pieces.append(piece)
                self.bytes_read += len(piece)
                offset, count = offset + len(piece), count - len(piece)
        except OSError as error:
            raise ModelRejected(f"{name} cannot be read: {error.strerror}", file=name) from error
        return b"".join(pieces)

    def read_into(self, name: str, offset: int, memory: memoryview) -> int:
        """Fills `memory` from `offset`. → bytes read: fewer than its size if the file ends earlier. Raises
        ModelRejected if the file cannot be read."""
        done = 0
        try:
            while done < len(memory) and (count := os.preadv(self._descriptors[name], [memory[done:]], offset + done)):
                done += count
                self.bytes_read += count
        except OSError as error:
            raise ModelRejected(f"{name} cannot be read: {error.strerror}", file=name) from error
        return done

    def keep(self, names: Iterable[str]) -> None:
        """Closes all other files. They are no longer here then."""
        names = set(names)
        _close(descriptor for name, descriptor in self._descriptors.items() if name not in names)
        self._descriptors = {name: fd for name, fd in self._descriptors.items() if name in names}

    def close(self) -> None:
        """Does nothing the second time."""
        descriptors, self._descriptors = self._descriptors, {}
        _close(descriptors.values())


def gguf_parts(name: str, names: Iterable[str]) -> list[str]:
    """The files of the model that the GGUF file `name` belongs to: itself, or all parts of one that was split."""
    part = PART.fullmatch(name)
    if part is None:
        return [name]
    others = [(each, PART.fullmatch(each)) for each in names]
    return sorted(each for each, other in others if other is not None and other["stem"] == part["stem"])


def _is_gguf_file(path: str) -> bool:
    try:
        return path.endswith(GGUF) and not os.path.isdir(path)
    except ValueError:
        return False


def _is_of_checkpoint(name: str) -> bool:
    return name in _NAMED or name.endswith((*_ENDINGS, GGUF)) or name.startswith(MORE_TEMPLATES)


def _names(directory: int) -> list[str]:
    """Names of the folder's entries, and of its further templates. Names that cannot be printed are no checkpoint's."""
    with os.scandir(directory) as entries:
        names = [entry.name for _, entry in zip(range(MAX_NAMES), entries, strict=False)]
    if MORE_TEMPLATES.rstrip("/") in names:
        names += _more_templates(directory)
    return [name for name in names if name.isprintable()]


def _more_templates(directory: int) -> list[str]:
    """Names of the templates in MORE_TEMPLATES; none if this process may not look into that folder."""
    try:
        inner = os.open(MORE_TEMPLATES, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
    except OSError:
        return []
    try:
        with os.scandir(inner) as entries:
            names = [entry.name for _, entry in zip(range(MAX_TEMPLATES), entries, strict=False)]
    finally:
        os.close(inner)
    return [MORE_TEMPLATES + name for name in names if name.endswith(".jinja")]


def _open_regular(folder: str, name: str, directory: int) -> int:
    """Opens a regular file. It is first opened as a mere place in the file system, since opening a device may have
    effects, such as starting a watchdog. Raises FileNotFoundError, ModelRejected, InvalidRequest."""
    try:
        place = os.open(name, os.O_PATH | os.O_CLOEXEC, dir_fd=directory)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ModelRejected(f"{name} cannot be opened: {error.strerror}", file=name) from error
    try:
        _expect_regular(folder, name, place)
        return os.open(f"/proc/self/fd/{place}", _NO_WAIT)
    except OSError as error:
        raise ModelRejected(f"{name} cannot be opened: {error.strerror}", file=name) from error
    finally:
        os.close(place)


def _expect_regular(folder: str, name: str, descriptor: int) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise InvalidRequest(f"{folder}/{name} is no regular file", file=name)


def _expect_readable(name: str, descriptor: int) -> None:
    """Raises InvalidRequest, also for a file that is only memory: it would stay for as long as the model."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if flags & os.O_PATH or flags & os.O_ACCMODE not in (os.O_RDONLY, os.O_RDWR):
        raise InvalidRequest(f"the descriptor of {name} is not open for reading", file=name)
    if os.fstat(descriptor).st_nlink == 0:
        raise InvalidRequest(f"{name} is in no folder any more: share_model hands over a model in memory", file=name)


def _no_folder(folder: str, error: OSError | ValueError) -> ModelNotFound:
    """The error for a folder that cannot be opened. It is the same if the folder is not there and if this user may not
    look into it."""
    if isinstance(error, PermissionError | FileNotFoundError | NotADirectoryError):
        what = "file" if folder.endswith(GGUF) else "folder"
        told = f"there is no such {what}, or user {os.geteuid()} may not look into it"
    else:
        told = f"the folder cannot be opened: {getattr(error, 'strerror', error)}"
    # The name alone decides, so the message does not tell whether the file is there.
    if folder.endswith(_ENDINGS):
        told += f"; a checkpoint is named by its folder, here {os.path.dirname(folder) or '.'}"
    return ModelNotFound(told, path=folder)


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
