"""Altered checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from tests.support.models import reduced_model

Tensors = dict[str, Tensor]


def altered(
    folder: Path,
    family: str = "llama-2",
    change: Callable[[Tensors], object] = lambda tensors: None,
    config: dict[str, Any] | None = None,
) -> Path:
    """Writes the family's reduced checkpoint to `folder`, with `change` applied to its tensors and `config` merged into
    its config.json."""
    source = reduced_model(family)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    original = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(original | (config or {})))
    return folder


def random_model(folder: Path, config: PreTrainedConfig) -> Path:
    """A checkpoint of a family that djinnd does not know, written by transformers."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return folder


def cast(tensors: Tensors, dtype: torch.dtype) -> None:
    for name, tensor in tensors.items():
        tensors[name] = tensor.to(dtype)
