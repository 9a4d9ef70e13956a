"""FusedRouter: the forward of a family's router by one product and one kernel.

A router of transformers has a matrix, maybe a bias and a correction for each expert, and returns its logits, the picked
experts and their weights. Behind the product there are two to fifteen small operations. A trial finds out what they
compute. It runs a copy of the module with random weights on the CPU, so it needs neither the weights nor a GPU.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from djinnd.model.fast.linear import fast_linear
from djinnd.model.kernels.experts.routing import (
    SIGMOID,
    SOFTMAX,
    SOFTMAX_OF_PICKS,
    Weighting,
    keys_of,
    route,
    weights_of,
)
from djinnd.model.kernels.launching.launches import UNAVAILABLE

Item = Literal["logits", "picks", "weights"]
Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]

_EPSILON = 1e-20  # stands in the code of most families; other constants are attributes of their modules
# Rows of a trial: usual logits, logits that a bound would change, and logits with sigmoids of 1, of 0, or
# so small that what is added to their sum shows.
_SHIFTS = [0.0] * 14 + [200.0, -200.0, -45.0, -14.0]
_SCALES = [1.0] * 12 + [32.0] * 2 + [1.0] * 4


@dataclass(frozen=True, slots=True)
class Kind:
    """The facts of a family's router that the kernel needs."""

    weighting: Weighting
    picks: int
    items: tuple[tuple[Item, torch.dtype], ...]  # of the result, in order
    is_wide: bool  # the product is in float32
    flattens: bool  # x may have more than two dimensions
    correction: str | None  # its name in the module; None: it is the second argument, or there is none

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype."""
        return next(dtype for item, dtype in self.items if item == "weights")


class FusedRouter:
    """Takes the place of the module's `forward`. The module keeps its parameters and hooks. The family's forward
    computes where the kernel is not available."""

    def __init__(self, module: nn.Module, kind: Kind) -> None:
        self.kind = kind
        self._module = module
        self._own = module.forward
        self._signature = inspect.signature(module.forward)
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """x [..., hidden], and maybe a correction [experts] → the family's items: logits [rows, experts], picks int64
        [rows, picks], and their weights."""
        x, *given = self._signature.bind(*args, **kwargs).args
        if x.dim() == 2 or self.kind.flattens:
            try:
                return self._route(x.reshape(-1, x.shape[-1]), *given)
            except UNAVAILABLE:
                pass
        out: tuple[Tensor, ...] = self._own(*args, **kwargs)
        return out

    def _route(self, x: Tensor, correction: Tensor | None = None) -> tuple[Tensor, ...]:
        kind, tensors = self.kind, _tensors(self._module)
        if kind.correction is not None:
            correction = tensors[kind.correction]
        logits = _logits(x, tensors["weight"], tensors.get("bias"), fast_linear, is_wide=kind.is_wide)
        picked, weights = route(logits, correction, kind.picks, kind.weighting, kind.dtype)
        found: dict[Item, Tensor] = {"logits": logits, "picks": picked, "weights": weights}
        return tuple(found[item].to(dtype) for item, dtype in kind.items)


def fuse_routers(blocks: Sequence[nn.Module], dtype: torch.dtype) -> None:
    """Installs the kernel in every router that computes what it does. dtype: of the activations."""
    tried: dict[object, Kind | None] = {}  # routers with equal facts share a trial
    for module in (router for block in blocks for router in _routers(block)):
        attributes = {name: value for name, value in vars(module).items() if isinstance(value, int | float | str)}
        tensors = {name: (tensor.shape, tensor.dtype) for name, tensor in _tensors(module).items()}
        facts = type(module), *sorted(attributes.items()), *tensors.items()
        if facts not in tried:
            tried[facts] = kind_of(module, dtype)
        if (kind := tried[facts]) is not None:
            FusedRouter(module, kind)


def _routers(block: nn.Module) -> list[nn.Module]:
    """The modules with a matrix of as many rows as a stack of the block has matrices. A trial refuses those that are no
    router."""
    counts = {len(parameter) for parameter in block.parameters() if parameter.dim() == 3}
    return [
        module
        for module in block.modules()
        if (weight := module._parameters.get("weight")) is not None
        and weight.dim() == 2
        and len(weight) in counts
        and "forward" not in vars(module)
    ]


@torch.inference_mode()
def kind_of(module: nn.Module, dtype: torch.dtype) -> Kind | None:
    """None if the kernel cannot compute what the module does. Its parameters may be on any device."""
    tensors, arguments = _tensors(module), inspect.signature(module.forward).parameters.values()
    experts, hidden = tensors.pop("weight").shape
    own = [name for name in tensors if name != "bias"]
    if (
        len(own) + len(arguments) > 2
        or any(argument.default is not argument.empty for argument in arguments)
        or any(tensor.shape != (experts,) for tensor in tensors.values())
        or any(True for child in module.children() for _ in child.parameters())
    ):
        return None
    generator = torch.Generator().manual_seed(0)
    x, weight = _random_product(experts, hidden, generator)
    x, weight = x.to(dtype), weight.to(dtype)
    vectors = {name: torch.randn(experts, generator=generator).to(tensor.dtype) for name, tensor in tensors.items()}
    given = [torch.randn(experts, generator=generator) for _ in range(len(arguments) - 1)]
    correction = next(iter([*(vectors[name] for name in own), *given]), None)
    trial = copy.copy(module)
    random = vectors | {"weight": weight}
    trial._parameters = {n: nn.Parameter(random[n], requires_grad=False) for n in random if n in module._parameters}
    trial._buffers = {name: random[name] for name in random if name in module._buffers}
    try:
        wanted = trial.forward(x, *given)
    except Exception:  # a family's forward may raise exceptions of any type
        return None
    if not isinstance(wanted, tuple) or not all(isinstance(each, Tensor) for each in wanted):
        return None
    for is_wide in (False, True):
        logits = _logits(x, weight, vectors.get("bias"), linear, is_wide=is_wide)
        names = [_name(each, logits) for each in wanted]
        if sorted(names) not in (["logits", "picks", "weights"], ["picks", "weights"]):
            continue
        picked, weights = (wanted[names.index(name)] for name in ("picks", "weights"))
        for weighting in _candidates(module, is_corrected=correction is not None):
            if _agrees(weighting, logits, correction, picked, weights):
                items = tuple(zip(names, (each.dtype for each in wanted), strict=True))
                flattens = _flattens(trial, x, given, wanted)
                return Kind(weighting, picked.shape[1], items, is_wide, flattens, own[0] if own else None)
    return None


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """The module's own parameters and buffers."""
    both = (module._parameters | module._buffers).items()
    return {name: tensor for name, tensor in both if tensor is not None}


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, multiply: Multiply, *, is_wide: bool) -> Tensor:
    if not is_wide:
        return multiply(x, weight, bias)
    return multiply(x.float(), weight.float(), None if bias is None else bias.float())


