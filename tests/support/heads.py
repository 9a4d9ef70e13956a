"""Checkpoints with a head that predicts several tokens, under the names of published ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, modeling_layers

from tests.families.configurations import reduced

BLOCKS = 3  # of the target
Tensors = dict[str, Tensor]

no_reference = pytest.mark.skipif(  # 5.17 has a model of the heads without single ones
    not hasattr(getattr(modeling_layers, "MtpModel", None), "forward_layer"), reason="this transformers has no heads"
)


def with_head(
    folder: Path,
    family: str,
    change: Callable[[Tensors], object] = lambda tensors: None,
    vocab: int = 300,
    blocks: int = BLOCKS,
) -> Path:
    """Writes a reduced random model of so many blocks and its head, which has the weights of one block more. No norm's
    weights are 1."""
    config = reduced(family)
    config.vocab_size, config.num_hidden_layers = vocab, blocks + 1
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        head, width = f"model.layers.{blocks}", config.hidden_size
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
    told |= {"num_hidden_layers": blocks, "num_nextn_predict_layers": 1}
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


def alike(tensors: Tensors) -> None:
    """Changes the weights so that a target's next token depends on the last one only, and its head guesses the same.
    All blocks add nothing, and the head's input is its token's embedding."""
    for name, tensor in tensors.items():
        if "o_proj" in name or "down_proj" in name:
            tensor.zero_()
    head = next(name for name in tensors if name.endswith(".eh_proj.weight")).removesuffix(".eh_proj.weight")
    width = len(tensors["model.norm.weight"])
    tensors[f"{head}.eh_proj.weight"] = torch.eye(width, 2 * width)
    tensors[f"{head}.enorm.weight"] = torch.ones(width)
    tensors[f"{head}.shared_head.norm.weight"] = tensors["model.norm.weight"].clone()


class Reference:
    """transformers' model of heads, with the target beside it."""

    def __init__(self, folder: Path) -> None:
        from transformers.modeling_layers import MtpModel

        self.target: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.target._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{BLOCKS}.*"]
        self.heads = MtpModel.from_pretrained(self.target).eval()
        self._forget()

    def _forget(self) -> None:
        from transformers.cache_utils import MtpCache

        self.cache = MtpCache(config=self.target.config.get_mtp_config())

    @torch.inference_mode()
    def hidden(self, tokens: list[int]) -> Tensor:
        hidden: Tensor = self.target.model(torch.tensor([tokens])).last_hidden_state[0]
        return hidden

    def guesses(self, tokens: list[int], first: int, count: int) -> list[int]:
        """The likeliest next tokens. The head knows the tokens from `first` on."""
        self._forget()
        previous, new, start, found = self.hidden(tokens)[first - 1 : -1], tokens[first:], 0, list[int]()
        for _ in range(count):
            hidden, logits = self.run(new, start, previous)
            found.append(int(logits.argmax()))
            previous, start, new = hidden[-1:], start + len(new), found[-1:]
        return found

    @torch.inference_mode()
    def run(self, tokens: list[int], start: int, previous: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(start, start + len(tokens))[None]
        ids = torch.tensor([tokens])
        hidden = self.heads.forward_layer(0, previous[None], positions, self.cache, input_ids=ids)
        return hidden[0], self.heads._project_to_logits(hidden)[0, -1]
