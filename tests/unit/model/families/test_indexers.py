"""A model with indexers is served without them, up to the number of tokens that they pick."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig

from djinn_client.errors import ModelRejected, PromptTooLong
from djinnd.model.families import indexers
from tests.families.configurations import reduced
from tests.support import reference
from tests.support.checkpoints import random_model
from tests.support.loaded import Served, random_prompt
from tests.support.open_files import read_config
from tests.support.parameters import long_except
from tests.unit.model.family.test_skeleton import skeleton_of

PICKS = 64
QUICK = ("deepseek_v32", "glm_moe_dsa", "minimax_m3_vl_text")
FAMILIES = [family for family in indexers.FAMILIES if family in CONFIG_MAPPING]


def config_of(family: str, picks: int = PICKS) -> PreTrainedConfig:
    config = reduced(family)
    config.initializer_range = 0.3  # large enough that attention matters
    if family == "minimax_m3_vl_text":
        config.index_topk_blocks, config.index_block_size = picks // 16, 16
    else:
        config.index_topk = picks
    return config


def prompt(length: int) -> list[int]:
    return random_prompt(length, 300, seed=0)


@pytest.mark.parametrize("family", long_except(QUICK, FAMILIES))
def test_up_to_the_length_logits_and_tokens_equal_transformers_and_no_session_is_longer(
    family: str, tmp_path: Path
) -> None:
    folder = random_model(tmp_path / "model", config_of(family))
    with Served(folder, max_batch_tokens=24) as served:
        assert served.runner.plan.max_context == PICKS
        with pytest.raises(PromptTooLong, match=str(PICKS)):
            served.submit(served.open(), prompt(PICKS + 1))
        reader, talker = served.open(), served.open()
        forward = served.submit(reader, prompt(PICKS))
        served.submit(talker, prompt(40), max_tokens=24)
        served.run()
        wanted = torch.from_numpy(reference.logits(folder, reader.tokens))
        torch.testing.assert_close(served.logits_of(forward), wanted, rtol=0, atol=1e-4)
    assert talker.tokens[40:] == reference.greedy(folder, prompt(40), 24)


@pytest.mark.parametrize("family", FAMILIES)
def test_beyond_the_length_logits_would_be_others(family: str, tmp_path: Path) -> None:
    """Compares transformers' own logits: with indexers that pick all tokens, and with these."""
    picking = random_model(tmp_path / "picking", config_of(family))
    all_read = random_model(tmp_path / "all_read", config_of(family, 16 * PICKS))  # with the same weights
    own, dense = (torch.from_numpy(reference.logits(each, prompt(PICKS + 1))) for each in (picking, all_read))
    torch.testing.assert_close(own[:PICKS], dense[:PICKS], rtol=0, atol=1e-4)
    assert (own[PICKS] - dense[PICKS]).abs().max() > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_of_indexers_are_not_read(family: str, tmp_path: Path) -> None:
    config = config_of(family)
    names = reference.model_of(random_model(tmp_path, config)).state_dict().keys()
    skeleton = skeleton_of(config)
    left = [name for name in names if any(re.search(pattern, name) for pattern in skeleton.unused)]
    assert left == [name for name in names if ".indexer." in name] != []
    assert set(skeleton.shapes) == set(names) - set(left)


def test_a_family_member_without_indexers_keeps_its_context() -> None:
    assert indexers.longest(config_of("minimax_m3_vl_text")) == PICKS
    config = CONFIG_MAPPING["minimax_m3_vl_text"]()
    assert indexers.longest(config) is None
    assert indexers.longest(CONFIG_MAPPING["llama"]()) is None


def test_indexers_that_pick_nothing_are_refused(tmp_path: Path) -> None:
    config_of("deepseek_v32", picks=0).save_pretrained(tmp_path)
    with pytest.raises(ModelRejected, match="the context of deepseek_v32 ends after 0 tokens"):
        read_config(tmp_path)


def test_the_shorter_context_leaves_the_frequencies(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 256, "rope_theta": 1e4}
    config = config_of("deepseek_v32")
    config.rope_parameters = rope
    config.save_pretrained(tmp_path)
    ended = read_config(tmp_path)
    assert (ended.max_position_embeddings, ended.rope_parameters["factor"]) == (PICKS, 1024 / 256)
