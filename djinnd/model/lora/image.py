"""LoraImage: the matrices of one adapter for one model, in one flat piece of memory.

    A of target 0 [parts · rank, in] │ B of target 0 [out, rank] │ A of target 3 │ B of target 3 │ …

The parts of a target share their input, so their A are stacked; each row of B has the rank of its own part. If the
parts have different ranks, the smaller ones are filled up with zeros. B is stored multiplied by the adapter's factor.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from djinn_client.errors import ModelRejected
from djinn_client.files.model_files import ModelFiles
from djinnd.model.lora.config import CONFIG, MAX_CONFIG, LoraConfig, read_config
from djinnd.model.lora.targets import Target
from djinnd.model.tuning import MAX_RANK
from djinnd.weights.checkpoint import DTYPES, TensorInfo, tensors_of

WEIGHTS = "adapter_model.safetensors"
IDENTITY_BYTES = 16
_NAME = re.compile(r"(?:base_model\.model\.)?(?P<module>[^/]+)\.lora_(?P<side>[AB])\.weight")
_ALIGNMENT = 8  # elements between the beginnings of matrices: 16 bytes in 16-bit dtypes, which kernels load at once
_PIECE = 1 << 20  # bytes that are hashed at a time


class Pair(NamedTuple):
    """The matrices of one target: A [parts · rank, in] and B [out, rank], with the adapter's factor in B."""

    a: Tensor
    b: Tensor

    @property
    def rank(self) -> int:
        return self.b.shape[1]


@dataclass(frozen=True, slots=True)
class _Found:
    """The tensors of one part of a target in the file."""

    module: str
    a: TensorInfo
    b: TensorInfo

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class LoraImage:
    """An adapter's layout, and its memory on the host or on the device.

    `places` has, for each adapted target, the element at which its A begins, and its rank. They hold for copies of
    `memory`, too.
    """

    identity: bytes  # hash of the files' contents
    rank: int  # the largest
    modules: int
    places: dict[int, tuple[int, int]]
    memory: Tensor  # flat, in the model's compute dtype

    def pairs(self, memory: Tensor, targets: Sequence[Target]) -> dict[int, Pair]:
        """Views of `memory`, which has the layout of this image, by the number of the target."""
        pairs = {}
        for index, (first, rank) in self.places.items():
            target = targets[index]
            a, b = (len(target.sizes) * rank, target.inputs), (sum(target.sizes), rank)
            second = first + _aligned(a[0] * a[1])
            a_view = memory[first : first + a[0] * a[1]].view(a)
            pairs[index] = Pair(a_view, memory[second : second + b[0] * b[1]].view(b))
        return pairs


def read_image(
    files: ModelFiles,
    targets: Sequence[Target],
    dtype: torch.dtype,
    most_bytes: int,
    allocate: Callable[[int], Tensor] = lambda nbytes: torch.empty(nbytes, dtype=torch.uint8),
) -> LoraImage:
    """Reads a PEFT folder for a model with these targets. For a thread: it reads files, and touches no device.

    dtype: the model's compute dtype. most_bytes: that the image may have. allocate: nbytes → host memory, uint8.

    Raises ModelRejected, with the setting or tensor at fault and the limits in figures.
    """
    config = read_config(files.read(CONFIG, MAX_CONFIG))
    found = _found_parts(files, targets)
    places: dict[int, tuple[int, int]] = {}
    end = 0
    for index, parts in sorted(found.items()):
        rank = max(part.rank for part in parts.values())
        places[index] = (end, rank)
        target = targets[index]
        end += _aligned(len(target.sizes) * rank * target.inputs) + _aligned(sum(target.sizes) * rank)
    if end * dtype.itemsize > most_bytes:
        raise ModelRejected(
            f"the adapter takes {end * dtype.itemsize:,} bytes; at most {most_bytes:,} are served",
            needed=end * dtype.itemsize,
            limit=most_bytes,
        )
    image = LoraImage(
        identity=_identity(files),
        rank=max((rank for _, rank in places.values()), default=0),
        modules=sum(map(len, found.values())),
        places=places,
        memory=allocate(end * dtype.itemsize).zero_().view(dtype),
    )
    for index, pair in image.pairs(image.memory, targets).items():
        _fill(pair, targets[index], found[index], files, config)
    return image


