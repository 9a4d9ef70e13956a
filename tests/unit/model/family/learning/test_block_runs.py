from __future__ import annotations

from collections import Counter

import torch
from transformers import AutoConfig, PreTrainedConfig

from djinnd.model.family.skeleton import Skeleton, build
from tests.support.models import reduced_model
from tests.support.open_files import read_config


def runs_by_block(config: PreTrainedConfig) -> tuple[Skeleton, Counter[int]]:
    model, runs = build(config, torch.float32), Counter[int]()
    for index, block in enumerate(model.model.layers):
        block.register_forward_pre_hook(lambda *_, index=index: runs.update([index]))
    return Skeleton(model), runs


def test_blocks_of_one_kind_are_run_once() -> None:
    skeleton, runs = runs_by_block(read_config(reduced_model("llama-2")))
    assert set(runs) == {0}
    assert [(each.block, each.path) for each in skeleton.attentions] == [(n, "self_attn") for n in range(4)]
    assert len(set(skeleton.kv)) == 1 and len(skeleton.kv) == 4


def test_a_block_of_another_kind_is_run() -> None:
    config = AutoConfig.from_pretrained(reduced_model("qwen3-moe"), mlp_only_layers=[2])
    skeleton, runs = runs_by_block(config)
    assert set(runs) == {0, 2}
    assert [each.block for each in skeleton.attentions] == [0, 1, 2, 3]
