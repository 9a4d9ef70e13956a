from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tools.bench.serving.stored import active_bytes


def test_a_token_reads_its_share_of_the_experts_and_no_embedding(tmp_path: Path) -> None:
    config = {"num_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {
        "model.embed_tokens.weight": torch.zeros(100, 4),
        "lm_head.weight": torch.zeros(100, 4),
        "model.layers.0.mlp.experts.0.up_proj.weight": torch.zeros(16, 4, dtype=torch.uint8),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    assert active_bytes(tmp_path) == 100 * 4 * 4 + 16 * 4 // 4
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    assert active_bytes(tmp_path) == 2 * 100 * 4 * 4 + 16 * 4
