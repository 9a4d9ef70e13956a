"""A deeper djinn-tiny, which thinks exactly as djinn-tiny does: the blocks behind its own add nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support.serving import TINY

OWN = 8  # blocks of djinn-tiny
_ENDS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")  # their products are added to the hidden state


def deepened(folder: Path, times: int = 4) -> Path:
    """Writes a copy of djinn-tiny with `times` as many blocks to `folder`."""
    shutil.copytree(TINY, folder)
    for each in folder.iterdir():
        each.chmod(0o644)
    tensors = load_file(folder / "model.safetensors")
    first = {name: tensor for name, tensor in tensors.items() if ".layers.0." in name}
    for block in range(OWN, times * OWN):
        for name, tensor in first.items():
            idle = torch.zeros_like(tensor) if name.endswith(_ENDS) else tensor.clone()
            tensors[name.replace(".layers.0.", f".layers.{block}.")] = idle
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": times * OWN}))
    return folder


def contrary(folder: Path) -> Path:
    """Writes a copy of djinn-tiny to `folder` that has the same tokenizer and thinks otherwise."""
    shutil.copytree(TINY, folder)
    (folder / "model.safetensors").chmod(0o644)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].roll(5) * -1
    save_file(tensors, folder / "model.safetensors")
    return folder
