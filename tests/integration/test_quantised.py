"""Quantised checkpoints: the daemon's tokens are those of transformers with the decoded weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import DeepseekV3Config, GptOssConfig

import djinn_client as djinn
from tests.conftest import DaemonStarter
from tests.support import quantised as by
from tests.support import reference
from tests.support.checkpoints import random_model
from tests.support.daemon import Daemon

PROMPT = [5, 9, 2, 77, 31, 8]
NEW = 16


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with DaemonStarter() as start:
        yield start(errors=["model_failed"])


MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": True}
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": {"weights": INT4}}}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def small_gpt_oss(folder: Path) -> Path:
    """MXFP4 needs widths of 32 columns."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    return random_model(folder, GptOssConfig(**sizes, **heads))


def small_deepseek(folder: Path) -> Path:
    sizes = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16}
    latent = {"q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 16, "vocab_size": 512, "first_k_dense_replace": 1}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    return random_model(folder, DeepseekV3Config(**sizes, **heads, **latent, **experts))


def served(daemon: Daemon, folder: Path) -> list[int]:
    """The daemon's tokens, which are also those of transformers with the decoded weights."""
    with djinn.Session(str(folder), address=daemon.address) as s:
        tokens = s.generate(PROMPT, max_tokens=NEW, ignore_eos=True).token_ids
    with daemon.client() as client:
        client.unload(str(folder))
    assert tokens == reference.greedy(folder / "plain", PROMPT, NEW, tokens)
    return tokens


MODELOPT = (by.nvfp4(".weight", ".weight_scale_2", divides=False), NVFP4, "llama-3.1", "modelopt nvfp4 (groups of 16)")


@pytest.mark.parametrize(
    ("coder", "told", "family", "words"),
    [
        (by.fp8_blocks(), by.FP8, "llama-2", "fp8 (128 x 128 blocks)"),
        (by.pack_quantized(group=16), PACKED, "qwen3-moe", "compressed-tensors int4 (groups of 16)"),
        (by.gptq(is_symmetric=False, is_sorted=True), GPTQ, "qwen3", "gptq int4 (groups of 32)"),
        pytest.param(by.awq(), AWQ, "qwen2", "awq int4 (groups of 32)", marks=pytest.mark.long),
        pytest.param(*MODELOPT, marks=pytest.mark.long),
    ],
    ids=["fp8", "packed", "gptq", "awq", "nvfp4"],
)
def test_a_quantised_checkpoint_is_served_by_its_folder(
    daemon: Daemon, tmp_path: Path, coder: by.Coder, told: dict[str, Any], family: str, words: str
) -> None:
    folder = by.write_quantised(tmp_path / "m", coder, told, family)
    with daemon.client() as client:
        notes = client.plan(str(folder)).notes
    assert words in notes and any(note.startswith("weights as they are stored: ") for note in notes)
    served(daemon, folder)


def test_transformers_decodes_fp8_of_deepseek_as_the_daemon_does(daemon: Daemon, tmp_path: Path) -> None:
    told, source = by.FP8 | {"weight_block_size": [16, 16]}, small_deepseek(tmp_path / "source")
    folder = by.write_quantised(tmp_path / "m", by.fp8_blocks(16, 16), told, source)
    tokens = served(daemon, folder)
    assert tokens == reference.greedy(folder, PROMPT, NEW, tokens)


def test_transformers_decodes_mxfp4_of_gpt_oss_as_the_daemon_does(daemon: Daemon, tmp_path: Path) -> None:
    source = small_gpt_oss(tmp_path / "source")
    folder = by.write_quantised(tmp_path / "m", by.mxfp4_experts, MXFP4, source, "_proj")
    tokens = served(daemon, folder)
    assert tokens == reference.greedy(folder, PROMPT, NEW, tokens)


def test_a_method_that_is_not_served_is_refused_by_its_name(daemon: Daemon, tmp_path: Path) -> None:
    folder = by.write_quantised(tmp_path / "m", by.fp8_blocks(), {"quant_method": "bitsandbytes", "load_in_4bit": True})
    with (
        daemon.client() as client,
        pytest.raises(djinn.ModelRejected, match=r"quantised by bitsandbytes, .*served are"),
    ):
        client.load(str(folder))
