"""The head of a checkpoint that predicts several tokens ahead (MTP), as a model of one block.

Some checkpoints have one more block behind the last. From the model's hidden state h at a position, after the final
norm, and from the next token, it predicts the token after that:

    t[p+1] ─► embedding ─► enorm ─┐
                                  ├─► eh_proj ─► block ─► norm ─► lm_head ─► logits of t[p+2]
    h[p] ────────────────► hnorm ─┘

So it is the family's own model with a single block, another input, and another final norm. Embedding and lm_head are
the target's. Of several heads the first is used: it can run again on its own result in the place of h.

    in the checkpoint of a target with N blocks     in the model of one block
    model.layers.N.self_attn.q_proj.weight          model.layers.0.self_attn.q_proj.weight
    model.layers.N.enorm.weight                     model.embed_tokens.enorm.weight
    model.layers.N.shared_head.norm.weight          model.norm.weight
    model.embed_tokens.weight                       model.embed_tokens.tokens.weight
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from djinn_client.errors import ModelRejected
from djinnd.model.family.adapter import Adapter, find_blocks
from djinnd.model.family.wrapper import text_config
from djinnd.weights.checkpoint import CheckpointFiles

_INPUTS = ("enorm", "hnorm", "eh_proj")
_NORM = "shared_head.norm"
_AS_IN_TARGET = ("embed_tokens.", "shared_head.head.")  # copies of the target's tensors, which some checkpoints have
_KINDS = ("layer_types", "mlp_layer_types")  # fields with a kind for each block


class HeadInput(nn.Module):
    """In the place of the embedding: tokens and hidden states in, the input of the block out.

    `previous` [rows, width] holds the hidden state before each token of a pass, from its first row on. A pass fills it
    first. A captured graph keeps its address. None: all hidden states are zero, as in the check at load.
    """

    def __init__(self, tokens: nn.Embedding, norm: nn.Module) -> None:
        super().__init__()
        width = tokens.embedding_dim
        self.tokens = tokens
        self.enorm, self.hnorm = deepcopy(norm), deepcopy(norm)
        self.eh_proj = nn.Linear(2 * width, width, bias=False, device="meta", dtype=tokens.weight.dtype)
        self.previous: Tensor | None = None
        self.adapter: Adapter | None = None  # of the model; a weak reference

    def forward(self, ids: Tensor) -> Tensor:
        """ids int64 [1, tokens] → [1, tokens, width]."""
        embedded: Tensor = self.tokens(ids)
        if self.adapter is not None and self.adapter.final_hidden is not None:
            return embedded  # the epilogue does not use it
        previous, tokens = self.previous, ids.shape[1]
        hidden = torch.zeros_like(embedded) if previous is None else previous[:tokens].unsqueeze(0)
        made: Tensor = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        return made


@dataclass(frozen=True, slots=True)
class Head:
    """The names of a checkpoint's head, and of its parameters in the model of one block."""

    stem: str  # of the blocks' names, such as "model.layers."
    blocks: int  # of the target
    embedding: str  # paths of modules
    norm: str

    def name_of(self, name: str) -> str | None:
        """The name, in the model of one block, of a tensor in the checkpoint. None: the model does not have it."""
        own = f"{self.stem}{self.blocks}."
        if name.startswith(own):
            rest = name.removeprefix(own)
            if rest.startswith(_AS_IN_TARGET):
                return None
            if rest.startswith(f"{_NORM}."):
                return self.norm + rest.removeprefix(_NORM)
            is_input = rest.partition(".")[0] in _INPUTS
            return f"{self.embedding}.{rest}" if is_input else f"{self.stem}0.{rest}"
        if name.startswith((self.stem, f"{self.norm}.")):
            return None
        if name.startswith(f"{self.embedding}."):
            return f"{self.embedding}.tokens{name.removeprefix(self.embedding)}"
        return name


def head_config(config: PreTrainedConfig) -> dict[str, Any]:
    """config: of the target. → the entries of its config.json that are different for a model of its first head. Raises
    ModelRejected."""
    if text_config(config) is not config:
        told = f"{config.model_type} has a language model inside of another model; djinnd reads no heads of such models"
        raise ModelRejected(told, family=config.model_type)
    values: dict[str, Any] = {"num_hidden_layers": 1}
    if hasattr(config, "first_k_dense_replace"):
        values["first_k_dense_replace"] = 0  # the block is of the kind of the target's last one
    for name in _KINDS:
        if kinds := getattr(config, name, None):
            values[name] = [*(getattr(config, f"mtp_{name}", None) or kinds[-1:])][:1]
    return values


def make_head(model: PreTrainedModel, blocks: int, checkpoint: CheckpointFiles) -> Head:
    """Gives a model of one block, on the meta device, the input and the names of a head. `blocks`: of the target.
    Raises ModelRejected if the checkpoint has no head."""
    family, decoder = model.config.model_type, model.get_decoder()
    paths = {module: path for path, module in model.named_modules()}
    embedding, norm = model.get_input_embeddings(), getattr(decoder, "norm", None)
    if not isinstance(embedding, nn.Embedding) or not isinstance(norm, nn.Module):
        told = f"{family} has no embedding and final norm by which djinnd could read a head: leave `part` out"
        raise ModelRejected(told, family=family)
    head = Head(f"{paths[find_blocks(model)]}.", blocks, paths[embedding], paths[norm])
    names = [f"{head.stem}{blocks}.{part}.weight" for part in (*_INPUTS, _NORM)]
    lacking = next((name for name in names if name not in checkpoint.tensors), None)
    if lacking is not None:
        raise ModelRejected(
            f"the checkpoint has no head that predicts several tokens: it lacks tensor {lacking}; leave `part` out, "
            "and name another draft for its target",
            tensor=lacking,
        )
    model.set_input_embeddings(HeadInput(embedding, norm))
    return head


def input_of(model: nn.Module) -> HeadInput | None:
    """The input of a head; None for any other model."""
    return next((module for module in model.modules() if isinstance(module, HeadInput)), None)
