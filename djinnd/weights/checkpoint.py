"""A Hugging Face checkpoint folder: which tensors it has, in which files. Reads only safetensors, never pickles."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from djinn_client.errors import ModelNotFound, ModelRejected

_NOT_OF_THE_MODEL = frozenset({"_name_or_path", "transformers_version"})
_SAMPLED = 512  # tensors, in `identity`
_SAMPLE = 1024  # elements of each
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    name: str
    file: Path
    shape: tuple[int, ...]
    stored: str  # the dtype, as safetensors calls it; one of DTYPES, or the tensor is not read


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
        single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
        if single.is_file():  # transformers, too, then looks no further
            self.tensors = self._scan([single])
        elif index.is_file():
            promised = _weight_map(index)
            self.tensors = self._scan([folder / file for file in sorted(set(promised.values()))])
            self._check_promises(index, promised)
        else:
            raise ModelNotFound(
                f"{folder} has neither {single.name} nor {index.name}; checkpoints in other formats (.bin, GGUF) must "
                "be converted",
                path=str(folder),
            )
        self.dtype = self._commonest_dtype()

    def _scan(self, files: list[Path]) -> dict[str, TensorInfo]:
        return {info.name: info for file in files for info in self._tensors_of(file)}

    def _tensors_of(self, file: Path) -> Iterator[TensorInfo]:
        try:
            handle = self._open[file] = safe_open(file, framework="pt")
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelRejected(f"{file.name} is damaged or cut short: {error}", file=str(file)) from error
        for name in handle.keys():  # noqa: SIM118  # a handle is no dict
            piece = handle.get_slice(name)
            yield TensorInfo(name, file, tuple(piece.get_shape()), piece.get_dtype())

    def _check_promises(self, index: Path, promised: dict[str, str]) -> None:
        for name, file in promised.items():
            if name not in self.tensors:
                raise ModelRejected(
                    f"{index.name} promises tensor {name} in {file}, which does not have it",
                    file=str(self.folder / file),
                    tensor=name,
                )

    def _commonest_dtype(self) -> torch.dtype:
        """The dtype of most of the weights."""
        sizes: Counter[str] = Counter()
        for info in self.tensors.values():
            if info.stored in DTYPES:
                sizes[info.stored] += math.prod(info.shape)
        if not sizes:
            raise ModelRejected(f"{self.folder} has no F32, F16 or BF16 weights", path=str(self.folder))
        return DTYPES[sizes.most_common(1)[0][0]]

    def check_readable(self, name: str) -> None:
        """Raises ModelRejected for a tensor of a dtype that djinnd does not compute with."""
        info = self.tensors[name]
        if info.stored not in DTYPES:
            raise ModelRejected(
                f"{info.file.name}: tensor {name} is {info.stored}; djinnd takes F32, F16 and BF16 weights",
                file=str(info.file),
                tensor=name,
            )

    def read(self, name: str) -> Tensor:
        """The tensor, mapped from its file where the library does so. Safe to call from several threads."""
        file = self.tensors[name].file
        try:
            return self._open[file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelRejected(f"{file.name}: tensor {name}: {error}", file=str(file), tensor=name) from error

    def fingerprint(self) -> str:
        """Changes when the checkpoint does: of the configuration, the tensors and the files' sizes and times."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for name, info in sorted(self.tensors.items()):
            digest.update(f"{name} {info.file.name} {info.shape} {info.stored}\n".encode())
        for file in sorted(self._open):
            stat = file.stat()
            digest.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
        return digest.hexdigest()

    def identity(self) -> str:
        """The same for copies of the checkpoint, on every machine: of the configuration, of all tensors' names, shapes
        and dtypes, and of what a few hundred of them have in their middle. Cheap, and no proof against forgery."""
        told = {key: value for key, value in self.config.items() if key not in _NOT_OF_THE_MODEL}
        digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode())
        names = sorted(self.tensors)
        sampled = set(names[:: -(-len(names) // _SAMPLED)])
        for name in names:
            info = self.tensors[name]
            digest.update(f"{name} {info.shape} {info.stored}\n".encode())
            if name in sampled and info.stored in DTYPES and info.shape and 0 not in info.shape:
                middle = tuple(slice(size // 2, size // 2 + 1) for size in info.shape[:-1])
                row = self._open[info.file].get_slice(name)[(*middle, slice(0, _SAMPLE))]
                digest.update(row.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor → file, as the index of a checkpoint in several files has it."""
    promised = read_json(index).get("weight_map")
    if not isinstance(promised, dict) or not all(isinstance(file, str) for file in promised.values()):
        raise ModelRejected(f"{index.name} has no weight_map that names a file for each tensor", file=str(index))
    return promised


def read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ModelRejected(f"{file.name} is not readable JSON: {error}", file=str(file)) from error
    if not isinstance(value, dict):
        raise ModelRejected(f"{file.name} is not a JSON object", file=str(file))
    return value