def _found_parts(files: ModelFiles, targets: Sequence[Target]) -> dict[int, dict[int, _Found]]:
    """The file's tensors by the number of their target and their part. Raises ModelRejected for a tensor that belongs
    to no target, and for shapes that do not fit."""
    if WEIGHTS not in files:
        raise ModelRejected(f"{files.folder} has no {WEIGHTS}: save the adapter with PEFT as safetensors", file=WEIGHTS)
    where = {path: (index, part) for index, target in enumerate(targets) for part, path in enumerate(target.paths)}
    sides: dict[str, dict[str, TensorInfo]] = {}
    for info in tensors_of(files, WEIGHTS):
        match = _NAME.fullmatch(info.name)
        module = "" if match is None else match["module"]
        if match is None or module not in where:
            raise ModelRejected(
                f"{WEIGHTS}: {info.name[:200]} is not served: adapters may have lora_A and lora_B of linear modules "
                "within the model's blocks, without experts of their own",
                file=WEIGHTS,
                tensor=info.name[:200],
            )
        if info.stored not in DTYPES or len(info.shape) != 2:
            told = f"{info.name[:200]} is {info.stored} {list(info.shape)}: matrices in F32, F16 or BF16 are read"
            raise ModelRejected(f"{WEIGHTS}: {told}", file=WEIGHTS, tensor=info.name[:200])
        sides.setdefault(module, {})[match["side"]] = info
    found: dict[int, dict[int, _Found]] = {}
    for module, pair in sides.items():
        index, part = where[module]
        found.setdefault(index, {})[part] = _checked(module, pair, targets[index], part)
    if not found:
        raise ModelRejected(f"{WEIGHTS} has no tensors", file=WEIGHTS)
    return found


def _checked(module: str, pair: dict[str, TensorInfo], target: Target, part: int) -> _Found:
    if len(pair) < 2:
        missing = "AB".replace("".join(pair), "")
        raise ModelRejected(f"{WEIGHTS} has no lora_{missing} of {module}", file=WEIGHTS, tensor=module)
    a, b = pair["A"], pair["B"]
    rank = a.shape[0]
    if not 0 < rank <= MAX_RANK:
        told = f"{WEIGHTS}: {module} has rank {rank:,}; ranks from 1 to {MAX_RANK} are served"
        raise ModelRejected(told, file=WEIGHTS, tensor=module, rank=rank, limit=MAX_RANK)
    wanted = ((rank, target.inputs), (target.sizes[part], rank))
    if (a.shape, b.shape) != wanted:
        raise ModelRejected(
            f"{WEIGHTS}: {module} has A {list(a.shape)} and B {list(b.shape)}, but this model needs {list(wanted[0])} "
            f"and {list(wanted[1])}: the adapter belongs to another model",
            file=WEIGHTS,
            tensor=module,
        )
    return _Found(module, a, b)


def _fill(pair: Pair, target: Target, parts: dict[int, _Found], files: ModelFiles, config: LoraConfig) -> None:
    rank, first = pair.rank, 0
    for part, size in enumerate(target.sizes):
        if (found := parts.get(part)) is not None:
            pair.a[part * rank : part * rank + found.rank].copy_(_read(files, found.a))
            factor = config.factor(found.module, found.rank)
            pair.b[first : first + size, : found.rank].copy_(_read(files, found.b).float() * factor)
        first += size
    if not (pair.a.isfinite().all() and pair.b.isfinite().all()):
        module = next(iter(parts.values())).module
        raise ModelRejected(f"{WEIGHTS}: the adapter of {module} has values that are no numbers", tensor=module)


def _read(files: ModelFiles, info: TensorInfo) -> Tensor:
    tensor = torch.empty(info.shape, dtype=DTYPES[info.stored])
    memory = tensor.view(-1).view(torch.uint8).numpy().data
    if files.read_into(info.file, info.start, memory) < len(memory):
        told = f"{info.file} was cut while it was read: it ends within tensor {info.name[:200]}"
        raise ModelRejected(told, file=info.file, tensor=info.name[:200])
    return tensor


def _identity(files: ModelFiles) -> bytes:
    """Hash of the contents of both files: equal for copies of the adapter under any name."""
    digest = hashlib.blake2b(digest_size=IDENTITY_BYTES)
    for name in (CONFIG, WEIGHTS):
        size = files.size(name)
        digest.update(f"{name} {size}\n".encode())
        for offset in range(0, size, _PIECE):
            digest.update(files.read_at(name, offset, min(_PIECE, size - offset)))
    return digest.digest()


def _aligned(numel: int) -> int:
    return -(-numel // _ALIGNMENT) * _ALIGNMENT
