"""Writes a named shape with random weights, a shard at a time."""

from __future__ import annotations

import functools
import shutil
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from tokenizers import Tokenizer

from tools.checkpoints.corpus import sample
from tools.checkpoints.files import write_config, write_json, write_weights
from tools.checkpoints.random_models.coded import TOLD, in_form
from tools.checkpoints.random_models.layout import StoredTensor, shards, stored_tensors
from tools.checkpoints.random_models.weights import RandomWeights
from tools.checkpoints.shapes.named import config_of, shape_of
from tools.checkpoints.shapes.shape import REDUCED_VOCABULARY, Config
from tools.checkpoints.tokenizer import train_bpe, write_tokenizer

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SHARDS_AT_ONCE = 2  # bounds the memory used; two keep both the generator and the disk busy


def make_random(
    name: str,
    out: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    device: str = "cpu",
    shard_bytes: int = 5_000_000_000,
    reduced: bool = False,
    blocks: int | None = None,
    form: str | None = None,
) -> None:
    """Write the checkpoint folder `out`, config.json last. Host memory holds at most two shards.

    form: of the weights, one of coded.FORMS; None: plain ones of `dtype`.
    ValueError: no such shape, or it has no weights of this form. FileExistsError: `out` has something in it. OSError:
    the disk has too little room.
    """
    config, tensors, weights = described(name, dtype, seed=seed, device=device, reduced=reduced, blocks=blocks)
    if form is not None:
        config, tensors = config | {"quantization_config": TOLD[form]}, in_form(form, tensors)
    prepare_folder(out, sum(tensor.nbytes for tensor in tensors))
    _write_weights(out, shards(tensors, shard_bytes), weights)
    positions = config.get("max_position_embeddings") or config["n_positions"]
    write_tokenizer(_trained(), out, positions)
    write_config(out, config)


@functools.cache
def _trained() -> Tokenizer:
    return train_bpe(sample(), REDUCED_VOCABULARY)


def described(
    name: str,
    dtype: torch.dtype = torch.bfloat16,
    *,
    seed: int = 0,
    device: str = "cpu",
    reduced: bool = False,
    blocks: int | None = None,
) -> tuple[Config, list[StoredTensor], RandomWeights]:
    """Returns the content of config.json, the tensors, and the source of their values. Raises ValueError for an unknown
    shape."""
    shape = shape_of(name)
    config = config_of(name, dtype=str(dtype).removeprefix("torch."), reduced=reduced, blocks=blocks)
    gain = shape.reduced_gain if reduced else 1.0
    return config, stored_tensors(shape, config, dtype), RandomWeights(config, gain, seed, torch.device(device))


def prepare_folder(out: Path, weight_bytes: int) -> None:
    """Make sure that `out` is an empty folder on a disk with room for the weights."""
    if out.is_dir() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty; name a new folder")
    out.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out).free
    if weight_bytes > free:
        raise OSError(f"the weights need {weight_bytes / 1e9:.1f} GB, {out} has {free / 1e9:.1f} GB free")


def _write_weights(out: Path, runs: Sequence[Sequence[StoredTensor]], weights: RandomWeights) -> None:
    files = [_file_name(number, len(runs)) for number in range(1, len(runs) + 1)]
    progress = _Progress(sum(tensor.nbytes for run in runs for tensor in run))

    def write(file: str, run: Sequence[StoredTensor]) -> None:
        values = {tensor.name: weights.values(tensor).cpu() for tensor in run}
        write_weights(out / file, values)
        progress.add(file, sum(tensor.nbytes for tensor in run))

    with ThreadPoolExecutor(SHARDS_AT_ONCE) as pool:
        list(pool.map(write, files, runs))
    if len(runs) > 1:
        weight_map = {tensor.name: file for file, run in zip(files, runs, strict=True) for tensor in run}
        index = {"metadata": {"total_size": progress.total}, "weight_map": weight_map}
        write_json(out / "model.safetensors.index.json", index)


def _file_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


class _Progress:
    """A line for each file written, from any thread."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._done = 0
        self._started = time.monotonic()
        self._lock = threading.Lock()

    def add(self, file: str, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            seconds = time.monotonic() - self._started
            print(f"{file}  {self._done / 1e9:.2f} of {self.total / 1e9:.2f} GB  {seconds:.1f} s", flush=True)
