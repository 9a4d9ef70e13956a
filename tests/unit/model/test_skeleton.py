from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BloomConfig,
    DeepseekV3Config,
    DogeConfig,
    FalconConfig,
    GemmaConfig,
    Lfm2Config,
    Llama4TextConfig,
    MambaConfig,
    PreTrainedConfig,
)

from djinn_client.errors import ModelRejected
from djinnd.model.skeleton import Skeleton, bind, build, materialise_buffers, read_config
from tests.support.models import FAMILIES, reduced_model

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "pad_token_id": 0,
}


def skeleton_of(config: PreTrainedConfig) -> Skeleton:
    return Skeleton(build(config, torch.float32))


# --- configurations -------------------------------------------------------------------------------------------------


def config_folder(tmp_path: Path, **entries: Any) -> Path:
    config = json.loads((reduced_model("llama-2") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | entries))
    return tmp_path


def test_a_family_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRejected, match=r"config\.json: .*borogove"):
        read_config(config_folder(tmp_path, model_type="borogove"))


def test_code_of_the_checkpoint_s_own_is_not_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "configuration_own.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass OwnConfig: pass\n")
    config_folder(tmp_path, model_type="own", auto_map={"AutoConfig": "configuration_own.OwnConfig"})
    with pytest.raises(ModelRejected, match=r"config\.json"):
        read_config(tmp_path)
    assert not ran.exists()


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_frequencies_that_depend_on_the_batch_are_refused(tmp_path: Path, rope_type: str) -> None:
    rope = {"rope_type": rope_type, "factor": 2.0, "long_factor": [1.0] * 8, "short_factor": [1.0] * 8}
    with pytest.raises(ModelRejected, match=f"llama with {rope_type} RoPE is refused"):
        read_config(config_folder(tmp_path, rope_scaling=rope))


@pytest.mark.parametrize("rope_type", ["linear", "llama3"])
def test_other_frequencies_are_served(tmp_path: Path, rope_type: str) -> None:
    rope = {"rope_type": rope_type, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 256
    assert read_config(config_folder(tmp_path, rope_scaling=rope)).model_type == "llama"


def test_a_quantised_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = config_folder(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ModelRejected, match="quantised checkpoints are not served"):
        read_config(folder)


# --- families that cannot be served ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4), "bloom does not use .* attention interface"),
        (FalconConfig(**SMALL), "falcon does not use .* attention interface"),
        (MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2), "mamba does not use .* attention interface"),
        (BertConfig(**SMALL), "attention of bert wants .*: attention to later tokens"),
        (DogeConfig(**SMALL, num_key_value_heads=2), "attention of doge wants .*: a mask of its own"),
        (Lfm2Config(**SMALL, layer_types=["conv", "full_attention"]), "block 0 of lfm2 never called the attention"),
        (DeepseekV3Config(**SMALL), "deepseek_v3 has blocks with different shapes of K and V"),
        (
            Llama4TextConfig(**SMALL, num_key_value_heads=2, head_dim=8, num_local_experts=2, intermediate_size_mlp=64),
            "llama4_text wants .*: chunked_attention by a mask",
        ),
    ],
    ids=lambda value: value.model_type if isinstance(value, PreTrainedConfig) else "",
)
def test_what_would_answer_and_be_wrong_is_refused_by_name(config: PreTrainedConfig, reason: str) -> None:
    with pytest.raises(ModelRejected, match=reason) as told:
        skeleton_of(config)
    assert told.value.data == {"family": config.model_type}


# --- what is learnt -------------------------------------------------------------------------------------------------


@pytest.fixture(params=FAMILIES)
def config(request: pytest.FixtureRequest) -> PreTrainedConfig:
    return read_config(reduced_model(request.param))


def test_nothing_has_memory(config: PreTrainedConfig) -> None:
    model = build(config, torch.bfloat16)
    Skeleton(model)
    assert {parameter.device.type for parameter in model.parameters()} <= {"meta"}


def test_blocks_and_rest_together_are_the_model(config: PreTrainedConfig) -> None:
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config)
    skeleton = skeleton_of(config)
    assert skeleton.num_blocks == config.num_hidden_layers
    named = [name for index in range(skeleton.num_blocks) for name in skeleton.block_names(index)]
    named += skeleton.rest_names()
    assert sorted(named) == sorted(name for name, _ in whole.named_parameters())
    entries = [
        (prefix + entry.name, entry.shape)
        for prefix, layout in [
            *((prefix, skeleton.block_layout(index)) for index, prefix in enumerate(skeleton.prefixes)),
            ("", skeleton.rest_layout()),
        ]
        for entry in layout.entries.values()
    ]
    assert dict(entries) == {name: tuple(parameter.shape) for name, parameter in whole.named_parameters()}


def test_the_shape_of_kv_is_the_attention_s_own(config: PreTrainedConfig) -> None:
    heads = config.num_attention_heads
    skeleton = skeleton_of(config)
    assert skeleton.kv_shape.kv_heads == getattr(config, "num_key_value_heads", heads)
    assert skeleton.kv_shape.head_dim == (getattr(config, "head_dim", None) or config.hidden_size // heads)


def test_blocks_of_one_family_have_one_layout(config: PreTrainedConfig) -> None:
    skeleton = skeleton_of(config)
    assert all(skeleton.block_layout(index) == skeleton.block_layout(0) for index in range(skeleton.num_blocks))


def test_tied_parameters_are_one_with_two_names() -> None:
    assert skeleton_of(read_config(reduced_model("gpt2"))).tied == {"transformer.wte.weight": ["lm_head.weight"]}
    assert skeleton_of(read_config(reduced_model("llama-2"))).tied == {}


# --- memory ---------------------------------------------------------------------------------------------------------


def test_derived_buffers_are_those_of_transformers(config: PreTrainedConfig) -> None:
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    skeleton = skeleton_of(config)
    materialise_buffers(skeleton.model, skeleton.adapter.blocks, torch.device("cpu"))
    own = dict(skeleton.model.named_buffers())
    for prefix, block in zip(skeleton.prefixes, skeleton.adapter.blocks, strict=True):
        own |= {prefix + name: buffer for name, buffer in block.named_buffers()}
    wanted = dict(whole.named_buffers())
    assert own.keys() == wanted.keys()
    for name, buffer in wanted.items():
        assert torch.equal(own[name], buffer), name


def test_a_buffer_that_nobody_computes_is_refused() -> None:
    model = build(GemmaConfig(**SMALL, num_key_value_heads=2, head_dim=8), torch.float32)
    model.model.norm.register_buffer("unheard_of", torch.zeros(2, device="meta"), persistent=False)
    with pytest.raises(ModelRejected, match=r"unheard_of cannot be computed"):
        materialise_buffers(model, [], torch.device("cpu"))


def test_bind_gives_views_and_no_copies() -> None:
    config = AutoConfig.from_pretrained(reduced_model("llama-2"))
    skeleton = skeleton_of(config)
    layout = skeleton.block_layout(0)
    buffer = torch.zeros(layout.numel)
    block = skeleton.adapter.blocks[0]
    bind(block, layout.views(buffer))
    buffer.fill_(3)
    for name, parameter in block.named_parameters():
        assert bool((parameter == 3).all()), name
        assert not parameter.requires_grad
