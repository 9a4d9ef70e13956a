"""FastRope: one kernel in the place of a family's `apply_rotary_pos_emb`, if their results are equal to the bit.

A family's attention calls that function by name in the family's own file, so it is replaced there, in this process
only. Layouts and roundings differ between families (interleaved pairs, angles of half a head, float32 to the end). A
trial decides which calls the kernel serves. All others, such as tensors on the CPU, go to the family's own function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from djinnd.model.kernels.fused.rope import rope
from djinnd.model.kernels.launching.launches import UNAVAILABLE

NAME = "apply_rotary_pos_emb"

Rope = Callable[..., tuple[Tensor, Tensor]]


class FastRope:
    """Replaces the family's function `own`. Calls the kernel where a trial with such tensors agreed, and `own`
    otherwise."""

    def __init__(self, own: Rope) -> None:
        self.own = own
        # (dtype of q and k, dtype of the angles, whether the two halves of a head share their angles)
        self._served: set[tuple[torch.dtype, torch.dtype, bool]] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 4 and not kwargs and self._serves(*args):
            return rope(*args)
        return self.own(*args, **kwargs)

    def _serves(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
        is_half = cos.shape[-1] != q.shape[-1]
        return (q.dtype, cos.dtype, is_half) in self._served and _is_plain(q, k, cos, sin)

    def try_with(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Tries the kernel with queries and keys of `dtype`. Returns True if it agrees for some kind of angles."""
        kinds = product({dtype, torch.float32}, (False, True))
        agreeing = {(dtype, angles, half) for angles, half in kinds if self.agrees(dtype, angles, device, half=half)}
        self._served |= agreeing
        return bool(agreeing)

    def agrees(self, dtype: torch.dtype, angles: torch.dtype, device: torch.device, *, half: bool = False) -> bool:
        """Returns True if the kernel gives the same as `own` for queries and keys of `dtype` and such angles. half: the
        two halves of a head share their angles."""
        generator, width = torch.Generator(device).manual_seed(0), 32 if half else 64
        q, k, cos, sin = (
            torch.randn(shape, device=device, dtype=kind, generator=generator)
            for shape, kind in (((1, 4, 5, 64), dtype), ((1, 2, 5, 64), dtype), *[((1, 5, width), angles)] * 2)
        )
        try:
            wanted = self.own(q, k, cos, sin)
        except Exception:  # a function of the same name with other arguments
            return False
        try:
            got = rope(q, k, cos, sin)
        except UNAVAILABLE:
            return False
        return len(wanted) == 2 and all(
            isinstance(w, Tensor) and w.dtype == g.dtype and torch.equal(w, g) for w, g in zip(wanted, got, strict=True)
        )


def _is_plain(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Returns True for a flattened batch on a CUDA device. Its angles must cover whole heads, or half of each."""
    return (
        q.is_cuda
        and q.dtype == k.dtype
        and q.shape[0] == 1
        and cos.shape == sin.shape
        and cos.shape[:2] == (1, q.shape[2])
        and cos.shape[2] in (q.shape[3], q.shape[3] // 2)
        and cos.stride() == sin.stride()
        and q.stride(3) == k.stride(3) == 1
    )


@torch.inference_mode()
def replace_rope(root: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Replaces the function in the Python module of every class under `root` whose forward calls it."""
    for kind in {type(module) for module in root.modules()}:
        forward = inspect.unwrap(kind.forward)
        names = forward.__globals__
        if NAME in forward.__code__.co_names and NAME in names:
            fast = names[NAME] if isinstance(names[NAME], FastRope) else FastRope(names[NAME])
            if fast.try_with(dtype, device):
                names[NAME] = fast
