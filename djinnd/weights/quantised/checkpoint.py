"""QuantisedCheckpoint: safetensors with codes and scales in place of some matrices."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor
from xxhash import xxh3_128

from djinn_client.errors import ModelRejected
from djinn_client.files.model_files import ModelFiles
from djinnd.weights.checkpoint import DTYPES, PIECE, CheckpointFiles, TensorInfo, wrong_shape
from djinnd.weights.forms.coding import Coding
from djinnd.weights.quantised.coded import DTYPES as STORED
from djinnd.weights.quantised.coded import CodedTensor, Source
from djinnd.weights.quantised.configuration import named_dtype, quantisation_of, unquantised
from djinnd.weights.quantised.schemes import forms_of, in_words

_NAMED = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}

# Ends of the names of tensors that belong to codes, behind the name of the matrix and of the module.
_BESIDE = ("_shape", "_zero_point", "_g_idx", "_scale", "_scale_2", "_scale_inv")
_MODULE = ("qzeros", "g_idx", "input_scale", "input_global_scale", "input_zero_point", "activation_scale")


class QuantisedCheckpoint(CheckpointFiles):
    """The tensors of a quantised checkpoint: matrices in the place of the codes and scales that make them up. They are
    decoded as they are read, or read as parts of their coding."""

    def __init__(self, files: ModelFiles) -> None:
        """Raises ModelNotFound, and ModelRejected for a method that is not served or for tensors that do not fit."""
        self._method, self._forms = forms_of(quantisation_of(files))
        self._coded: dict[str, CodedTensor] = {}
        super().__init__(files)
        self.config = unquantised(self.told)
        self.coded_as = self._in_words()

    def _logical(self) -> dict[str, TensorInfo]:
        tensors = dict(self.stored)
        for name in self.stored:
            coded = next((each for form in self._forms if (each := form.find(name, self.stored))), None)
            if coded is None:
                continue
            module = coded.name.removesuffix("weight")
            beside = [coded.name + end for end in _BESIDE] + [module + end for end in _MODULE]
            for used in (*(source.info.name for source in coded.sources), *beside):
                tensors.pop(used, None)
            codes = coded.sources[0].info
            if coded.name in tensors or coded.name in self._coded:
                told = f"{codes.file}: {coded.name[:200]} is stored twice, as numbers and as codes"
                raise ModelRejected(told, file=codes.file, tensor=coded.name)
            self._coded[coded.name] = coded
        for name, coded in self._coded.items():
            codes = coded.sources[0].info
            tensors[name] = TensorInfo(name, codes.file, coded.shape, coded.coding.name, codes.start, coded.nbytes)
        if not self._coded:
            told = f"its configuration says {self._method}, but it has no tensors that are coded so"
            raise ModelRejected(f"{self.files.folder}: {told}", path=self.files.folder)
        return tensors

    def _computed(self) -> torch.dtype:
        """The dtype that config.json names, or else that of most plain weights."""
        return _NAMED.get(named_dtype(self.told)) or super()._computed()

    def _in_words(self) -> str:
        sizes: Counter[Coding] = Counter()
        for coded in self._coded.values():
            sizes[coded.coding] += math.prod(coded.shape)
        return in_words(self._method, sizes.most_common(1)[0][0])

    def check_readable(self, name: str) -> None:
        if name not in self._coded:
            super().check_readable(name)

    def coding(self, name: str) -> Coding | None:
        coded = self._coded.get(name)
        return None if coded is None else coded.coding

    def is_transposed(self, name: str) -> bool:
        return name in self._coded and self._coded[name].is_transposed

    # --- bytes ------------------------------------------------------------------------------------------------------

    def read(self, name: str) -> Tensor:
        """Reads the tensor to memory of its own: in its own dtype, or float32 if it is coded."""
        if name not in self._coded:
            return super().read(name)
        tensor = torch.empty(self.tensors[name].shape)
        self.read_into(name, tensor)
        return tensor

    def read_into(self, name: str, view: Tensor) -> None:
        coded = self._coded.get(name)
        if coded is None:
            return super().read_into(name, view)
        if tuple(view.shape) != coded.shape:
            raise wrong_shape(name, coded.shape, view.shape)
        parts = [torch.empty((1, *part.shape), dtype=part.dtype) for part in coded.coding.parts(coded.rows, coded.cols)]
        reading = _Reading(self, coded)
        out = view.view(-1, *view.shape[-2:])
        out = out.transpose(1, 2) if coded.is_transposed else out
        for matrix in range(len(out)):
            reading.read([part[0] for part in parts])
            coded.coding.decode(parts, out[matrix : matrix + 1])
        self._digests |= reading.digests()

    def read_parts(self, name: str, parts: Sequence[Tensor]) -> None:
        coded = self._coded[name]
        reading = _Reading(self, coded)
        for matrix in range(max(coded.stack, 1)):
            reading.read([part[matrix] for part in parts])
        self._digests |= reading.digests()


class _Reading:
    """Reads the stored tensors of one coded tensor, a matrix of the stack at a time."""

    def __init__(self, checkpoint: QuantisedCheckpoint, coded: CodedTensor) -> None:
        self._checkpoint = checkpoint
        self._coded = coded
        self._hashes = [xxh3_128() for _ in coded.sources]
        self._next = 0

    def read(self, parts: Sequence[Tensor]) -> None:
        """Fills the parts of the next matrix: contiguous [*shape] each."""
        for source, part, digest in zip(self._coded.sources, parts, self._hashes, strict=True):
            self._fill(source, part, digest)
        self._next += 1

    def _fill(self, source: Source, part: Tensor, digest: xxh3_128) -> None:
        info = source.info
        shape = info.shape[1:] if self._coded.stack else info.shape
        memory = part if source.turn is None else torch.empty(shape, dtype=STORED[info.stored])
        raw, begin = memory.view(-1).view(torch.uint8), self._next * memory.nbytes
        for first in range(0, len(raw), PIECE):
            self._checkpoint.read_piece(info, begin + first, raw[first : first + PIECE], digest)
        if source.turn is not None:
            source.turn(memory, part)

    def digests(self) -> dict[str, bytes]:
        return {source.info.name: hash.digest() for source, hash in zip(self._coded.sources, self._hashes, strict=True)}
