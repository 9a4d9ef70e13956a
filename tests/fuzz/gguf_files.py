"""GGUF files of any bytes: headers, configurations, tokenizers and tensors are read, or refused with a typed error."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from djinn_client.errors import DjinnError
from djinn_client.files.model_files import ModelFiles
from djinnd.gguf.configuration import make_configuration
from djinnd.gguf.formats import FORMATS
from djinnd.gguf.header import BadGguf, Header
from djinnd.gguf.tokenizer import make_tokenizer, tokenizer_settings
from djinnd.weights.opening import open_checkpoint
from tests.fuzz.messages import Choices
from tests.fuzz.target import Target
from tests.support.gguf_files import Stored, gguf_bytes, numbers

FOLDER = Path(tempfile.mkdtemp(prefix="djinnd-fuzz-"))
_ODD: tuple[Any, ...] = ("", "x" * 300, -1.5, 0, 1 << 31, True, [""], [0, 1], [float("nan")], ["a b", " ", "a"])
_SIZES = ("context_length", "block_count", "embedding_length", "feed_forward_length", "attention.head_count")


def whole(form: int = 2) -> bytes:
    """A file that is read without an error."""
    told: dict[str, Any] = {"general.architecture": "llama"} | {f"llama.{size}": 32 for size in _SIZES}
    told |= {"llama.attention.layer_norm_rms_epsilon": 0.5, "tokenizer.ggml.model": "llama"}
    told |= {"tokenizer.ggml.tokens": ["a", "b", "ab"], "tokenizer.ggml.scores": [0.0, 0.0, 1.0]}
    each = FORMATS[form]
    tensors: dict[str, Stored] = {"token_embd.weight": (form, (3, each.weights), bytes(3 * each.nbytes))}
    return gguf_bytes(told, tensors | {"rope_freqs.weight": numbers(1, 1)})


def seeds() -> Iterator[bytes]:
    yield whole()
    yield whole(14)
    yield gguf_bytes({"general.architecture": "llama"})


def made(choices: Choices) -> bytes:
    """A file with a few odd values and tensors."""
    keys = ["general.architecture", "general.alignment", "tokenizer.ggml.pre", "tokenizer.ggml.token_type"]
    keys += [f"llama.{size}" for size in _SIZES] + ["tokenizer.ggml.merges", "tokenizer.ggml.bos_token_id"]
    told: dict[str, Any] = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": ("llama", "gpt2")[choices.below(2)],
    }
    told |= {"tokenizer.ggml.tokens": ["a", "b", "ab"]}
    told |= {f"llama.{size}": 1 + choices.below(64) for size in _SIZES}
    for _ in range(choices.below(4)):
        told[keys[choices.below(len(keys))]] = _ODD[choices.below(len(_ODD))]
    tensors: dict[str, Stored] = {}
    for number in range(choices.below(3)):
        form = list(FORMATS)[choices.below(len(FORMATS))]
        shape = (choices.below(3), choices.below(3) * FORMATS[form].weights)
        tensors[("token_embd.weight", "w")[number]] = (form, shape, bytes(choices.below(512)))
    return gguf_bytes(told, tensors)


def check(data: bytes) -> None:
    choices = Choices(data)
    for file in (data, made(choices)):
        with suppress(BadGguf, DjinnError):
            header = Header(lambda offset, count, file=file: file[offset : offset + count], len(file))  # type: ignore[misc]
            assert all(tensor.start + tensor.nbytes <= len(file) for tensor in header.tensors.values() if tensor.nbytes)
            with suppress(BadGguf, DjinnError):
                make_configuration(header, header.tensors, lambda name: struct.unpack("<2f", bytes(8)))
            with suppress(BadGguf, DjinnError):
                make_tokenizer(header)
            tokenizer_settings(header)
    if choices.below(8) == 0:
        _open(data if choices.below(2) else made(choices))


def _open(data: bytes) -> None:
    path = FOLDER / "model.gguf"
    path.write_bytes(data)
    with suppress(DjinnError), ModelFiles.open(str(path)) as files:
        checkpoint = open_checkpoint(files)
        for name in checkpoint.tensors:
            with suppress(DjinnError):
                checkpoint.check_readable(name)
                checkpoint.read(name)


PARSERS = ("djinnd.gguf.header", "djinnd.gguf.configuration", "djinnd.gguf.tokenizer")
TARGET = Target(PARSERS, seeds, check)
