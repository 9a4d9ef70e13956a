"""Derived buffers: tensors that modules compute from the configuration, such as rotary frequencies, sinusoids and
causal masks.

No checkpoint contains them: their size depends only on numbers in config.json. It is checked before they get memory.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from djinn_client.errors import ModelRejected
from djinnd.device.budget import gib
from djinnd.model.family.configuration.rope import stop_choosing

MAX_DERIVED = 256 << 20  # bytes, of all modules together; computing one takes a few times its size


def derived_bytes(model: nn.Module) -> int:
    """Bytes of all derived buffers of a model on the meta device that still has its own layers. Raises ModelRejected if
    they exceed MAX_DERIVED."""
    total = sum(buffer.nbytes for module in model.modules() for buffer in _derived(module).values())
    if total > MAX_DERIVED:
        family = model.config.model_type
        raise ModelRejected(
            f"config.json of this {family} makes {gib(total)} of tables (positions, masks) that are not in the "
            f"checkpoint; at most {gib(MAX_DERIVED)} are allowed: lower its number of positions",
            family=family,
            bytes=total,
            allowed=MAX_DERIVED,
        )
    return total


def _derived(module: nn.Module) -> dict[str, Tensor]:
    named = ((name, module._buffers[name]) for name in module._non_persistent_buffers_set)
    return {name: buffer for name, buffer in named if buffer is not None}


@torch.no_grad()
def materialise_buffers(model: PreTrainedModel, blocks: list[nn.Module], device: torch.device) -> None:
    """Computes the derived buffers and puts them on `device`.

    On the meta device these buffers have no values. The family's own `_init_weights` computes them; parameters come
    from the checkpoint and are left alone. Some families compute the buffers of all blocks when they are called with
    the module around the blocks (Falcon-H1).
    """
    roots = (model, *blocks)
    around = _models_around(model, blocks)
    missing: dict[nn.Module, list[str]] = {}
    for module in dict.fromkeys(m for root in roots for m in root.modules()):
        without = {name: buffer for name, buffer in _derived(module).items() if buffer.is_meta}
        if without:
            missing[module] = sorted(without)  # a set has no order of its own
            module._buffers |= {name: _without_values(buffer) for name, buffer in without.items()}
            _compute(around[module], module)
    if any(_unset(module, names) for module, names in missing.items()):
        for parameter in (p for root in roots for p in root.parameters()):
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        for module in (m for m in model.modules() if m._modules):
            _compute(around[module], module)
    for module, names in missing.items():
        for name in _unset(module, names):
            raise ModelRejected(f"{type(module).__name__}.{name} cannot be computed from the configuration")
        for name in names:
            module._buffers[name] = module.get_buffer(name).to(device)
        stop_choosing(module)


def _models_around(model: PreTrainedModel, blocks: list[nn.Module]) -> dict[nn.Module, PreTrainedModel]:
    """For each module the innermost model around it. transformers, too, initialises a module by that model, as a
    family's `_init_weights` may read attributes that other models around it do not have."""
    around: dict[nn.Module, PreTrainedModel] = {}
    for each in model.modules():  # a model comes before those inside of it
        if isinstance(each, PreTrainedModel):
            around |= dict.fromkeys(each.modules(), each)
    decoder = around[model.get_decoder()]
    return around | {module: decoder for block in blocks for module in block.modules()}


def _compute(model: PreTrainedModel, module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers then passes over it
    try:
        model._init_weights(module)
    except Exception as error:  # a family's code may raise exceptions of any type
        raise ModelRejected(f"{type(module).__name__} cannot be computed from the configuration: {error!r}") from error


def _unset(module: nn.Module, names: list[str]) -> list[str]:
    """Names of the buffers that still have no values."""
    return [n for n in names if (b := module.get_buffer(n)).is_floating_point() and bool(b.isnan().any())]


def _without_values(buffer: Tensor) -> Tensor:
    """A buffer on the host to compute in. It is filled with NaN, if the dtype has that, to detect a buffer that the
    family leaves unset."""
    return torch.full(buffer.shape, float("nan") if buffer.is_floating_point() else 0, dtype=buffer.dtype, device="cpu")
