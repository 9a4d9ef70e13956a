from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BloomConfig,
    DeepseekV3Config,
    DogeConfig,
    FalconConfig,
    Gemma4TextConfig,
    GPTNeoConfig,
    MiniMaxConfig,
    MistralConfig,
    PreTrainedConfig,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from djinn_client.errors import ModelRejected
from djinn_client.protocol.fields.kv_layout import BlockShape
from djinnd.model.attention.absorption import Absorption
from djinnd.model.family.skeleton import Skeleton, bind, build
from djinnd.weights.layout import Layout
from tests.families.configurations import reduced
from tests.support.models import FAMILIES, reduced_model
from tests.support.open_files import read_config
from tools.checkpoints.shapes.named import SHAPES, config_of

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


def test_an_unknown_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRejected, match=r"config\.json: .*borogove"):
        read_config(config_folder(tmp_path, model_type="borogove"))


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "configuration_own.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass OwnConfig: pass\n")
    config_folder(tmp_path, model_type="own", auto_map={"AutoConfig": "configuration_own.OwnConfig"})
    with pytest.raises(ModelRejected, match=r"config\.json"):
        read_config(tmp_path)
    assert not ran.exists()


def test_a_quantised_configuration_without_files_is_refused(tmp_path: Path) -> None:
    folder = config_folder(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(
        ModelRejected, match=r"quantised \(gptq\), which is not supported for weights that a client shares"
    ):
        read_config(folder)


# --- families that cannot be served ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4),
            "block 0 of bloom never called .* attention interface",
        ),
        (FalconConfig(**SMALL, alibi=True), "attention of falcon needs .*: alibi"),
        (GPTNeoConfig(num_layers=2, attention_types=[[["global", "local"], 1]]), "gpt_neo does not use .* interface"),
        (reduced("jetmoe"), "block 0 of jetmoe needs the values of tokens before its attention"),
        (MiniMaxConfig(**SMALL), "block 1 of minimax is of a kind that djinnd does not serve: linear_attention"),
        (reduced("zaya"), "each block of zaya hands `prev_router_hidden_states` on to the next one"),
        (BertConfig(**SMALL), "attention of bert needs .*: attention to later tokens"),
        (DogeConfig(**SMALL, num_key_value_heads=2), "attention of doge needs .*: a mask of its own"),
        (reduced("deepseek_v4"), r"deepseek_v4 take more than one hidden state a token: \[1, 2, 4, 64\]"),
    ],
    ids=lambda value: value.model_type if isinstance(value, PreTrainedConfig) else "",
)
def test_families_that_would_give_wrong_answers_are_refused_by_name(config: PreTrainedConfig, reason: str) -> None:
    with pytest.raises(ModelRejected, match=reason) as told:
        skeleton_of(config)
    assert told.value.data == {"family": config.model_type}


def test_a_window_that_only_a_mask_would_enforce_is_refused() -> None:
    """Every block of Mistral asks for the window, whatever kind `layer_types` gives it."""
    config = MistralConfig(**SMALL, sliding_window=8, layer_types=["sliding_attention", "full_attention"])
    with pytest.raises(ModelRejected, match=r"attention of mistral needs .*: full_attention by a mask"):
        skeleton_of(config)


# --- learnt properties ----------------------------------------------------------------------------------------------


@pytest.fixture(params=FAMILIES, scope="module")
def config(request: pytest.FixtureRequest) -> PreTrainedConfig:
    return read_config(reduced_model(request.param))


@pytest.fixture(scope="module")
def skeleton(config: PreTrainedConfig) -> Skeleton:
    """A skeleton that tests share and do not change."""
    return skeleton_of(config)


def test_latent_attention_keeps_latents_and_rotary_keys() -> None:
    config = DeepseekV3Config(**SMALL, kv_lora_rank=12, qk_rope_head_dim=8)
    skeleton = skeleton_of(config)
    assert skeleton.kv == (BlockShape(1, 12, 8),) * 2
    assert [at.expanding for at in skeleton.attentions] == [("self_attn.kv_b_proj",)] * 2


