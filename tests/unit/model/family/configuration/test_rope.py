from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PhimoeConfig
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from djinn_client.errors import ModelRejected, PromptTooLong
from djinnd.model.family.configuration.derived import materialise_buffers
from djinnd.model.family.configuration.rope import fix_frequencies
from djinnd.model.family.skeleton import Skeleton, build
from tests.support.checkpoints import altered
from tests.support.loaded import Served
from tests.support.models import reduced_model
from tests.support.open_files import read_config

SHORT, LONG = [1.0 + i / 8 for i in range(8)], [4.0] * 8
LONGROPE = {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}
LONG_PHI = {"rope_scaling": LONGROPE, "max_position_embeddings": 4096, "original_max_position_embeddings": 512}


def config_folder(tmp_path: Path, family: str, **entries: Any) -> Path:
    config = json.loads((reduced_model(family) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | entries))
    return tmp_path


def test_frequencies_for_every_length_are_refused(tmp_path: Path) -> None:
    folder = config_folder(tmp_path, "llama-2", rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    with pytest.raises(
        ModelRejected, match="llama with dynamic RoPE is refused: its frequencies depend on the longest"
    ):
        read_config(folder)


@pytest.mark.parametrize("leaky", ["dynamic", "longrope"])
def test_a_kind_of_layers_that_would_leak_is_refused(leaky: str) -> None:
    config = AutoConfig.from_pretrained(reduced_model("gemma-3"))
    config.rope_parameters["full_attention"]["rope_type"] = leaky
    with pytest.raises(ModelRejected, match=f"gemma3_text with {leaky} RoPE is refused") as told:
        fix_frequencies(config)
    assert told.value.data == {"family": "gemma3_text"}


@pytest.mark.parametrize("rope_type", ["linear", "llama3", "yarn"])
def test_other_frequencies_are_served(tmp_path: Path, rope_type: str) -> None:
    rope = {"rope_type": rope_type, "factor": 2.0, "original_max_position_embeddings": 256}
    if rope_type == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = read_config(config_folder(tmp_path, "llama-2", rope_scaling=rope))
    assert config.max_position_embeddings == 2048


@pytest.mark.parametrize(("promised", "served"), [(4096, 512), (512, 512), (300, 300)])
def test_a_longrope_context_ends_at_the_length_of_pretraining(tmp_path: Path, promised: int, served: int) -> None:
    folder = config_folder(tmp_path, "phi-3", **LONG_PHI | {"max_position_embeddings": promised})
    assert read_config(folder).max_position_embeddings == served


def test_no_session_of_a_longrope_model_gets_past_the_first_set(tmp_path: Path) -> None:
    with Served(altered(tmp_path, "phi-3", config=LONG_PHI)) as served:
        assert served.runner.plan.max_context == 512
        with pytest.raises(PromptTooLong, match="513"):
            served.submit(served.open(), [1] * 513)


def test_longrope_has_the_first_set_and_the_scale_of_transformers(tmp_path: Path) -> None:
    folder = config_folder(tmp_path, "phi-3", **LONG_PHI)
    wanted = Phi3RotaryEmbedding(AutoConfig.from_pretrained(folder))
    skeleton = Skeleton(build(read_config(folder), torch.float32))
    materialise_buffers(skeleton.model, skeleton.adapter.blocks, torch.device("cpu"))
    rotary = skeleton.model.model.rotary_emb
    x, positions = torch.zeros(1), torch.tensor([[0, 1, 100, 511]])
    expected = wanted(x, positions)
    assert all(map(torch.equal, rotary(x, positions), expected))
    assert wanted.attention_scaling == rotary.attention_scaling > 1
    # Transformers would now choose the second set for all rows; the fixed module does not choose.
    farther = torch.cat([positions, torch.tensor([[4000]])], dim=1)
    assert not torch.equal(wanted(x, farther)[0][:, :4], expected[0])
    assert torch.equal(rotary(x, farther)[0][:, :4], expected[0])


def test_a_family_with_its_own_code_for_the_choice_is_refused() -> None:
    rope = LONGROPE | {"rope_type": "longrope", "short_mscale": 1.1, "long_mscale": 1.2}
    config = PhimoeConfig(
        vocab_size=64,
        hidden_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_hidden_layers=2,
        intermediate_size=64,
        original_max_position_embeddings=256,
        rope_parameters=rope | {"original_max_position_embeddings": 256, "rope_theta": 1e4},
    )
    fix_frequencies(config)
    with pytest.raises(ModelRejected, match="phimoe cannot be run block by block"):
        Skeleton(build(config, torch.float32))
