"""The GGUF files of a checkpoint: one, or the parts of one that was split."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from djinn_client.errors import ModelRejected
from djinn_client.files.model_files import GGUF, PART, ModelFiles
from djinn_client.files.other_files import HEAD, what_it_is
from djinnd.gguf.configuration import Config, make_configuration
from djinnd.gguf.formats import F32, format_name, mixture
from djinnd.gguf.header import BadGguf, GgufTensor, Header

_NOT_A_MODEL = ("mmproj", "imatrix")  # beginnings of names: projectors of images, and statistics of quantisers
_MOST_FLOATS = 1 << 16  # of a small tensor that is read with the header


def gguf_names(files: Iterable[str]) -> list[str]:
    """The names of the model's GGUF files, parts in their order; none if the checkpoint is in safetensors, or has no
    GGUF file. Raises ModelRejected if there are several models, or parts are missing."""
    names = sorted(files)
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return []
    found = [name for name in names if name.endswith(GGUF) and not name.startswith(_NOT_A_MODEL)]
    parts = {name: part for name in found if (part := PART.fullmatch(name))}
    models = sorted({parts[name]["stem"] if name in parts else name for name in found})
    if len(models) > 1:
        some = ", ".join(models[:8]) + (" …" if len(models) > 8 else "")
        raise ModelRejected(f"the folder has {len(models)} GGUF models: name the file of one of them ({some})")
    counts = {int(part["count"]) for part in parts.values()}
    if parts and (len(counts) > 1 or [int(part["number"]) for part in parts.values()] != [*range(1, max(counts) + 1)]):
        raise ModelRejected(f"{models[0]} is split, and {len(parts)} of its {max(counts)} parts are there")
    return found


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor, and the file that holds it."""

    file: str
    tensor: GgufTensor


class GgufModel:
    """The headers of a model's files. `header` is the first file's: it has all metadata."""

    def __init__(self, files: ModelFiles, names: Sequence[str]) -> None:
        """Raises ModelRejected for a file that is damaged or no GGUF file."""
        self._files = files
        self.names = list(names)
        headers = [_read(files, name) for name in names]
        self.header = headers[0]
        self.tensors: dict[str, PlacedTensor] = {}
        for name, header in zip(names, headers, strict=True):
            for tensor, entry in header.tensors.items():
                if tensor in self.tensors:
                    raise ModelRejected(f"two parts have the tensor {tensor[:80]}", file=name, tensor=tensor)
                self.tensors[tensor] = PlacedTensor(name, entry)

    @property
    def mixture(self) -> str:
        """The name of the file's mixture of formats, such as Q4_K_M; else that of its commonest format."""
        named = mixture(self.header.metadata.get("general.file_type"))
        if named:
            return named
        sizes: dict[int, int] = {}
        for each in self.tensors.values():
            sizes[each.tensor.format] = sizes.get(each.tensor.format, 0) + each.tensor.nbytes
        return format_name(max(sizes, key=lambda number: sizes[number])) if sizes else ""

    def configuration(self) -> Config:
        """The contents of config.json. Raises ModelRejected."""
        tensors = {name: placed.tensor for name, placed in self.tensors.items()}
        try:
            return make_configuration(self.header, tensors, self._floats)
        except BadGguf as error:
            raise ModelRejected(f"{self.names[0]}: {error}", file=self.names[0]) from error

    def _floats(self, name: str) -> Sequence[float]:
        placed = self.tensors[name]
        tensor, count = placed.tensor, placed.tensor.nbytes // 4
        if tensor.format != F32 or not 1 <= count <= _MOST_FLOATS:
            raise ModelRejected(f"{placed.file}: tensor {name} is no short list of F32", file=placed.file, tensor=name)
        data = self._files.read_at(placed.file, tensor.start, tensor.nbytes)
        if len(data) < tensor.nbytes:
            raise ModelRejected(f"{placed.file} ends within tensor {name}", file=placed.file, tensor=name)
        return struct.unpack(f"<{count}f", data)


def _read(files: ModelFiles, name: str) -> Header:
    head = files.read_at(name, 0, HEAD)
    if not head.startswith(b"GGUF"):
        other = what_it_is(head) or "no GGUF file"
        raise ModelRejected(f"{name} is {other}", file=name)
    try:
        return Header(lambda offset, count: files.read_at(name, offset, count), files.size(name))
    except BadGguf as error:
        at_fault = {"tensor": error.tensor} if error.tensor else {}
        raise ModelRejected(f"{name} is damaged or cut short: {error}", file=name, **at_fault) from error
