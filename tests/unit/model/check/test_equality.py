from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from djinn_client.errors import ModelRejected
from djinnd.device.cpu import CpuDevice
from djinnd.model.attention.paged import TorchAttention
from djinnd.model.paged_batch import PagedBatch
from djinnd.model.step.paged_model import PagedModel
from djinnd.model.tuning import CHUNKS, SINGLES
from tests.support.checkpoints import Tensors, altered, cast
from tests.support.loaded import MEMORY, check_all, load_weights, paged_model
from tests.support.models import reduced_model
from tests.support.parameters import FEW_FAMILIES

PAGE = 16
CONTEXT = 512


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(MEMORY)
    yield device
    device.close()


def model_of(device: CpuDevice, family: str | Path = "llama-2", dtype: str = "auto") -> PagedModel:
    folder = reduced_model(family) if isinstance(family, str) else family
    weights = load_weights(folder, device, dtype)
    return paged_model(weights, 2 + (sum(CHUNKS) + SINGLES) // PAGE, PAGE)


@pytest.mark.parametrize("family", FEW_FAMILIES)
def test_families_with_paged_attention_pass_and_leave_the_pages_zeroed(device: CpuDevice, family: str) -> None:
    model = model_of(device, family)
    check_all(model, CONTEXT)
    assert not bool(model.pool[1:].any())
    assert {paged.calls for paged in model.paged} != {0}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_in_half_precision_passes(device: CpuDevice, dtype: str) -> None:
    check_all(model_of(device, "llama-2", dtype), CONTEXT)


class Forgetful(TorchAttention):
    def write(self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch) -> None:
        pass


def test_keys_that_do_not_reach_the_pages_are_detected(device: CpuDevice) -> None:
    model = model_of(device)
    model.context.kernels = Forgetful()
    with pytest.raises(ModelRejected, match=r"llama fails the check at load: what block 0 adds in .* differ") as told:
        check_all(model, CONTEXT)
    assert told.value.data["family"] == "llama" and told.value.data["error"] > 0.01


class Repeated(nn.Module):
    """Runs its attention a given number of times."""

    def __init__(self, attention: nn.Module, times: int) -> None:
        super().__init__()
        self.attention = attention
        self.times = times

    def forward(self, hidden_states: Tensor, **arguments: Any) -> Any:
        out = torch.zeros_like(hidden_states), None
        for _ in range(self.times):
            out = self.attention(hidden_states=hidden_states, **arguments)
        return out


@pytest.mark.parametrize("times", [0, 2])
def test_attention_that_does_not_run_once_a_block_is_detected(device: CpuDevice, times: int) -> None:
    model = model_of(device)
    block = model.adapter.blocks[2]
    block.self_attn = Repeated(block.self_attn, times)
    ran = sorted({1, times})
    with pytest.raises(ModelRejected, match=rf"attention ran \[{ran[0]}, {ran[1]}\] times in its blocks, not once"):
        check_all(model, CONTEXT)


class Remembering(nn.Module):
    """Keeps state from call to call, outside of the pages."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.mlp(x) * self.calls  # type: ignore[no-any-return]


@pytest.mark.parametrize("again", [False, True])
def test_state_outside_of_the_pages_is_detected(device: CpuDevice, again: bool) -> None:
    model = model_of(device)
    model.adapter.blocks[1].mlp = Remembering(model.adapter.blocks[1].mlp)
    with pytest.raises(ModelRejected, match="differ by"):
        check_all(model, CONTEXT, again=again)


def test_logits_with_nan_are_refused(device: CpuDevice) -> None:
    model = model_of(device)
    model.adapter.blocks[0].post_attention_layernorm.weight.data[0] = float("nan")
    with pytest.raises(ModelRejected, match="its logits contain NaN: its activations overflow"):
        check_all(model, CONTEXT)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["model.layers.2.mlp.up_proj.weight", "model.norm.weight"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_with_nan_or_infinity_are_refused_by_name(
    device: CpuDevice, tmp_path: Path, name: str, value: float, dtype: torch.dtype
) -> None:
    def change(tensors: Tensors) -> None:
        tensors[name].view(-1)[5] = value
        cast(tensors, dtype)

    model = model_of(device, altered(tmp_path, change=change), "auto" if dtype == torch.float32 else "bfloat16")
    with pytest.raises(ModelRejected, match=rf"contain NaN: NaN or infinity in tensor {name}") as told:
        check_all(model, CONTEXT)
    assert told.value.data["tensor"] == name


class Stumbling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise IndexError("an expert too many")


def test_an_exception_of_a_forward_is_reported_with_the_family(device: CpuDevice) -> None:
    model = model_of(device, "mixtral")
    model.adapter.blocks[3].input_layernorm = Stumbling()
    with pytest.raises(ModelRejected, match=r"mixtral fails the check at load: IndexError\('an expert too many'\)"):
        check_all(model, CONTEXT)


def waver(model: PagedModel, changed: int, every: int) -> None:
    """Lets routers pick other experts in single steps, in place of the last `changed` of 2, at each `every`-th call."""
    calls = 0

    def other(module: nn.Module, args: tuple[Any, ...], out: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        nonlocal calls
        calls += len(out[0]) == 1
        if len(out[0]) > 1 or calls % every:
            return out
        *results, picked = out
        unused = [expert for expert in range(4) if expert not in picked[0].tolist()]
        picked = picked.clone()
        picked[0, 2 - changed :] = torch.tensor(unused[:changed])
        return (*results, picked)

    for block in model.adapter.blocks:
        block.mlp.gate.register_forward_hook(other)


def test_near_ties_of_routers_do_not_matter(device: CpuDevice) -> None:
    model = model_of(device, "mixtral")
    waver(model, changed=1, every=2)
    check_all(model, CONTEXT)
    assert not any(module._forward_pre_hooks for block in model.adapter.blocks for module in block.modules())


def test_routers_that_pick_mostly_other_experts_are_detected(device: CpuDevice) -> None:
    model = model_of(device, "mixtral")
    waver(model, changed=2, every=1)
    with pytest.raises(ModelRejected, match="of the experts that its routers pick in single steps, 15% are") as told:
        check_all(model, CONTEXT)
    assert 0.1 < told.value.data["agreement"] < 0.2
