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

from .layout import StoredTensor
from .shapes import Config
from .tokenizer import END_OF_TEXT_ID

ROW_SPREAD = 0.35
NORM_NOISE = 0.05
BIAS_NOISE = 0.02
ROPE_BASE = 10000.0


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
        """In host memory."""
        if tensor.name.endswith(".attn.bias"):
            return torch.ones(tensor.size, dtype=tensor.dtype).tril()
        if tensor.name.endswith(".rotary_emb.inv_freq"):
            return (ROPE_BASE ** -(torch.arange(tensor.size[0]) / tensor.size[0])).to(tensor.dtype)
        generator = torch.Generator(self.device).manual_seed(self._seed_of(tensor.name))
        values = torch.empty(tensor.size, dtype=tensor.dtype, device=self.device)
        values.normal_(*self._mean_and_deviation(tensor), generator=generator)
        if self._gives_logits(tensor):
            if values.dim() == 2:
                values *= _row_factors(tensor, generator)
            values[END_OF_TEXT_ID] = 0
        return values.cpu()

    def _mean_and_deviation(self, tensor: StoredTensor) -> tuple[float, float]:
        if len(tensor.size) == 1:
            return (0.0, BIAS_NOISE) if tensor.name.endswith("bias") else (1.0, NORM_NOISE)
        # GPT-2's block matrices lie [inputs, outputs], all others [outputs, inputs].
        transposed = self.config["model_type"] == "gpt2" and tensor.name.startswith("h.")
        inputs = tensor.size[0] if transposed else tensor.size[-1]
        return 0.0, (1.0 if self._gives_logits(tensor) else self.gain) / inputs**0.5

    def _gives_logits(self, tensor: StoredTensor) -> bool:
        """Whether its first dimension is the vocabulary on the way out."""
        tied = self.config.get("tie_word_embeddings", True)
        return tensor.name.endswith(("lm_head.weight", "lm_head.bias")) or (tied and tensor.name.endswith("wte.weight"))

    def _seed_of(self, name: str) -> int:
        digest = hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=7).digest()
        return int.from_bytes(digest, "little")


def _row_factors(tensor: StoredTensor, generator: torch.Generator) -> Tensor:
    """[rows, 1]: log-normal."""
    factors = torch.empty(tensor.size[0], 1, dtype=torch.float32, device=generator.device)
    return factors.log_normal_(0.0, ROW_SPREAD, generator=generator).to(tensor.dtype)
