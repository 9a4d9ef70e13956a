from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from djinn_client.errors import ModelRejected
from djinnd.model.family.adapter import Adapter, find_blocks
from tests.families.configurations import reduced
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
def test_prologue_blocks_and_epilogue_equal_the_whole_model(folder: Path) -> None:
    ids, positions = batch()
    model = whole(folder)
    wanted = model(ids, use_cache=False).logits[0]
    adapter = Adapter(model)
    for _ in range(2):  # the first pass must leave nothing behind
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


def test_a_slice_of_all_stand_ins_makes_no_new_list() -> None:
    model = whole(reduced_model("llama-2"))
    places, adapter = find_blocks(model), Adapter(model)
    assert len(places) == len(adapter.blocks) > 1
    assert places[:] is places and places[: len(places)] is places and places[0:99] is places
    assert [*places[1:]] == [*places][1:] and [*places[::-1]] == [*places][::-1]


def test_an_adapter_is_freed_with_its_last_reference() -> None:
    """It must not wait for the garbage collector, because the weights of an unloaded model would wait, too."""
    adapter = Adapter(whole(reduced_model("llama-2")))
    gone = weakref.ref(adapter.blocks[0])
    gc.disable()
    try:
        del adapter
        assert gone() is None
    finally:
        gc.enable()


class Layer(nn.Module):
    def forward(self, hidden: Tensor, beside: Any = None) -> Tensor:
        return hidden


class Sharing(nn.Module):
    """A model that passes its blocks another argument beside the hidden states, by name."""

    _no_split_modules = ("Layer",)

    def __init__(self, beside: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.embed = nn.Parameter(torch.rand(1, TOKENS, 4))
        self.beside = beside

    def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
        hidden = self.embed if self.beside == "weights" else self.embed * 2
        given = {"nothing": None, "another": hidden.clone(), "itself": hidden, "a view": {"deep": [hidden[:, :3]]}}
        for layer in self.layers:
            hidden = layer(hidden, beside=given.get(self.beside))
        return hidden


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("beside", ["nothing", "another", "itself", "a view", "weights"])
@torch.inference_mode()
def test_the_input_of_the_first_block_has_memory_of_its_own(beside: str, device: str) -> None:
    """The caller may therefore change it in place. This is learnt once, perhaps while the model is on meta."""
    adapter = Adapter(Sharing(beside).to(device))
    adapter.prologue(*batch())
    adapter.model.embed = nn.Parameter(torch.rand(1, TOKENS, 4))
    prologue = adapter.prologue(*batch())
    wanted = [adapter.model.embed, *(leaf for leaf in tree_leaves(prologue.arguments) if isinstance(leaf, Tensor))]
    before = [tensor.clone() for tensor in wanted]
    prologue.hidden.zero_()
    assert all(torch.equal(tensor, kept) for tensor, kept in zip(wanted, before, strict=True))
    is_copied = adapter.recorded().hidden is not prologue.hidden
    assert is_copied == (beside in ("itself", "a view", "weights"))  # without another holder, nothing is copied


@pytest.mark.parametrize(("family", "values"), [("bamba", 2), ("falcon_h1", 1)])
@torch.inference_mode()
def test_the_values_that_a_model_expects_of_a_block_are_learnt(family: str, values: int) -> None:
    """Bamba's forward unpacks the result of a block, and Falcon-H1's takes its first value."""
    config = reduced(family)
    config.num_hidden_layers = 6  # a tensor has fewer dimensions, so its first value cannot be taken as often
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ids, positions = batch()
    ids %= config.vocab_size
    wanted = model(ids, use_cache=False).logits[0]
    adapter = Adapter(model)
    adapter.learn_prologue(ids)
    assert adapter.values == values
    prologue = adapter.prologue(ids, positions)
    hidden = prologue.hidden
    for index, arguments in enumerate(prologue.arguments):
        hidden = adapter.run_block(index, hidden, arguments)
    torch.testing.assert_close(adapter.epilogue(hidden), wanted)


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
