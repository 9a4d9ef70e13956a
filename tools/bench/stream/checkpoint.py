"""The checkpoint of an experiment, and the figures in its config.json."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from djinn_client.errors import InvalidRequest
from tools.bench.stream.experiment import Shape

MAKE_MODEL = Path(__file__).resolve().parents[2] / "make_model.py"


class Checkpoint(NamedTuple):
    path: Path | None  # None: a client hands it over
    vocab: int
    dtype: str  # torch's name


def find(folder: Path) -> Checkpoint:
    """Finds the checkpoint in a folder. Raises InvalidRequest where there is none."""
    try:
        config = json.loads((folder / "config.json").read_text())
        return Checkpoint(folder.resolve(), config["vocab_size"], config.get("dtype") or config["torch_dtype"])
    except (OSError, ValueError, KeyError) as error:
        raise InvalidRequest(f"{folder} is no checkpoint that this experiment can use: {error!r}") from error


def handed_over(shape: Shape) -> Checkpoint:
    """A checkpoint that is on no disk, because a client hands its weights over."""
    from tools.checkpoints.random_models.model import DTYPES
    from tools.checkpoints.shapes.named import config_of

    config = config_of(shape.shape, dtype=str(DTYPES[shape.dtype]).removeprefix("torch."), reduced=shape.reduced)
    return Checkpoint(None, config["vocab_size"], config["torch_dtype"])


def make(shape: Shape, folder: Path, device: str) -> None:
    """Makes the checkpoint if `folder` has none yet, in a process of its own: this one must hold no device memory."""
    if (folder / "config.json").exists():
        return
    options = [f"--dtype={shape.dtype}", f"--device={device.split(':')[0]}"]
    options += ["--reduced"] * shape.reduced + [f"--blocks={shape.blocks}"] * bool(shape.blocks)
    options += [f"--form={shape.form}"] * bool(shape.form)
    command = [sys.executable, str(MAKE_MODEL), "random", shape.shape, str(folder), *options]
    made = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if made.returncode:
        raise InvalidRequest(f"the checkpoint of {shape.shape} could not be made: {made.stderr.strip()}")
