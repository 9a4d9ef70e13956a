"""Compares sixteen sessions that join and leave with transformers' generate, in float32, for the types of today."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.families.configurations import CONTEXT, VOCAB
from tests.families.one_family import NEAR_TIE, TOLERANCE, language_logits, reference_model
from tests.support.loaded import Served, random_prompt, small_pages

PROMPTS = (600, 1, 130, 7, 64, 3, 300, 33, 16, 450, 2, 90, 65, 5, 200, 47)  # tokens
ANSWER = 64
STEPS_BETWEEN = 5  # of one session's arrival and the next one's

# Without the wrapper `llama4`: its own generate fails in transformers 5.24. docs/families.md has it.
TYPES = [
    "afmoe", "arcee", "cohere2", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4",
    "falcon", "falcon_h1", "gemma", "gemma2", "gemma3", "gemma3n_text", "gemma4", "gemma4_text", "glm4", "glm4_moe",
    "glm4_moe_lite", "gpt2", "gpt_neox", "gpt_oss", "granite", "granitemoehybrid", "hy_v3", "kimi_linear", "lfm2",
    "lfm2_moe", "llama", "llama4_text", "longcat_flash", "minimax_m2", "ministral3", "mistral", "mistral3", "mixtral",
    "nemotron_h", "olmo2", "olmo3", "olmo_hybrid", "phi", "phi3", "qwen2", "qwen2_moe", "qwen2_5_vl", "qwen3",
    "qwen3_5", "qwen3_5_moe", "qwen3_moe", "qwen3_next", "seed_oss", "smollm3", "stablelm", "starcoder2",
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    "model_type",
    [pytest.param(each, marks=pytest.mark.xdist_group(f"sixteen {index % 8}")) for index, each in enumerate(TYPES)],
)
def test_sixteen_sessions_equal_generate(model_type: str, tmp_path: Path) -> None:
    model = reference_model(model_type)
    model.save_pretrained(tmp_path)
    prompts = [random_prompt(length, VOCAB, seed) for seed, length in enumerate(PROMPTS)]
    with Served(tmp_path, plan=small_pages(400, max_context=CONTEXT), max_batch_tokens=96) as served:
        served.shuffle_pages()
        sessions = []
        for prompt in prompts:
            sessions.append(served.open())
            served.submit(sessions[-1], prompt, max_tokens=ANSWER)
            for _ in range(STEPS_BETWEEN):
                served.step()
        served.run()
        answers = [session.tokens[len(prompt) :] for session, prompt in zip(sessions, prompts, strict=True)]
        reader = served.open()
        logits = served.submit(reader, prompts[0])
        served.run()
        wanted = language_logits(model, prompts[0])
        assert (served.logits_of(logits) - wanted).abs().max() < TOLERANCE * max(1.0, wanted.abs().max().item())
    for prompt, answer in zip(prompts, answers, strict=True):
        generated = generate(model, prompt)
        if answer != generated:
            assert is_near_tie(model, prompt, answer, generated), f"after a prompt of {len(prompt)} tokens"


@torch.inference_mode()
def generate(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """ANSWER greedy tokens, without an end."""
    ids = torch.tensor([prompt])
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=ANSWER, min_new_tokens=ANSWER,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    assert isinstance(found, Tensor)
    answer: list[int] = found[0, len(prompt) :].tolist()
    return answer


def is_near_tie(model: PreTrainedModel, prompt: list[int], answer: list[int], generated: list[int]) -> bool:
    """True if rounding decides between the first two tokens that differ."""
    at = next(index for index, pair in enumerate(zip(answer, generated, strict=True)) if pair[0] != pair[1])
    logits = language_logits(model, prompt + answer[:at])[-1]
    return bool((logits[answer[at]] - logits[generated[at]]).abs() < NEAR_TIE)
