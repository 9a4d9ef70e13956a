"""Random weights in the codes of quantised checkpoints, as the hub has them: no wider weights are made first.

| form  | coded                               | stored                                                              |
|-------|-------------------------------------|---------------------------------------------------------------------|
| fp8   | matrices of blocks, but routers     | NAME.weight (e4m3), NAME.weight_scale_inv, a float32 for 128 x 128    |
| mxfp4 | gpt-oss's experts                   | NAME_blocks [experts, rows, groups, 16], NAME_scales, uint8           |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tools.checkpoints.random_models.layout import StoredTensor

FP8_BLOCK, FP8_DEVIATION = 128, 32.0  # the deviation of codes
GROUP, E2M1_DEVIATION = 32, 2.93  # numbers that share a scale; the deviation of random codes
ROUTERS = ("gate.weight", "router.weight", "shared_expert_gate.weight")

TOLD: dict[str, dict[str, Any]] = {
    "fp8": {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [FP8_BLOCK] * 2
    },
    "mxfp4": {
        "quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]
    },
}  # fmt: skip


def in_form(form: str, tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
    """The tensors of the same checkpoint in a form. ValueError: the form does not apply to any of them."""
    found = [each for tensor in tensors for each in FORMS[form](tensor)]
    if len(found) == len(tensors):
        raise ValueError(f"no weights of this shape have the form {form}")
    return found


def _fp8(tensor: StoredTensor) -> Iterator[StoredTensor]:
    if len(tensor.size) != 2 or ".layers." not in tensor.name or tensor.name.endswith(ROUTERS):
        yield tensor
        return
    blocks = tuple(-(-size // FP8_BLOCK) for size in tensor.size)
    yield StoredTensor(tensor.name, tensor.size, torch.float8_e4m3fn)
    yield StoredTensor(f"{tensor.name}_scale_inv", blocks, torch.float32)


def _mxfp4(tensor: StoredTensor) -> Iterator[StoredTensor]:
    if len(tensor.size) != 3:
        yield tensor
        return
    experts, cols, rows = tensor.size
    groups, rest = divmod(cols, GROUP)
    if rest:
        raise ValueError(f"{cols} columns of {tensor.name} are not whole groups of {GROUP}")
    yield StoredTensor(f"{tensor.name}_blocks", (experts, rows, groups, GROUP // 2), torch.uint8)
    yield StoredTensor(f"{tensor.name}_scales", (experts, rows, groups), torch.uint8)


FORMS: dict[str, Callable[[StoredTensor], Iterator[StoredTensor]]] = {"fp8": _fp8, "mxfp4": _mxfp4}


def coded_values(tensor: StoredTensor, gain: float, generator: torch.Generator) -> Tensor | None:
    """The values of a tensor that `in_form` made, on the generator's device; None for another one.

    Decoded, weights have about the deviation gain / sqrt(columns).
    """
    made = torch.empty(tensor.size, dtype=tensor.dtype, device=generator.device)
    if tensor.dtype is torch.float8_e4m3fn:
        return torch.randn(tensor.size, generator=generator, device=made.device).mul_(FP8_DEVIATION).to(tensor.dtype)
    if tensor.name.endswith("_blocks"):
        return made.random_(256, generator=generator)
    if tensor.name.endswith("_scale_inv"):
        return made.fill_(gain / (tensor.size[-1] * FP8_BLOCK) ** 0.5 / FP8_DEVIATION)
    if tensor.name.endswith("_scales"):
        deviation = gain / (tensor.size[-1] * GROUP) ** 0.5
        return made.fill_(127 + round(math.log2(deviation / E2M1_DEVIATION)))
    return None
