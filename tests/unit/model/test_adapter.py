from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from djinn_client.errors import ModelRejected
from djinnd.model.adapter import Adapter, find_blocks
from tests.support.models import FAMILIES, reduced_model

TOKENS = 9


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest) -> Path:
    return reduced_model(request.param)


def whole(folder: Path, **options: Any) -> nn.Module:
    """The family's model with transformers' own attention."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()  # type: ignore[no-any-return]


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 512, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    return ids, torch.arange(TOKENS).unsqueeze(0)


@torch.inference_mode()
def test_prologue_blocks_and_epilogue_are_the_model(folder: Path) -> None:
    ids, positions = batch()
    model = whole(folder)
    wanted = model(ids, use_cache=False).logits[0]
    adapter = Adapter(model)
    for _ in range(2):  # nothing is left over from the first time
        prologue = adapter.prologue(ids, positions)
        hidden = prologue.hidden
        for index, arguments in enumerate(prologue.arguments):
            hidden = adapter.run_block(index, hidden, arguments)
        assert torch.equal(adapter.epilogue(hidden), wanted)


@torch.inference_mode()
def test_the_epilogue_takes_any_rows(folder: Path) -> None:
    ids, positions = batch()
    adapter = Adapter(whole(folder))
    hidden = adapter.prologue(ids, positions).hidden
    for index, arguments in enumerate(adapter.prologue(ids, positions).arguments):
        hidden = adapter.run_block(index, hidden, arguments)
    logits = adapter.epilogue(hidden)
    picked = adapter.epilogue(hidden[:, [7, 2]])
    torch.testing.assert_close(picked, logits[[7, 2]])


@torch.inference_mode()
def test_prologue_runs_no_block(folder: Path) -> None:
    adapter = Adapter(whole(folder))
    for block in adapter.blocks:
        block.register_forward_pre_hook(lambda *_: pytest.fail("a block ran"))
    adapter.prologue(*batch())


def test_an_adapter_goes_with_its_last_user() -> None:
    """Nothing of it waits for the garbage collector, which the weights of an unloaded model would wait for, too."""
    adapter = Adapter(whole(reduced_model("llama-2")))
    gone = weakref.ref(adapter.blocks[0])
    gc.disable()
    try:
        del adapter
        assert gone() is None
    finally:
        gc.enable()


class Stack(nn.Module):
    _no_split_modules = ("Linear",)

    def __init__(self, *lists: nn.ModuleList) -> None:
        super().__init__()
        self.lists = nn.ModuleList(lists)


def test_a_model_with_two_lists_of_layers_is_refused() -> None:
    two = Stack(nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleList([nn.Linear(2, 2)]))
    with pytest.raises(ModelRejected, match=r"Stack has 2 lists of decoder layers \(Linear\)"):
        find_blocks(two)


def test_a_model_that_names_no_layers_is_refused() -> None:
    with pytest.raises(ModelRejected, match=r"Sequential has 0 lists of decoder layers \(unnamed\)"):
        find_blocks(nn.Sequential(nn.ModuleList([nn.Linear(2, 2)])))


def test_the_blocks_of_a_family_are_found(folder: Path) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    assert len(find_blocks(model)) == model.config.num_hidden_layers
