"""Each argument of transformers' `generate` is honoured, without effect, or refused with a remedy."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin

from djinn_client.errors import InvalidRequest
from djinn_client.remote_model.arguments import HONOURED, REFUSED, WITHOUT_EFFECT, check_call, check_generate

GUIDE = Path(__file__).parents[4] / "docs/guide/remote-model.md"
GROUPS = {"honoured": HONOURED, "without effect": WITHOUT_EFFECT, "refused": frozenset(REFUSED)}


def test_all_arguments_of_transformers_are_known_and_none_is_in_two_groups() -> None:
    of_config = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    of_generate = inspect.signature(GenerationMixin.generate).parameters.keys() - {"self", "kwargs"}
    assert (of_config | of_generate) - HONOURED - WITHOUT_EFFECT - REFUSED.keys() == set()
    assert len(HONOURED) + len(WITHOUT_EFFECT) + len(REFUSED) == len(HONOURED | WITHOUT_EFFECT | REFUSED.keys())


@pytest.mark.parametrize("group", GROUPS)
def test_the_guide_lists_each_group(group: str) -> None:
    row = re.search(rf"^\| {group} \|(.*)\|(.*)\|$", GUIDE.read_text(), re.MULTILINE)
    assert row is not None
    assert re.findall(r"`(\w+)`", row[2]) == sorted(GROUPS[group])


def test_the_defaults_of_transformers_pass() -> None:
    check_generate(GenerationConfig._get_default_generation_params())
    check_generate(dict.fromkeys(REFUSED))
    check_generate({"num_beams": 1, "guidance_scale": 1.0, "suppress_tokens": [], "use_cache": False})


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_refusal_names_the_argument_and_the_remedy(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"does not take {name} ") as refused:
        check_generate({name: 17})
    assert refused.value.data["field"] == name
    assert refused.value.message.endswith(REFUSED[name][1])


def test_tensors_and_unknown_arguments_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"inputs_embeds \(a Tensor here\)"):
        check_generate({"inputs_embeds": torch.ones(1, 2, 3)})
    with pytest.raises(InvalidRequest, match=r"max_tokens \(8 here\): leave it out"):
        check_generate({"max_tokens": 8})


def test_a_call_without_generation_returns_no_cache_and_knows_no_sampling() -> None:
    check_call({"use_cache": False, "output_attentions": None})
    for name in ("use_cache", "output_hidden_states", "temperature"):
        with pytest.raises(InvalidRequest, match=name):
            check_call({name: True})