def test_where_keys_and_values_come_from_is_learnt() -> None:
    sizes = {"kv_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 10, "v_head_dim": 6}
    for at in skeleton_of(DeepseekV3Config(**SMALL, **sizes)).attentions:
        assert at.latents is not None
        heads = SMALL["num_attention_heads"]
        assert at.latents.absorption == Absorption("self_attn.kv_b_proj", heads, plain=10, rotary=8, value=6)


def test_a_family_that_expands_latents_in_another_way_is_not_absorbed(monkeypatch: pytest.MonkeyPatch) -> None:
    own = DeepseekV3Attention.expand_kv

    def swapped(self: DeepseekV3Attention, latents: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = own(self, latents, rotary)
        return keys.flip(1), values

    monkeypatch.setattr(DeepseekV3Attention, "expand_kv", swapped)
    config = DeepseekV3Config(**SMALL, kv_lora_rank=12, qk_rope_head_dim=8)
    assert [at.latents.absorption for at in skeleton_of(config).attentions if at.latents] == [None, None]


def test_a_block_that_shares_kv_names_the_block_whose_kv_it_reads() -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    config = Gemma4TextConfig(
        **SMALL | {"num_hidden_layers": 4},
        num_key_value_heads=2,
        head_dim=8,
        global_head_dim=16,
        num_kv_shared_layers=2,
        layer_types=kinds,
    )
    assert skeleton_of(config).kv == (BlockShape(2, 8, 8), BlockShape(2, 16, 16), 0, 1)


def test_a_skeleton_has_no_memory(skeleton: Skeleton) -> None:
    assert {parameter.device.type for parameter in skeleton.model.parameters()} <= {"meta"}


def block_layouts(skeleton: Skeleton) -> list[Layout]:
    return [layout for _, layout, _ in list(skeleton.layouts())[: skeleton.num_blocks]]


def test_blocks_and_rest_together_have_every_parameter(config: PreTrainedConfig, skeleton: Skeleton) -> None:
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config)
    assert skeleton.num_blocks == config.num_hidden_layers
    entries = [
        (prefix + entry.name, entry.shape)
        for prefix, layout, _ in skeleton.layouts()
        for entry in layout.entries.values()
    ]
    assert len(dict(entries)) == len(entries)
    assert dict(entries) == {name: tuple(parameter.shape) for name, parameter in whole.named_parameters()}


def test_the_shape_of_kv_is_the_attention_s_own(config: PreTrainedConfig, skeleton: Skeleton) -> None:
    heads = config.num_attention_heads
    if config.model_type == "falcon":
        kv_heads = config.num_kv_heads if config.new_decoder_architecture else 1
    else:
        kv_heads = getattr(config, "num_key_value_heads", heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    assert skeleton.kv == (BlockShape(kv_heads, head_dim, head_dim),) * skeleton.num_blocks


def test_blocks_of_one_family_have_one_layout(config: PreTrainedConfig, skeleton: Skeleton) -> None:
    layouts = block_layouts(skeleton)
    dense = getattr(config, "mlp_only_layers", [])
    assert all(layout.entries == layouts[0].entries for index, layout in enumerate(layouts) if index not in dense)


@pytest.mark.parametrize(
    ("changed", "dense"),
    [({"mlp_only_layers": [1]}, {1}), ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, {0, 2, 3})],
)
def test_dense_blocks_among_experts_have_layouts_of_their_own(changed: dict[str, Any], dense: set[int]) -> None:
    config = AutoConfig.from_pretrained(reduced_model("qwen3-moe"), **changed)
    skeleton = skeleton_of(config)
    for index in range(4):
        entries = block_layouts(skeleton)[index].entries
        assert ("mlp.up_proj.weight" in entries, skeleton.stacks[index] is None) == (index in dense, index in dense)
        assert "mlp.experts.gate_up_proj" not in entries
    sizes = [layout.nbytes(torch.float32) for layout in block_layouts(skeleton)]
    assert len({sizes[index] for index in dense}) == 1
    assert len(set(sizes)) == 2


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_make_model_can_be_driven(shape: str) -> None:
    """Has the full size but two blocks; on the meta device that takes no memory."""
    entries = config_of(shape, dtype="bfloat16", blocks=2)
    skeleton = skeleton_of(AutoConfig.for_model(entries.pop("model_type"), **entries))
    assert skeleton.num_blocks == 2


def test_tied_parameters_are_one_with_two_names() -> None:
    assert skeleton_of(read_config(reduced_model("gpt2"))).tied == {"transformer.wte.weight": ["lm_head.weight"]}
    assert skeleton_of(read_config(reduced_model("llama-2"))).tied == {}
    word_embeddings = "transformer.word_embeddings.weight"
    assert skeleton_of(read_config(reduced_model("falcon-7b"))).tied == {word_embeddings: ["lm_head.weight"]}


# --- memory ---------------------------------------------------------------------------------------------------------


def test_bind_gives_views_and_no_copies() -> None:
    config = AutoConfig.from_pretrained(reduced_model("llama-2"))
    skeleton = skeleton_of(config)
    layout = block_layouts(skeleton)[0]
    buffer = torch.zeros(layout.numel)
    block = skeleton.adapter.blocks[0]
    bind(block, layout.views(buffer))
    buffer.fill_(3)
    for name, parameter in block.named_parameters():
        assert bool((parameter == 3).all()), name
        assert not parameter.requires_grad
