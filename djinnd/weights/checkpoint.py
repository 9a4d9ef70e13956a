"""A Hugging Face checkpoint: its tensors, the files that hold them, and their bytes.

Reads only safetensors, never pickles, and only through descriptors (`ModelFiles`). A file that is cut during the read
gives an error, and a file that is replaced is still read from its descriptor; neither gives a signal. A tensor's bytes
are hashed as they are read, so that the identity of the weights does not depend on file sizes and times.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor
from xxhash import xxh3_128

from djinn_client.errors import ModelNotFound, ModelRejected
from djinn_client.files.model_files import ModelFiles
from djinn_client.files.other_files import HEAD, what_instead, what_it_is
from djinnd.weights.forms.coding import Coding
from djinnd.weights.safetensors_header import PREFIX, BadHeader, header_bytes, parse_header

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
MAX_CONFIG = 4 << 20  # bytes
MAX_INDEX = 32 << 20  # bytes; DeepSeek-V3's has 9 MB
MAX_TENSORS = 1 << 19  # in all files together
PIECE = 1 << 20  # bytes that are read at a time, and then hashed while they are still in a cache

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NOT_OF_THE_MODEL = frozenset({"_name_or_path", "transformers_version"})


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of the checkpoint, and its place in a file."""

    name: str
    file: str
    shape: tuple[int, ...]
    stored: str  # the dtype's name in safetensors; a tensor of a dtype that is not in DTYPES is not read
    start: int  # byte offset in the file
    nbytes: int


class _Index(msgspec.Struct):
    weight_map: dict[str, str]  # tensor → file


_index = msgspec.json.Decoder(_Index)