def _random_product(experts: int, hidden: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """→ x [rows, hidden] and a router's matrix. The first column of x is what a row adds to all its logits."""
    x = torch.randn(len(_SCALES), hidden, generator=generator) * torch.tensor(_SCALES).unsqueeze(1)
    weight = torch.randn(experts, hidden, generator=generator) * 2 * hidden**-0.5
    x[:, 0], weight[:, 0] = torch.tensor(_SHIFTS), 1.0
    return x, weight


def _name(item: Tensor, logits: Tensor) -> Item:
    if not item.is_floating_point():
        return "picks"
    return "logits" if item.shape == logits.shape and torch.equal(item, logits.to(item.dtype)) else "weights"


def _candidates(module: nn.Module, *, is_corrected: bool) -> Iterator[Weighting]:
    """Factors and what is added to sums are constants of the code, or numbers among the module's attributes."""
    numbers = sorted({float(each) for each in vars(module).values() if isinstance(each, int | float)})
    if not is_corrected:
        yield from (Weighting(SOFTMAX_OF_PICKS.value, factor=factor) for factor in (1.0, *numbers))
    for scores, factor in product((SOFTMAX.value, SIGMOID.value), (1.0, *numbers)):
        yield Weighting(scores, is_corrected, factor=factor)
        for epsilon in (0.0, _EPSILON, *numbers):
            yield Weighting(scores, is_corrected, is_normalised=True, epsilon=epsilon, factor=factor)


def _agrees(weighting: Weighting, logits: Tensor, correction: Tensor | None, picked: Tensor, weights: Tensor) -> bool:
    """Returns True if these are picks of the largest keys, in any order, and their weights to the bit."""
    if picked.dim() != 2 or picked.shape != weights.shape:
        return False
    keys = keys_of(weighting, logits, correction)
    found, largest = keys.gather(1, picked).sort().values, keys.topk(picked.shape[1]).values.sort().values
    if not torch.equal(found, largest):
        return False
    got = weights_of(weighting, logits, picked, weights.dtype)
    return torch.allclose(got, weights, rtol=0, atol=0, equal_nan=True)


def _flattens(trial: nn.Module, x: Tensor, given: Sequence[Tensor], wanted: tuple[Tensor, ...]) -> bool:
    """Returns True if the trial's result for two sequences has the shape of that for their rows."""
    try:
        got = trial.forward(x.view(2, -1, x.shape[1]), *given)
    except Exception:  # a family's forward may raise exceptions of any type
        return False
    return all(one.shape == other.shape for one, other in zip(got, wanted, strict=True))
