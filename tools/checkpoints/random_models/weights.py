"""Random values for a checkpoint's tensors, such that the model behaves: finite, varied, with clear greedy choices.

A matrix has the deviation gain / sqrt(inputs), so each block's branches stay near unit size whatever the width; that
is about 0.02 at the widths of real models. The gain trades variety against sensitivity: tried on 40 blocks, bf16 and
float64 agree on 95 % of the greedy choices at 1.0, on 53 % at 2.0; four blocks need 1.5 or more, or greedy decoding
soon repeats itself. A token's row in the head is scaled by a factor of its own, which spreads the logits: the largest
then ties with the next in bf16 half as often. The end-of-text row is zero, so greedy decoding does not end by itself.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from tools.checkpoints.random_models.coded import coded_values
from tools.checkpoints.random_models.layout import StoredTensor
from tools.checkpoints.shapes.shape import Config
from tools.checkpoints.tokenizer import END_OF_TEXT_ID

ROW_SPREAD = 0.35
NORM_NOISE = 0.05
BIAS_NOISE = 0.02
ROPE_BASE = 10000.0

_HEADS = ("lm_head.weight", "lm_head.bias", "embed_out.weight")
_EMBEDDINGS = ("wte.weight", "embed_tokens.weight", "word_embeddings.weight")
_NORMS_AROUND_0 = ("gemma2", "gemma3_text", "qwen3_5_moe_text")  # they multiply by 1 + weight, but gated norms do not
_NORMS_BEHIND_MATRICES = ("gemma2", "gemma3_text", "olmo2")


@dataclass(frozen=True, slots=True)
class RandomWeights:
    """The values of every tensor of one checkpoint.

    They follow from the seed, the tensor's name, size and dtype, and the kind of device; not from the other tensors or
    the shards.
    """

    config: Config
    gain: float
    seed: int
    device: torch.device

    def values(self, tensor: StoredTensor) -> Tensor:
        """On the device."""
        if tensor.name.endswith((".attn.bias", ".attention.bias")):
            return torch.ones(tensor.size, dtype=tensor.dtype, device=self.device).tril()
        if tensor.name.endswith(".rotary_emb.inv_freq"):
            return (ROPE_BASE ** -(torch.arange(tensor.size[0]) / tensor.size[0])).to(self.device, tensor.dtype)
        generator = torch.Generator(self.device).manual_seed(self._seed_of(tensor.name))
        if (coded := coded_values(tensor, self.gain, generator)) is not None:
            return coded
        values = torch.empty(tensor.size, dtype=tensor.dtype, device=self.device)
        values.normal_(*self._mean_and_deviation(tensor), generator=generator)
        if self._gives_logits(tensor):
            if values.dim() == 2:
                values *= _row_factors(tensor, generator)
            values[END_OF_TEXT_ID] = 0
        return values

    def _mean_and_deviation(self, tensor: StoredTensor) -> tuple[float, float]:
        if tensor.name.endswith(".sinks"):  # logits
            return 0.0, 1.0
        if tensor.name.endswith("bias"):
            return 0.0, BIAS_NOISE
        if len(tensor.size) == 1:
            return self._norm_factor(tensor.name), NORM_NOISE
        inputs = tensor.size[-2] if self._lies_transposed(tensor) else tensor.size[-1]
        return 0.0, (1.0 if self._gives_logits(tensor) else self.gain) / inputs**0.5

    def _norm_factor(self, name: str) -> float:
        """Its mean. Behind a matrix a norm decides what the matrix's gain decides in other families: the size of a
        branch, the spread of the scores."""
        family, norm = self.config["model_type"], name.split(".")[-2]
        factor = 1.0
        if family in _NORMS_BEHIND_MATRICES:
            factor = self.gain if norm.startswith("post_") else self.gain**0.5 if norm in ("q_norm", "k_norm") else 1.0
        is_around_0 = family in _NORMS_AROUND_0 and ".linear_attn." not in name
        return factor - (1.0 if is_around_0 else 0.0)

    def _lies_transposed(self, tensor: StoredTensor) -> bool:
        """[inputs, outputs] as in GPT-2's blocks and gpt-oss's experts; all others are [outputs, inputs]."""
        family = self.config["model_type"]
        return (family == "gpt2" and tensor.name.startswith("h.")) or (family == "gpt_oss" and len(tensor.size) == 3)

    def _gives_logits(self, tensor: StoredTensor) -> bool:
        """Whether its first dimension is the vocabulary on the way out."""
        tied = self.config.get("tie_word_embeddings", True)
        return tensor.name.endswith(_HEADS) or (tied and tensor.name.endswith(_EMBEDDINGS))

    def _seed_of(self, name: str) -> int:
        digest = hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=7).digest()
        return int.from_bytes(digest, "little")


def _row_factors(tensor: StoredTensor, generator: torch.Generator) -> Tensor:
    """[rows, 1]: log-normal."""
    factors = torch.empty(tensor.size[0], 1, dtype=torch.float32, device=generator.device)
    return factors.log_normal_(0.0, ROW_SPREAD, generator=generator).to(tensor.dtype)