class CheckpointFiles:
    """The tensors of a checkpoint. The constructor reads the headers and checks that the files are complete.

    told      the contents of config.json
    config    the same, without entries about how the weights are stored
    stored    the tensors in the files
    tensors   the tensors for a model: the stored ones, or matrices made of several stored ones
    coded_as  the code of most weights, in words; "" if they are plain

    The caller owns the files and keeps them open while tensors are read. Any number of threads may read.

    Raises ModelNotFound if there is no checkpoint, and ModelRejected, with the file and tensor at fault, if it is
    damaged.
    """

    coded_as = ""

    def __init__(self, files: ModelFiles, *, has_weights: bool = True) -> None:
        """has_weights: False if the files hold only the configuration, and the weights come from elsewhere."""
        self.files = files
        self.config = self.told = read_config(files)
        self._digests: dict[str, bytes] = {}  # hash of each stored tensor that has been read
        self._stats: list[tuple[str, tuple[int, ...]]] = []
        self.stored: dict[str, TensorInfo] = {}
        self.tensors: dict[str, TensorInfo] = {}
        if has_weights:
            self.stored = self._find_tensors()
            self.tensors = self._logical()
            self.dtype = self._computed()

    # --- tensors ----------------------------------------------------------------------------------------------------

    def _find_tensors(self) -> dict[str, TensorInfo]:
        if SINGLE in self.files:  # transformers, too, then ignores an index
            return {info.name: info for info in self._tensors_of(SINGLE)}
        if INDEX in self.files:
            return self._tensors_by_index()
        raise ModelNotFound(
            f"{self.files.folder} has neither {SINGLE} nor {INDEX}; {what_instead([*self.files, *self.files.others])}",
            path=self.files.folder,
        )

    def _tensors_by_index(self) -> dict[str, TensorInfo]:
        """Tensors of a checkpoint in several files. The index decides which file counts if several have a tensor of the
        same name."""
        promised = _weight_map(self.files)
        shards = sorted(set(promised.values()))
        missing = [shard for shard in shards if shard not in self.files]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            told = f"{missing[0][:200]}{more} of the {len(shards)} files that {INDEX} names are missing"
            raise ModelRejected(told, file=missing[0][:200], missing=len(missing))
        tensors: dict[str, TensorInfo] = {}
        for info in (info for shard in shards for info in self._tensors_of(shard)):
            if promised.get(info.name, info.file) == info.file:
                tensors.setdefault(info.name, info)
        for name, file in promised.items():
            if name not in tensors:
                told = f"{INDEX} lists tensor {name[:200]} in {file}, which does not contain it"
                raise ModelRejected(told, file=file, tensor=name)
        if len(tensors) > MAX_TENSORS:
            raise ModelRejected(f"the checkpoint has {len(tensors):,} tensors; at most {MAX_TENSORS:,} are read")
        return tensors

    def _tensors_of(self, file: str) -> Iterator[TensorInfo]:
        stat = self.files.stat(file)  # taken before the first read: see `fingerprint`
        self._stats.append((file, (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)))
        return tensors_of(self.files, file)

    def _logical(self) -> dict[str, TensorInfo]:
        return self.stored

    @property
    def parameters(self) -> int:
        """Numbers in all tensors for a model."""
        return sum(math.prod(info.shape) for info in self.tensors.values())

    def _computed(self) -> torch.dtype:
        """The dtype that most of the weights have, among those that djinnd reads."""
        sizes: Counter[str] = Counter()
        for info in self.tensors.values():
            sizes[info.stored] += math.prod(info.shape)
        readable = [stored for stored, _ in sizes.most_common() if stored in DTYPES]
        if not readable:
            others = f"; they are {', '.join(sorted(sizes))}" if sizes else ""
            raise ModelRejected(f"{self.files.folder} has no F32, F16 or BF16 weights{others}", path=self.files.folder)
        return DTYPES[readable[0]]

    def check_readable(self, name: str) -> None:
        """Raises ModelRejected if djinnd does not read the tensor's dtype."""
        info = self.tensors[name]
        if info.stored not in DTYPES:
            raise ModelRejected(
                f"{info.file}: tensor {name} is {info.stored}; djinnd reads only F32, F16 and BF16 weights",
                file=info.file,
                tensor=name,
            )

    # --- bytes ------------------------------------------------------------------------------------------------------

    def read(self, name: str) -> Tensor:
        """Reads the tensor to memory of its own. Raises ModelRejected."""
        info = self.tensors[name]
        tensor = torch.empty(info.shape, dtype=DTYPES[info.stored])
        self.read_into(name, tensor)
        return tensor

    def read_into(self, name: str, view: Tensor) -> None:
        """Fills a contiguous tensor. If the dtypes are equal, it is read in place; otherwise pieces are read aside and
        converted.

        Raises ModelRejected if the shapes differ, or if the file was cut or cannot be read.
        """
        info = self.tensors[name]
        if tuple(view.shape) != info.shape:
            raise wrong_shape(name, info.shape, view.shape)
        flat, dtype = view.view(-1), DTYPES[info.stored]
        digest = xxh3_128()
        step = PIECE // dtype.itemsize
        aside = None if flat.dtype == dtype else torch.empty(min(step, flat.numel()), dtype=dtype)
        for first in range(0, flat.numel(), step):
            target = flat[first : first + step]
            piece = target if aside is None else aside[: target.numel()]
            self.read_piece(info, first * dtype.itemsize, piece, digest)
            if piece is not target:
                target.copy_(piece)
        self._digests[name] = digest.digest()

    def read_piece(self, info: TensorInfo, offset: int, piece: Tensor, digest: xxh3_128) -> None:
        """Fills a contiguous piece with the tensor's bytes from `offset` on, and adds them to its hash. Raises
        ModelRejected if the file was cut or cannot be read."""
        memory = piece.view(torch.uint8).numpy().data
        count = self.files.read_into(info.file, info.start + offset, memory)
        if count < len(memory):
            told = f"{info.file} was cut while it was read: it ends within tensor {info.name}"
            raise ModelRejected(told, file=info.file, tensor=info.name)
        digest.update(memory)

    # --- codes ------------------------------------------------------------------------------------------------------

    def coding(self, name: str) -> Coding | None:
        """The code in which the tensor is stored; None if it is plain, or does not fit its code's groups."""
        return None

    def is_transposed(self, name: str) -> bool:
        """Returns True if the code holds the transposed matrices of the tensor."""
        return False

    def read_parts(self, name: str, parts: Sequence[Tensor]) -> None:
        """Fills the parts of a tensor that has a `coding`: [stack, *Part.shape] each, every matrix contiguous. Raises
        ModelRejected if a file was cut or cannot be read, or if a part would have impossible numbers."""
        raise AssertionError(f"{name} has no code")

    # --- hashes -----------------------------------------------------------------------------------------------------

    def fingerprint(self) -> str:
        """Hash that changes if the files may have changed, known before the weights are read.

        It covers the configuration, the tensors' names and places, and the files' inodes, sizes and times before the
        first read. The change time is included because `touch -r` can restore only the modification time.
        """
        digest = hashlib.sha256(json.dumps(self.told, sort_keys=True).encode())
        for name, info in sorted(self.stored.items()):
            digest.update(f"{name} {info.file} {info.shape} {info.stored} {info.start}\n".encode())
        digest.update(repr(sorted(self._stats)).encode())
        return digest.hexdigest()

    def identity(self) -> str:
        """Hash of the model, equal for copies of it on every machine. It covers the configuration, the names, shapes
        and dtypes of all tensors, and the bytes of the tensors that have been read."""
        told = {key: value for key, value in self.told.items() if key not in _NOT_OF_THE_MODEL}
        digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode())
        for name, info in sorted(self.stored.items()):
            digest.update(f"{name} {info.shape} {info.stored} {self._digests.get(name, b'').hex()}\n".encode())
        return digest.hexdigest()


