"""Derived buffers: tensors that modules compute from the configuration, such as rotary frequencies, sinusoids and
causal masks.

No checkpoint contains them: their size depends only on numbers in config.json. It is checked before they get memory.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from djinn_client.errors import ModelRejected
from djinnd.device.budget import gib
from djinnd.model.family.rope import stop_choosing

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
def materialise_buffers(model: nn.Module, blocks: list[nn.Module], device: torch.device) -> None:
    """Computes the derived buffers and puts them on `device`.

    On the meta device these buffers have no values. The family's own `_init_weights` computes them; parameters come
    from the checkpoint and are left alone.
    """
    for module in [m for root in (model, *blocks) for m in root.modules()]:
        missing = {name: buffer for name, buffer in _derived(module).items() if buffer.is_meta}
        if not missing:
            continue
        for parameter in module.parameters():
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers then passes over it
        module._buffers |= {name: _without_values(buffer) for name, buffer in missing.items()}
        try:
            model._init_weights(module)  # type: ignore[operator]
        except Exception as error:  # a family's code may raise exceptions of any type
            raise ModelRejected(
                f"{type(module).__name__} cannot be computed from the configuration: {error!r}"
            ) from error
        for name in sorted(missing):  # a set has no order of its own
            buffer = module._buffers[name]
            assert buffer is not None
            if buffer.is_floating_point() and buffer.isnan().any():
                raise ModelRejected(f"{type(module).__name__}.{name} cannot be computed from the configuration")
            module._buffers[name] = buffer.to(device)
        stop_choosing(module)


def _without_values(buffer: Tensor) -> Tensor:
    """A buffer on the host to compute in. It is filled with NaN, if the dtype has that, to detect a buffer that the
    family leaves unset."""
    return torch.full(buffer.shape, float("nan") if buffer.is_floating_point() else 0, dtype=buffer.dtype, device="cpu")
