"""A Hugging Face checkpoint folder: which tensors it has, in which files. Reads only safetensors, never pickles."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from djinn_client.errors import ModelNotFound, ModelRejected

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


class Checkpoint:
    """Opens a folder and checks that its files are whole.

    Raises ModelNotFound when there is no checkpoint, ModelRejected with the file (and the tensor) at fault when there
    is a damaged one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = folder / "config.json"
        if not config.is_file():
            raise ModelNotFound(f"{folder} is not a checkpoint: it has no config.json", path=str(folder))
        self.config = read_json(config)
        self._open: dict[Path, Any] = {}
        self.tensors = {info.name: info for file in self._files() for info in self._scan(file)}
        self._check_index()

    def _files(self) -> list[Path]:
        files = sorted(self.folder.glob("model*.safetensors"))
        if not files:
            raise ModelNotFound(
                f"{self.folder} has no model*.safetensors; checkpoints in other formats (.bin, GGUF) must be converted",
                path=str(self.folder),
            )
        return files

    def _scan(self, file: Path) -> Iterator[TensorInfo]:
        try:
            handle = self._open[file] = safe_open(file, framework="pt")
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelRejected(f"{file.name} is damaged or cut short: {error}", file=str(file)) from error
        for name in handle.keys():
            piece = handle.get_slice(name)
            dtype = _DTYPES.get(piece.get_dtype())
            if dtype is None:
                raise ModelRejected(
                    f"{file.name}: tensor {name} is {piece.get_dtype()}; djinnd takes F32, F16 and BF16 weights",
                    file=str(file),
                    tensor=name,
                )
            yield TensorInfo(name, file, tuple(piece.get_shape()), dtype)

    def _check_index(self) -> None:
        index = self.folder / "model.safetensors.index.json"
        if not index.is_file():
            return
        for name, file in read_json(index).get("weight_map", {}).items():
            if name not in self.tensors:
                raise ModelRejected(
                    f"{index.name} promises tensor {name} in {file}, which does not have it",
                    file=str(self.folder / file),
                    tensor=name,
                )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most of the weights."""
        sizes: dict[torch.dtype, int] = {}
        for info in self.tensors.values():
            sizes[info.dtype] = sizes.get(info.dtype, 0) + torch.Size(info.shape).numel()
        return max(sizes, key=sizes.__getitem__)

    def read(self, name: str) -> Tensor:
        """The tensor, mapped from its file where the library does so. Safe to call from several threads."""
        return self._open[self.tensors[name].file].get_tensor(name)

    def fingerprint(self) -> str:
        """Changes when the checkpoint does: of the configuration, the tensors and the files' sizes and times."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for name, info in sorted(self.tensors.items()):
            digest.update(f"{name} {info.file.name} {info.shape} {info.dtype}\n".encode())
        for file in sorted(self._open):
            stat = file.stat()
            digest.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
        return digest.hexdigest()


def read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ModelRejected(f"{file.name} is not readable JSON: {error}", file=str(file)) from error
    if not isinstance(value, dict):
        raise ModelRejected(f"{file.name} is not a JSON object", file=str(file))
    return value
