"""A checkpoint in GGUF files: the interface of CheckpointFiles over tensors that are stored as blocks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor
from xxhash import xxh3_128

from djinn_client.errors import ModelRejected
from djinn_client.files.model_files import ModelFiles
from djinnd.gguf.files import GgufModel
from djinnd.gguf.formats import FORMATS, SERVED, format_name
from djinnd.weights.checkpoint import PIECE, CheckpointFiles, TensorInfo, wrong_shape
from djinnd.weights.forms.coding import Coding
from djinnd.weights.forms.gguf_blocks import GgufBlocks
from djinnd.weights.gguf.blocks import PLAIN, decode


class GgufCheckpoint(CheckpointFiles):
    """The tensors of a model's GGUF files, by their names in GGUF. Tensors are decoded as they are read."""

    def __init__(self, files: ModelFiles, names: list[str]) -> None:
        """Reads the headers of the files `names`. Raises ModelRejected."""
        model = GgufModel(files, names)
        stats = [(name, files.stat(name)) for name in names]
        self.files = files
        self.config = self.told = model.configuration()
        self.architecture = str(model.header.metadata["general.architecture"])
        self.coded_as = f"GGUF {model.mixture}"
        self._digests = {}
        self._stats = [(name, (s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns)) for name, s in stats]
        self._formats = {name: placed.tensor.format for name, placed in model.tensors.items()}
        self.tensors = self.stored = {
            name: TensorInfo(
                name, placed.file, placed.tensor.shape, format_name(placed.tensor.format), *placed.tensor[2:]
            )
            for name, placed in model.tensors.items()
        }
        self.dtype = self._computed()

    def _computed(self) -> torch.dtype:
        """The dtype in which most weights are stored; bfloat16 where they are quantised."""
        sizes: Counter[int] = Counter()
        for name, info in self.tensors.items():
            sizes[self._formats[name]] += math.prod(info.shape)
        commonest = sizes.most_common(1)
        return PLAIN.get(commonest[0][0], torch.bfloat16) if commonest else torch.bfloat16

    def check_readable(self, name: str) -> None:
        info, known = self.tensors[name], FORMATS.get(self._formats[name])
        if known is None or not known.is_served:
            raise ModelRejected(
                f"{info.file}: tensor {name} is quantised as {info.stored}, which is not served; served are {SERVED}: "
                "load a file with one of these, for example Q4_K_M",
                file=info.file,
                tensor=name,
            )

    def read(self, name: str) -> Tensor:
        """Reads the tensor to memory of its own: in its own dtype, or bfloat16 if it is quantised."""
        tensor = torch.empty(self.tensors[name].shape, dtype=PLAIN.get(self._formats[name], torch.bfloat16))
        self.read_into(name, tensor)
        return tensor

    def read_into(self, name: str, view: Tensor) -> None:
        info, number = self.tensors[name], self._formats[name]
        if tuple(view.shape) != info.shape:
            raise wrong_shape(name, info.shape, view.shape)
        form, flat, digest = FORMATS[number], view.view(-1), xxh3_128()
        step = PIECE // form.nbytes  # blocks
        aside = torch.empty(min(step * form.nbytes, info.nbytes), dtype=torch.uint8)
        for first in range(0, info.nbytes // form.nbytes, step):
            target = flat[first * form.weights : (first + step) * form.weights]
            piece = aside[: target.numel() // form.weights * form.nbytes]
            self.read_piece(info, first * form.nbytes, piece, digest)
            target.copy_(decode(number, piece))
        self._digests[name] = digest.digest()

    def coding(self, name: str) -> Coding | None:
        number, shape = self._formats[name], self.tensors[name].shape
        if number in PLAIN or number not in FORMATS or not FORMATS[number].is_served or len(shape) < 2:
            return None
        coding = GgufBlocks(number)
        return coding if coding.fits(*shape[-2:]) else None

    def read_parts(self, name: str, parts: Sequence[Tensor]) -> None:
        info, (blocks,), digest = self.tensors[name], parts, xxh3_128()
        flat = blocks.view(-1)
        assert flat.numel() == info.nbytes, (name, blocks.shape, info.nbytes)
        for first in range(0, info.nbytes, PIECE):
            self.read_piece(info, first, flat[first : first + PIECE], digest)
        self._digests[name] = digest.digest()
