"""Results of transformers for a checkpoint: greedy tokens and logits, in float32 on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.daemon import THREADS

NEAR_TIE = 2e-5  # of logits: the order of float32 sums changes them by a tenth of this

torch.set_num_threads(int(THREADS))


@functools.lru_cache(maxsize=1)
def model_of(folder: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = None  # like ignore_eos in the daemon
    model.generation_config.pad_token_id = 0
    return model.eval()


def greedy(folder: Path, prompt: Sequence[int], new_tokens: int, told: Sequence[int] = ()) -> list[int]:
    """The tokens that `generate` continues with. The prompt must lead to no near-tie, which rounding would decide.

    `told`: a candidate for the answer. If each of its tokens is the likeliest after the tokens before it, it is the
    answer. One pass over the whole sequence checks that, in a twentieth of the time.
    """
    if len(told) == new_tokens > 0 and _likeliest(logits(folder, [*prompt, *told[:-1]])[-new_tokens:]) == list(told):
        return list(told)
    return list(_generated(folder, tuple(prompt), new_tokens))


@functools.lru_cache(maxsize=1024)  # tests of one file ask for the same again and again
def _generated(folder: Path, prompt: tuple[int, ...], new_tokens: int) -> tuple[int, ...]:
    tokens = torch.tensor([prompt])
    with torch.inference_mode():
        whole = model_of(folder).generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=new_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    found = whole.sequences[0, len(prompt) :].tolist()
    assert _likeliest(torch.cat(whole.logits).numpy()) == found
    return tuple(found)


def _likeliest(logits: npt.NDArray[np.float32]) -> list[int]:
    """The likeliest token of each row."""
    likeliest, second = torch.from_numpy(logits).topk(2)[0].unbind(dim=1)
    nearest = (likeliest - second).min().item()
    assert nearest > NEAR_TIE, f"two tokens whose logits differ by {nearest:.1g}: take another prompt"
    found: list[int] = logits.argmax(axis=1).tolist()
    return found


def logits(folder: Path, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    """float32 [tokens, vocab]."""
    with torch.inference_mode():
        return model_of(folder)(torch.tensor([tokens])).logits[0].numpy()
