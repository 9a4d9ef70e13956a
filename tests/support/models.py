"""Checkpoints for tests: a small random one of each family, and the model that djinnd ships.

Random checkpoints are written once a test session, or once for all if DJINND_TEST_MODELS names a folder to keep them.
Several processes may write at once: each writes into its own folder, and the first to rename it wins.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import io
import os
import shutil
import tempfile
from pathlib import Path

import torch

from tools.checkpoints.random_models.model import make_random

REPOSITORY = Path(__file__).resolve().parents[2]

_SHAPES = {
    "llama-2": "llama-2-7b",
    "llama-3.1": "llama-3.1-8b",
    "mistral": "mistral-7b",
    "qwen2": "qwen2-7b",
    "qwen3": "qwen3-8b",
    "gpt2": "gpt2",
    "gpt-j": "gpt-j-6b",
    "mixtral": "mixtral-8x7b",
    "gemma-2": "gemma-2-9b",
    "gemma-3": "gemma-3-1b",
    "phi-3": "phi-3-mini-4k",
    "olmo-2": "olmo-2-7b",
    "gpt-neox": "gpt-neox-20b",
    "opt": "opt-6.7b",
    "falcon-7b": "falcon-7b",
    "falcon-40b": "falcon-40b",
    "qwen3-moe": "qwen3-30b-a3b",
    "gpt-oss": "gpt-oss-20b",
}
FAMILIES = tuple(_SHAPES)


def tiny_model() -> Path:
    """The folder of djinn-tiny."""
    return REPOSITORY / "djinnd" / "models" / "djinn-tiny"


@functools.cache
def reduced_model(family: str) -> Path:
    """The folder of the family's reduced checkpoint: float32, 4 blocks, random weights that never change."""
    folder = _cache() / f"{family}-{_version()}"
    if not folder.exists():
        _publish(_write(family), folder)
    return folder


def _write(family: str) -> Path:
    written = Path(tempfile.mkdtemp(prefix=f".{family}-", dir=_cache()))
    with contextlib.redirect_stdout(io.StringIO()):
        make_random(_SHAPES[family], written, dtype=torch.float32, reduced=True)
    return written


def _publish(written: Path, folder: Path) -> None:
    """Gives the finished folder its name. If another process was faster, its folder is as good."""
    try:
        written.rename(folder)
    except OSError:
        shutil.rmtree(written)
        if not folder.exists():
            raise


@functools.cache
def _cache() -> Path:
    if kept := os.environ.get("DJINND_TEST_MODELS"):
        Path(kept).mkdir(parents=True, exist_ok=True)
        return Path(kept).resolve()
    session = Path(tempfile.mkdtemp(prefix="djinnd-test-models-"))
    atexit.register(_remove, session, os.getpid())
    return session


def _remove(session: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child inherits the hook and not the folder
        shutil.rmtree(session, ignore_errors=True)


@functools.cache
def _version() -> str:
    """Identifies the code that writes the checkpoints, so that a kept one is never from an older tool."""
    digest = hashlib.sha256()
    for source in sorted((REPOSITORY / "tools" / "checkpoints").glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:12]
