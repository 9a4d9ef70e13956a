from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    CohereConfig,
    GPTBigCodeConfig,
    GraniteMoeSharedConfig,
    NanoChatConfig,
    OPTConfig,
    PreTrainedConfig,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from djinn_client.protocol.fields.points import PointMap
from djinnd.model.family.learning.point_map import learn_points
from djinnd.model.family.skeleton import Skeleton, build
from tests.support.models import FAMILIES, reduced_model
from tests.support.open_files import read_config
from tests.unit.model.family.test_skeleton import SMALL

LLAMA = ("model.layers", "self_attn", "mlp", "model.norm", "lm_head")
NAMES = dict.fromkeys(FAMILIES, LLAMA) | {
    "gpt2": ("transformer.h", "attn", "mlp", "transformer.ln_f", "lm_head"),
    "gpt-j": ("transformer.h", "attn", "mlp", "transformer.ln_f", "lm_head"),
    "gpt-neox": ("gpt_neox.layers", "attention", "mlp", "gpt_neox.final_layer_norm", "lm_head"),
    "opt": ("model.decoder.layers", "self_attn", "fc2", "model.decoder.final_layer_norm", "lm_head"),
    "falcon-7b": ("transformer.h", "self_attention", "mlp", "transformer.ln_f", "lm_head"),
    "falcon-40b": ("transformer.h", "self_attention", "mlp", "transformer.ln_f", "lm_head"),
    "gemma-2": (*LLAMA[:-1], ""),  # it caps the logits
}


def points_of(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> PointMap:
    return Skeleton(build(config, dtype)).points


def names(points: PointMap) -> tuple[str, ...]:
    return points.layers, points.attention, points.mlp, points.norm, points.head


def small(kind: type[PreTrainedConfig], **entries: Any) -> PreTrainedConfig:
    return kind(**{**SMALL, **entries})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_points_of_each_family_are_found(family: str, dtype: torch.dtype) -> None:
    points = points_of(read_config(reduced_model(family)), dtype)
    assert names(points) == NAMES[family]
    assert (points.blocks, points.width, points.vocab) == (4, 64, 512)


def test_dense_blocks_and_experts_may_have_one_name() -> None:
    config = AutoConfig.from_pretrained(reduced_model("qwen3-moe"), mlp_only_layers=[1])
    assert points_of(config).mlp == "mlp"


def test_a_name_that_differs_between_blocks_is_no_point() -> None:
    skeleton = Skeleton(build(read_config(reduced_model("llama-2")), torch.float32))
    other = skeleton.adapter.blocks[2]
    other.ffn = other._modules.pop("mlp")
    other.__class__ = _Renamed
    points = learn_points(skeleton.adapter, "model.layers", 512)
    assert (points.attention, points.mlp) == ("self_attn", "")


class _Renamed(LlamaDecoderLayer):
    """A layer with a renamed MLP, which its forward finds under the old name."""

    @property
    def mlp(self) -> nn.Module:
        return self.get_submodule("ffn")


def test_an_mlp_of_two_modules_is_no_point() -> None:
    config = small(GraniteMoeSharedConfig, shared_intermediate_size=32, num_local_experts=4)
    assert names(points_of(config)) == ("model.layers", "self_attn", "", "model.norm", "")
    one = small(GraniteMoeSharedConfig, shared_intermediate_size=0, num_local_experts=4)
    assert points_of(one).mlp == "block_sparse_moe"


def test_a_norm_that_runs_twice_is_no_point() -> None:
    """NanoChat's final norm is also that of its embeddings."""
    assert points_of(small(NanoChatConfig)).norm == ""


def test_a_model_without_a_final_norm_has_no_norm_point() -> None:
    config = small(OPTConfig, ffn_dim=64, do_layer_norm_before=False, word_embed_proj_dim=16)
    points = points_of(config)
    assert (points.norm, points.head, points.mlp) == ("", "lm_head", "fc2")


def test_a_head_with_a_scaled_output_is_no_point() -> None:
    assert points_of(small(CohereConfig, logit_scale=0.5)).head == ""


def test_a_family_that_cannot_run_on_the_meta_device_has_only_points_between_blocks() -> None:
    skeleton = Skeleton(build(small(GPTBigCodeConfig), torch.float32))
    assert names(skeleton.points) == ("transformer.h", "attn", "mlp", "transformer.ln_f", "lm_head")

    def refuse(*_: object) -> None:
        raise RuntimeError("no values")

    for module in (*skeleton.adapter.blocks, skeleton.model.transformer.ln_f):
        module.register_forward_pre_hook(refuse)
    points = learn_points(skeleton.adapter, "transformer.h", 64)
    assert names(points) == ("transformer.h", "", "", "", "")
    assert list(points.names())[-3:] == ["blocks.1.hook_resid_pre", "blocks.1.hook_resid_post", "logits"]


@pytest.mark.parametrize("family", ["llama-2", "mixtral"])
def test_learning_leaves_nothing_behind(family: str) -> None:
    skeleton = Skeleton(build(read_config(reduced_model(family)), torch.float32))
    for root in (skeleton.model, *skeleton.adapter.blocks):
        for module in root.modules():
            assert not module._forward_hooks and not module._forward_pre_hooks
            assert not {"paged", "forward"} & set(module.__dict__)
