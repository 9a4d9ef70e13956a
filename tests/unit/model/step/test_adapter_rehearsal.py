from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from djinnd.device.cpu import CpuDevice
from djinnd.model.lora.targets import find_targets
from djinnd.model.step.adapter_rehearsal import served_targets
from djinnd.model.step.paged_model import PagedModel
from tests.support.loaded import MEMORY, load_weights, paged_model
from tests.support.models import reduced_model


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(MEMORY)
    yield device
    device.close()


def served(family: str, device: CpuDevice, change: Callable[[nn.Module], object] = lambda block: None) -> set[str]:
    """The names within a block, after `change` was made to each block."""
    weights = load_weights(reduced_model(family), device)
    model: PagedModel = paged_model(weights, 3, 4)
    for block in model.adapter.blocks:
        change(block)
    targets = find_targets(model.adapter.blocks, model.skeleton.prefixes)
    names = {name for target in served_targets(model, targets) for name in target.names}
    weights.release(device)
    return names


ATTENTION = {f"self_attn.{name}_proj" for name in "qkvo"}
MLP = {f"mlp.{name}_proj" for name in ("gate", "up", "down")}


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("llama-2", ATTENTION | MLP),
        ("gpt2", {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}),
        ("mixtral", ATTENTION),
    ],
)
def test_the_linear_modules_of_a_family(family: str, names: set[str], device: CpuDevice) -> None:
    assert served(family, device) == names


def test_a_module_that_is_called_for_other_rows_is_left_out(device: CpuDevice) -> None:
    def call_again(mlp: Any, given: object, result: object) -> None:
        mlp.down_proj(torch.zeros(1, 1, mlp.down_proj.in_features))

    def change(block: Any) -> None:
        block.mlp.register_forward_hook(call_again)

    assert served("llama-2", device, change) == (ATTENTION | MLP) - {"mlp.down_proj"}


def test_after_a_rehearsal_that_fails_nothing_is_served(device: CpuDevice) -> None:
    def fail(block: Any) -> None:
        def refuse(*given: object) -> None:
            raise ValueError("not with two rows")

        block.mlp.register_forward_hook(refuse)

    assert served("llama-2", device, fail) == set()
