"""The content of a shape's weight files: the tensors' names, sizes and dtypes, laid out as on the hub.

| family  | differs from transformers' module tree                                                        |
|---------|-----------------------------------------------------------------------------------------------|
| mixtral | one matrix an expert: block_sparse_moe.experts.E.w1, w3 and w2, and block_sparse_moe.gate     |
| gpt2    | no `transformer.` before the names; a causal mask a block                                     |
| neox    | a causal mask a block, of booleans                                                            |
| llama-2 | rope frequencies a block                                                                      |
| all     | a tied head is not stored                                                                     |
| glm     | one more block behind the last, with the parameters of a head that predicts several tokens    |

Published heads also have copies of the embedding and of lm_head, which no reader needs. They are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from tools.checkpoints.shapes.shape import Config, Shape

_MASKS = {"gpt2": ("h.{}.attn.bias", torch.float32), "gpt_neox": ("gpt_neox.layers.{}.attention.bias", torch.bool)}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One entry of a weight file."""

    name: str
    size: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize


def stored_tensors(shape: Shape, config: Config, dtype: torch.dtype) -> list[StoredTensor]:
    """Every tensor of the checkpoint, in the order of the files. Allocates no weights."""
    model = empty_model(config)
    # An untied head is a parameter of its own; a tied one is the embedding again.
    tied = set(model.all_tied_weights_keys)
    parameters = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    stored = revert_weight_conversion(model, parameters)
    prefix = f"{model.base_model_prefix}." if config["model_type"] == "gpt2" else ""
    tensors = [StoredTensor(name.removeprefix(prefix), tuple(tensor.shape), dtype) for name, tensor in stored.items()]
    return tensors + list(_head(config, tensors)) + list(_leftovers(shape, model.config, dtype))


def empty_model(config: Config) -> PreTrainedModel:
    """transformers' model of `config` on the meta device."""
    entries = {key: value for key, value in config.items() if key != "model_type"}
    parsed = AutoConfig.for_model(config["model_type"], **entries)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(parsed)
    return model


def shards(tensors: Sequence[StoredTensor], shard_bytes: int) -> list[list[StoredTensor]]:
    """Cut the list, in order, into runs of at most `shard_bytes`; a larger tensor has a shard of its own."""
    runs: list[list[StoredTensor]] = [[]]
    used = 0
    for tensor in tensors:
        if runs[-1] and used + tensor.nbytes > shard_bytes:
            runs.append([])
            used = 0
        runs[-1].append(tensor)
        used += tensor.nbytes
    return runs


def _head(config: Config, tensors: Sequence[StoredTensor]) -> Iterator[StoredTensor]:
    """The tensors of a head that predicts several tokens: a block like the last one, two norms and a projection before
    it, and a norm behind it. None for a model without a head."""
    if not config.get("num_nextn_predict_layers"):
        return
    width, blocks, dtype = config["hidden_size"], config["num_hidden_layers"], tensors[0].dtype
    last, head = f"model.layers.{blocks - 1}.", f"model.layers.{blocks}."
    for tensor in tensors:
        if tensor.name.startswith(last):
            yield replace(tensor, name=head + tensor.name.removeprefix(last))
    yield StoredTensor(f"{head}eh_proj.weight", (width, 2 * width), dtype)
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        yield StoredTensor(f"{head}{norm}.weight", (width,), dtype)


def _leftovers(shape: Shape, config: PreTrainedConfig, dtype: torch.dtype) -> Iterator[StoredTensor]:
    """Buffers of old modules that the hub's files still hold and every loader must pass over."""
    for block_idx in range(config.num_hidden_layers):
        if shape.leftovers == "causal masks":
            name, stored = _MASKS[config.model_type]
            size = (1, 1, config.max_position_embeddings, config.max_position_embeddings)
            yield StoredTensor(name.format(block_idx), size, stored)
        elif shape.leftovers == "rope frequencies":
            head_dim = config.hidden_size // config.num_attention_heads
            yield StoredTensor(f"model.layers.{block_idx}.self_attn.rotary_emb.inv_freq", (head_dim // 2,), dtype)
