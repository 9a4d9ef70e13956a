"""Experts of a quantised checkpoint are joined to stacks in their code, if it has no scale for a whole matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from djinnd.model.family.recipes.codes import stack_of_codes
from tests.support import quantised as by
from tests.support.open_files import checkpoint_of

EXPERTS = "model.layers.0.mlp.experts"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False, "desc_act": False}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
CASES: list[tuple[by.Coder, dict[str, Any], bool]] = [
    (by.gptq(group=16, is_symmetric=False), GPTQ, True),
    (by.fp8(0, 0, shape=()), {"quant_method": "modelopt", "quant_algo": "FP8"}, True),
    (by.fp8_blocks(16, 16), by.FP8 | {"weight_block_size": [16, 16]}, True),
    (by.fp8_blocks(32, 16), by.FP8 | {"weight_block_size": [32, 16]}, False),  # 48 rows of gate end within a block
    (by.nvfp4(".weight", ".weight_scale_2", divides=False), NVFP4, False),
]


@pytest.mark.parametrize(
    ("coder", "told", "can_join"), CASES, ids=["groups", "matrices", "blocks", "odd blocks", "nvfp4"]
)
def test_experts_are_joined_in_their_code(
    tmp_path: Path, coder: by.Coder, told: dict[str, Any], can_join: bool
) -> None:
    checkpoint = checkpoint_of(by.write_quantised(tmp_path / "m", coder, told, "qwen3-moe"))
    count = sum(name.startswith(EXPERTS) and name.endswith("gate_proj.weight") for name in checkpoint.tensors)
    names = [[f"{EXPERTS}.{expert}.{part}_proj.weight" for expert in range(count)] for part in ("gate", "up")]
    coded = stack_of_codes(checkpoint, names, (count, 96, 64))
    assert (coded is not None) is can_join and count > 1
    if coded is None:
        return
    coding = coded.code.coding
    parts = [torch.empty(count, *part.shape, dtype=part.dtype) for part in coding.parts(96, 64)]
    coded.fill(parts)
    out = torch.empty(count, 96, 64)
    coding.decode(parts, out)
    each = [torch.cat([checkpoint.read(name) for name in pair]) for pair in zip(*names, strict=True)]
    assert torch.equal(out, torch.stack(each))