def tensors_of(files: ModelFiles, file: str) -> Iterator[TensorInfo]:
    """The tensors of one safetensors file, from its header. Raises ModelRejected."""
    size = files.size(file)
    head = files.read_at(file, 0, max(HEAD, PREFIX))
    if other := what_it_is(head):
        raise ModelRejected(f"{file} is {other}", file=file)
    try:
        header = files.read_at(file, PREFIX, header_bytes(head, size))
        tensors = parse_header(header, size)
    except BadHeader as error:
        at_fault = {"tensor": error.tensor} if error.tensor else {}
        raise ModelRejected(f"{file} is damaged or cut short: {error}", file=file, **at_fault) from error
    for name, (dtype, shape, start, nbytes) in tensors.items():
        yield TensorInfo(name, file, shape, dtype, start, nbytes)


def wrong_shape(name: str, has: tuple[int, ...], wanted: tuple[int, ...]) -> ModelRejected:
    told = f"{name} has shape {list(has)} in the checkpoint, but the model needs {list(wanted)}"
    return ModelRejected(told, tensor=name)


def _weight_map(files: ModelFiles) -> dict[str, str]:
    """The index of a checkpoint in several files: tensor → file."""
    data = files.read(INDEX, MAX_INDEX)
    try:
        return _index.decode(data).weight_map
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelRejected(f"{INDEX} does not name a file for each tensor: {error}", file=INDEX) from error


def read_config(files: ModelFiles) -> dict[str, Any]:
    """The contents of config.json. Raises ModelNotFound if there is none, and ModelRejected."""
    if CONFIG not in files:
        told = f"{files.folder} is not a checkpoint: it has no {CONFIG}; {what_instead([*files, *files.others])}"
        raise ModelNotFound(told, path=files.folder)
    return read_json(files, CONFIG)


def read_json(files: ModelFiles, name: str) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelRejected."""
    data = files.read(name, MAX_CONFIG)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelRejected(f"{name} is not readable JSON: {error}", file=name) from error
    if not isinstance(value, dict):
        raise ModelRejected(f"{name} is not a JSON object", file=name)
    return value
