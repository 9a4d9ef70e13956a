"""What transformers itself makes of a checkpoint: greedy tokens and logits in float32 on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.daemon import THREADS

torch.set_num_threads(int(THREADS))


@functools.lru_cache(maxsize=1)
def model_of(folder: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # what the daemon's ignore_eos does
    model.generation_config.pad_token_id = 0
    return model.eval()


def greedy(folder: Path, prompt: Sequence[int], new_tokens: int) -> list[int]:
    """What `generate` goes on with."""
    with torch.inference_mode():
        tokens = torch.tensor([prompt])
        whole = model_of(folder).generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new_tokens, do_sample=False
        )
    return whole[0, len(prompt) :].tolist()


def logits(folder: Path, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    """float32 [tokens, vocab]."""
    with torch.inference_mode():
        return model_of(folder)(torch.tensor([tokens])).logits[0].numpy()
