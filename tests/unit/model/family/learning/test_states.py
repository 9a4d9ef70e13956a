from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

from djinnd.model.family.learning.states import _of_block
from djinnd.model.family.skeleton import Skeleton, build
from djinnd.model.states.carrier import StateSpec
from djinnd.model.states.layout import state_bytes
from djinnd.model.step.page_regions import layout_of
from tests.families.configurations import reduced


class Mixer(nn.Module):
    """Keeps one state, and then may need values, which the meta device lacks."""

    def __init__(self, *, needs_values: bool) -> None:
        super().__init__()
        self.needs_values = needs_values

    def forward(self, hidden: Tensor, cache: object = None) -> Tensor:
        cache.update_recurrent_state(hidden[:, 0], 0)  # type: ignore[attr-defined]
        return hidden * hidden.sum().item() if self.needs_values else hidden


@pytest.mark.parametrize("needs_values", [True, False])
def test_a_run_that_ends_for_lack_of_values_is_logged(needs_values: bool, caplog: pytest.LogCaptureFixture) -> None:
    block = nn.ModuleDict({"mixer": Mixer(needs_values=needs_values)})
    with caplog.at_level(logging.INFO, "djinnd.engine"):
        (found,) = _of_block(block, lambda: block["mixer"](torch.empty(1, 2, 8, device="meta")))
    assert (found.path, found.cache, found.specs) == (
        "mixer",
        "cache",
        (StateSpec("recurrent", 0, (8,), torch.float32),),
    )
    assert ("block_not_run kind=ModuleDict error=" in caplog.text) == needs_values


def test_a_block_may_have_a_state_and_attention() -> None:
    skeleton = Skeleton(build(reduced("falcon_h1"), torch.float32))
    assert [(told.block, told.path) for told in skeleton.stateful] == [(index, "mamba") for index in range(4)]
    assert [at.block for at in skeleton.attentions] == [0, 1, 2, 3]


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_a_model_may_have_states_and_no_attention(family: str) -> None:
    skeleton = Skeleton(build(reduced(family), torch.float32))
    assert [told.block for told in skeleton.stateful] == [0, 1, 2, 3]
    assert skeleton.attentions == [] and skeleton.kv == ()
    layout = layout_of(torch.float32, 16, skeleton.kv, state_bytes(skeleton.stateful))
    assert layout.token_bytes == layout.state_offset == 0 < layout.page_bytes == state_bytes(skeleton.stateful)
