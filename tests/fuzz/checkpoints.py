"""Checkpoints: headers of weights, indexes and configurations of any bytes are read, or refused with a typed error."""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from djinn_client.errors import DjinnError
from djinn_client.files.model_files import ModelFiles
from djinnd.weights.checkpoint import CONFIG, INDEX, SINGLE, CheckpointFiles
from djinnd.weights.safetensors_header import BITS, BadHeader, header_bytes, parse_header
from tests.fuzz.messages import HOSTILE, Choices
from tests.fuzz.target import Target

FOLDER = Path(tempfile.mkdtemp(prefix="djinnd-fuzz-"))
CONFIGS = (b'{"model_type": "llama", "num_hidden_layers": 1}', b"[]", b"{" * 100)


def with_header(entries: object, payload: bytes) -> bytes:
    header = json.dumps(entries).encode(errors="replace")
    return struct.pack("<Q", len(header)) + header + payload


def seeds() -> Iterator[bytes]:
    yield with_header({"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}, bytes(24))
    yield with_header({"__metadata__": {"format": "pt"}}, b"")
    yield bytes(range(64))


def made(choices: Choices) -> bytes:
    """A file whose header has entries with a few hostile values."""
    entries: dict[str, object] = {}
    end = 0
    for number in range(choices.below(4)):
        dtype = list(BITS)[choices.below(len(BITS))]
        shape = [choices.below(4) for _ in range(choices.below(3))]
        begin, end = end, end + choices.below(32)
        entry: dict[str, object] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        if choices.below(3) == 0:
            entry[list(entry)[choices.below(3)]] = HOSTILE[choices.below(len(HOSTILE))]
        entries[f"t{number}"] = entry if choices.below(9) else HOSTILE[choices.below(len(HOSTILE))]
    return with_header(_json(entries), bytes(end))


def _json(value: object) -> object:
    """Bytes have no form in JSON."""
    return json.loads(json.dumps(value, default=lambda each: each.decode(errors="replace")))


def check(data: bytes) -> None:
    choices = Choices(data)
    for file in (data, made(choices)):
        with suppress(BadHeader):
            count = header_bytes(file[:8], len(file))
            tensors = parse_header(file[8 : 8 + count], len(file))
            assert sum(stored.nbytes for stored in tensors.values()) == len(file) - 8 - count
    if choices.below(8) == 0:
        _open(choices, data)


def _open(choices: Choices, data: bytes) -> None:
    """Opens a folder in which the bytes are the weights, the index, or the configuration of a checkpoint."""
    name = (SINGLE, INDEX, CONFIG)[choices.below(3)]
    others = {CONFIG: CONFIGS[choices.below(len(CONFIGS))], "model-1.safetensors": made(choices)}
    for path in FOLDER.iterdir():
        path.unlink()
    for each, content in (others | {name: data}).items():
        (FOLDER / each).write_bytes(content)
    with suppress(DjinnError), ModelFiles.open(str(FOLDER)) as files:
        checkpoint = CheckpointFiles(files)
        for tensor in checkpoint.tensors:
            checkpoint.check_readable(tensor)
            checkpoint.read(tensor)


TARGET = Target(("djinnd.weights.safetensors_header", "djinn_client.files.model_files"), seeds, check)
