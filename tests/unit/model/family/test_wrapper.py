from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BartConfig

from djinn_client.errors import ModelRejected
from djinnd.model.family.configuration.counts import MAX_TOWER
from djinnd.model.family.skeleton import Skeleton, build, make_config
from tests.families.configurations import reduced_wrapper
from tests.families.one_family import Outcome, try_family
from tests.support.parameters import long_except

# One head beside the language model, frequencies in three sections, towers of timm (two), a tied head, and norms of the
# tower in a list.
WRAPPERS = long_except(
    ("gemma3", "qwen2_5_vl", "gemma3n"),
    ("gemma3", "qwen2_5_vl", "gemma3n", "fast_vlm", "qwen3_vl", "mistral3", "llava", "blip-2"),
)


def told(model_type: str) -> dict[str, Any]:
    return dict(json.loads(reduced_wrapper(model_type).to_json_string()))


def skeleton_of(model_type: str) -> Skeleton:
    return Skeleton(build(make_config(told(model_type)), torch.float32))


@pytest.mark.parametrize("model_type", WRAPPERS)
def test_the_language_model_inside_equals_transformers(model_type: str, tmp_path: Path) -> None:
    assert try_family(model_type, tmp_path) == Outcome(True)


def test_the_towers_have_no_place_in_memory() -> None:
    skeleton = skeleton_of("gemma3")
    assert {name.split(".")[1] for name in skeleton.shapes if name.startswith("model.")} == {"language_model"}
    assert (skeleton.family, skeleton.num_blocks) == ("gemma3_text", 4)
    assert skeleton.points.layers == "model.language_model.layers"


def test_modules_that_gemma_3n_runs_for_text_stay() -> None:
    skeleton = skeleton_of("gemma3n")
    inside = {name.split(".")[1] for name in skeleton.shapes if name.startswith("model.")}
    assert inside == {"language_model", "embed_vision", "embed_audio"}


def test_an_encoder_and_decoder_is_refused() -> None:
    config = {"model_type": "bart", "encoder_layers": 1, "decoder_layers": 1}
    with pytest.raises(ModelRejected, match="bart is not a decoder"):
        make_config(BartConfig(**config).to_dict() | {"id2label": {}, "label2id": {}})


def test_a_tower_of_too_many_layers_is_refused_before_it_is_built() -> None:
    config = told("qwen2_5_vl")
    config["vision_config"]["depth"] = MAX_TOWER + 1
    with pytest.raises(ModelRejected, match="depth is 1025; at most 1,024 are supported"):
        make_config(config)
