"""GgufRecipes: how each parameter is made from the tensors of a GGUF file.

GGUF has names of its own for the tensors of all families, and llama.cpp changes some of them when it writes a file:

    rows of q and k           llama.cpp rotates neighbours (2i, 2i+1), transformers halves (i, i + d/2): reordered
    norms of Gemma            stored as w + 1
    experts                   gate and up are two stacks, where transformers has one with the rows of both
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from djinn_client.errors import ModelRejected
from djinnd.weights.checkpoint import wrong_shape
from djinnd.weights.forms.coded_form import Code, Coded
from djinnd.weights.gguf.checkpoint import GgufCheckpoint
from djinnd.weights.store import Recipe

# transformers' module in a block → GGUF's module in a block
_BLOCK = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_STACKS = {
    "mlp.experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),
    "mlp.experts.down_proj": ("ffn_down_exps",),
}
_REST = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}

_HALVES = frozenset({"llama", "granite", "smollm3"})  # architectures with reordered rows of q and k
_PLUS_ONE = frozenset({"gemma", "gemma2", "gemma3"})

_IN_BLOCK = re.compile(r"model\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class Source:
    """The tensors of one parameter. Several are joined along the rows of each expert."""

    tensors: tuple[str, ...]
    heads: int = 0  # > 0: the rows of each of so many heads are reordered
    minus: float = 0.0


class GgufRecipes:
    """The recipes of all parameters, with the interface of RecipeBook."""

    def __init__(self, config: PreTrainedConfig, checkpoint: GgufCheckpoint) -> None:
        self._config = config
        self._checkpoint = checkpoint

    def require(self, shapes: Mapping[str, tuple[int, ...]], tied: dict[str, list[str]]) -> None:
        """Raises ModelRejected if a parameter has no tensor, or one that cannot be read or has another shape. A file
        has a tied parameter once, under its first name."""
        for name, shape in shapes.items():
            source = self.source(name)
            stored: list[tuple[int, ...]] = []
            for tensor in source.tensors:
                if tensor not in self._checkpoint.tensors:
                    raise ModelRejected(f"the GGUF file lacks tensor {tensor} ({name})", tensor=tensor, missing=1)
                self._checkpoint.check_readable(tensor)
                stored.append(self._checkpoint.tensors[tensor].shape)
            if len(stored) > 1:
                rows = sum(each[-2] for each in stored if len(each) == 3)
                joined = (*stored[0][:-2], rows, *stored[0][-1:])
            else:
                joined = stored[0]
            if joined != shape and (1, *joined) != shape:
                raise wrong_shape(name, joined, shape)

    def source(self, name: str) -> Source:
        """The tensors of a parameter. Raises ModelRejected if GGUF has no name for it."""
        module, _, leaf = name.rpartition(".")
        architecture = self._checkpoint.architecture
        minus = 1.0 if architecture in _PLUS_ONE and name.endswith("norm.weight") else 0.0
        if module in _REST:
            return Source((f"{_REST[module]}.{leaf}",), minus=minus)
        found = _IN_BLOCK.fullmatch(name)
        if found is not None:
            block, inside = found.groups()
            if inside in _STACKS:
                return Source(tuple(f"blk.{block}.{each}.weight" for each in _STACKS[inside]))
            module = inside.rpartition(".")[0]
            norms = _GEMMA_NORMS if architecture in ("gemma2", "gemma3") else {}
            known = norms.get(module) or _BLOCK.get(module)
            if known is not None:
                return Source((f"blk.{block}.{known}.{leaf}",), self._heads(known), minus)
        raise ModelRejected(f"GGUF has no name for the parameter {name} of {self._config.model_type}", tensor=name)

    def _heads(self, module: str) -> int:
        if self._checkpoint.architecture not in _HALVES:
            return 0
        if module == "attn_q":
            return int(self._config.num_attention_heads)
        return int(self._config.num_key_value_heads) if module == "attn_k" else 0

    def recipe(self, name: str) -> Recipe:
        """A function that fills a view with the parameter's numbers."""
        source = self.source(name)
        if len(source.tensors) > 1:
            return partial(self._join, source.tensors)
        if source.heads or source.minus:
            return partial(self._change, source)
        return partial(self._fill, source.tensors[0])

    def coded(self, name: str, shape: tuple[int, ...]) -> Coded | None:
        """The parameter of this shape in the format of its tensors; None if it is plain or has to be changed."""
        source = self.source(name)
        codings = {self._checkpoint.coding(tensor) for tensor in source.tensors}
        (coding,) = codings if len(codings) == 1 else (None,)
        if coding is None or source.minus or len(shape) < 2:
            return None
        if len(source.tensors) > 1:
            return Coded(Code(coding), partial(self._join_codes, source.tensors))
        return Coded(Code(coding), partial(self._read_codes, source))

    def _read_codes(self, source: Source, parts: Sequence[Tensor]) -> None:
        self._checkpoint.read_parts(source.tensors[0], parts)
        if source.heads:  # a block of codes lies within one row, so rows can be moved as they are
            (blocks,) = parts
            blocks.copy_(blocks[:, row_order(blocks.shape[1], source.heads)])

    def _join_codes(self, tensors: tuple[str, ...], parts: Sequence[Tensor]) -> None:
        (blocks,), row = parts, 0
        for tensor in tensors:
            rows = self._checkpoint.tensors[tensor].shape[-2]
            read = torch.empty((len(blocks), rows, blocks.shape[2]), dtype=torch.uint8)
            self._checkpoint.read_parts(tensor, [read])
            blocks[:, row : row + rows].copy_(read)
            row += rows

    def _fill(self, tensor: str, view: Tensor) -> None:
        self._checkpoint.read_into(tensor, view.view(self._checkpoint.tensors[tensor].shape))

    def _change(self, source: Source, view: Tensor) -> None:
        read = torch.empty(view.shape, dtype=torch.float32 if source.minus else view.dtype)
        self._checkpoint.read_into(source.tensors[0], read)
        view.copy_(read[row_order(len(read), source.heads)] if source.heads else read - source.minus)

    def _join(self, tensors: tuple[str, ...], view: Tensor) -> None:
        row = 0
        for tensor in tensors:
            shape = self._checkpoint.tensors[tensor].shape
            read = torch.empty(shape, dtype=view.dtype)
            self._checkpoint.read_into(tensor, read)
            view[:, row : row + shape[1]].copy_(read)
            row += shape[1]


def row_order(rows: int, heads: int) -> Tensor:
    """The rows of a GGUF tensor in the order of transformers: int64 [rows]. A head's neighbours become its halves."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).reshape(-1)
