"""Compares families whose blocks differ in their KV with transformers: widths, shared KV, latent attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from djinn_client.protocol.fields.points import Point
from djinnd.device.cpu import CpuDevice
from djinnd.model.step.inputs import StepInputs
from tests.support import reference
from tests.support.checkpoints import random_model
from tests.support.loaded import MEMORY, Served, fill, load_weights, paged_model, random_prompt, small_pages
from tests.support.parameters import long_except

CONTEXT = 512
COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,  # large enough that logits differ
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
ALTERNATING = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
}
GEMMA_4 = {
    **ALTERNATING,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 512,
}
GEMMA_3N = {
    **ALTERNATING,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 512,
    "laurel_rank": 4,
    "num_kv_shared_layers": 2,
    "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.9],
}
LONGCAT = {
    "num_layers": 2,
    "ffn_hidden_size": 96,
    "expert_ffn_hidden_size": 32,
    "moe_topk": 2,
    "n_routed_experts": 4,
    "zero_expert_num": 2,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma 4: two widths": ("gemma4_text", {**GEMMA_4, "num_kv_shared_layers": 0}),
    "gemma 4: shared KV": ("gemma4_text", {**GEMMA_4, "num_kv_shared_layers": 2}),
    "gemma 3n": ("gemma3n_text", GEMMA_3N),
    "mimo-v2-flash": ("mimo_v2_flash", {**EXPERTS, "head_dim": 24, "v_head_dim": 16, **ALTERNATING}),
    "minicpm 3": ("minicpm3", LATENT),
    "deepseek-v2": ("deepseek_v2", {**LATENT, **EXPERTS}),
    "deepseek-v3": ("deepseek_v3", {**LATENT, **EXPERTS}),
    "deepseek-v3.2": ("deepseek_v32", {**LATENT, **EXPERTS}),
    "glm-5": ("glm_moe_dsa", {**LATENT, **EXPERTS, "indexer_types": ["full", "shared"] * 2}),
    "glm-4-moe-lite": ("glm4_moe_lite", {**LATENT, **EXPERTS}),
    "longcat-flash": ("longcat_flash", {**LATENT, **LONGCAT}),
    "youtu": ("youtu", LATENT),
    "sarvam-mla": ("sarvam_mla", {**LATENT, **EXPERTS}),
    "a.x-k1": ("axk1", {**LATENT, **EXPERTS}),
}
KNOWN = {name: given for name, given in FAMILIES.items() if given[0] in CONFIG_MAPPING}
QUICK = ("gemma 4: shared KV", "gemma 3n", "mimo-v2-flash", "deepseek-v3", "glm-5", "longcat-flash")


def config_of(name: str) -> PreTrainedConfig:
    family, given = FAMILIES[name]
    return AutoConfig.for_model(family, **COMMON | given)


@pytest.fixture(params=long_except([name for name in QUICK if name in KNOWN], KNOWN))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return random_model(tmp_path / "model", config_of(request.param))


def test_logits_and_tokens_equal_transformers(folder: Path) -> None:
    lengths = (1, 40, 150)
    with Served(folder, plan=small_pages(80, max_context=CONTEXT), max_batch_tokens=48) as served:
        served.shuffle_pages()
        readers = [served.open() for _ in lengths]
        forwards = [served.submit(s, prompt(n)) for s, n in zip(readers, lengths, strict=True)]
        talker = served.open()
        served.submit(talker, prompt(44), max_tokens=16)
        served.run()
        for session, request in zip(readers, forwards, strict=True):
            wanted = torch.from_numpy(reference.logits(folder, session.tokens))
            assert wanted.std() > 0.1
            torch.testing.assert_close(served.logits_of(request), wanted, rtol=0, atol=1e-4)
    assert talker.tokens[44:] == reference.greedy(folder, prompt(44), 16)


class Replaced:
    """A probe that puts hidden states at the beginning of block 2."""

    points = frozenset({Point("resid", 2)})

    def __init__(self, hidden: Tensor) -> None:
        self.first = 0
        self.hidden = hidden

    def at(self, point: Point, value: Tensor) -> None:
        value.copy_(self.hidden)


@pytest.mark.parametrize("name", ["gemma 4: shared KV", "gemma 3n"])
def test_a_step_may_begin_behind_the_block_that_stores_shared_kv(name: str, tmp_path: Path) -> None:
    """A row that was stopped at a breakpoint goes on in a step in which no block has stored its keys and values."""
    device = CpuDevice(MEMORY)
    weights = load_weights(random_model(tmp_path / "model", config_of(name)), device)
    model = paged_model(weights, 4, 16)
    inputs = StepInputs(device, 20, 1, 2)
    fill(inputs, [(prompt(20), 0, [2, 1])], 16)
    inputs.send()
    batch = inputs.paged_batch(max_query=20, max_kv=20, fresh=True)
    whole = model.forward(inputs, batch)
    parked = model.forward(inputs, batch, blocks=range(2)).clone()
    assert torch.equal(model.forward(inputs, batch, probe=Replaced(parked), blocks=range(2, 4)), whole)
    weights.release(device)
    device.close()


def prompt(length: int) -> list[int]:
    return random_prompt(length, 512, seed=2)
