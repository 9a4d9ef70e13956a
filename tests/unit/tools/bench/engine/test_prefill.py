"""The figures of a prompt's computation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tools.bench.engine.ceilings import Ceilings
from tools.bench.engine.prefill import multiplied_weights, row, summary


def test_only_matrices_that_each_token_is_multiplied_by_count(tmp_path: Path) -> None:
    shapes = {
        "model.embed_tokens.weight": (100, 8),
        "lm_head.weight": (100, 8),
        "model.layers.0.mlp.up.weight": (16, 8),
    }
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    save_file(tensors | {"model.layers.0.norm.weight": torch.zeros(8)}, tmp_path / "model.safetensors")
    assert multiplied_weights(tmp_path) == 16 * 8


def test_the_limit_has_products_and_attention() -> None:
    ceilings = Ceilings(products=1e12, attention={1000: 0.01})
    found = row(1000, 0.5, 100_000_000, 2, ceilings)
    assert found["limit_s"] == pytest.approx(0.2 + 0.02)
    assert found["products"] == pytest.approx(0.4)
    told = "1,000 tokens in 500.0 ms, 0.40 of the rate of large products, 2.27 times the limit"
    assert summary({1000: found}) == told
