"""Checkpoints with a head that predicts several tokens, under the names of published ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.families.configurations import reduced

BLOCKS = 3  # of the target
Tensors = dict[str, Tensor]


def with_head(
    folder: Path, family: str, change: Callable[[Tensors], object] = lambda tensors: None, vocab: int = 300
) -> Path:
    """Writes a reduced random model of BLOCKS blocks and its head, which has the weights of one block more. No norm's
    weights are 1."""
    config = reduced(family)
    config.vocab_size, config.num_hidden_layers = vocab, BLOCKS + 1
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        head, width = f"model.layers.{BLOCKS}", config.hidden_size
        tensors |= {f"{head}.{name}.weight": torch.ones(width) for name in ("enorm", "hnorm", "shared_head.norm")}
        for name, tensor in tensors.items():
            if "norm" in name:
                tensors[name] = tensor + 0.3 * torch.randn_like(tensor)
        tensors[f"{head}.eh_proj.weight"] = torch.randn(width, 2 * width) * width**-0.5
    tensors[f"{head}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{head}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in _by_expert(tensors).items()}, folder / "model.safetensors")
    told = json.loads((folder / "config.json").read_text())
    told |= {"num_hidden_layers": BLOCKS, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(told))
    return folder


def _by_expert(tensors: Tensors) -> Tensors:
    """Published checkpoints have the matrices of each expert by themselves."""
    apart = Tensors()
    for name, tensor in tensors.items():
        path, _, what = name.rpartition(".")
        if what not in ("gate_up_proj", "down_proj"):
            apart[name] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            parts = {"gate_proj": matrix.chunk(2)[0], "up_proj": matrix.chunk(2)[1]}
            for part, own in (parts if what == "gate_up_proj" else {what: matrix}).items():
                apart[f"{path}.{expert}.{part}.weight"] = own
    return apart
