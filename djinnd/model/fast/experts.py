"""FusedExperts: the forward of a family's stacked experts by djinnd's kernels, with weights plain or in their code.

The modules are those of transformers' experts interface (integrations/moe.py): two stacks of matrices, maybe biases,
and a function between the products. A trial finds out what the function computes. It runs a copy of the module with
small random weights on the CPU, so it needs neither the weights nor a GPU.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from djinnd.model.kernels.coded.facts import facts_of
from djinnd.model.kernels.experts.forward import experts_forward, reads_codes
from djinnd.model.kernels.experts.gating import CLAMPED, GELU_TANH, RELU_SQUARED, SILU, Activation, reference
from djinnd.model.kernels.experts.matrices import Matrices, plain_matrices
from djinnd.model.kernels.launching.launches import UNAVAILABLE
from djinnd.weights.forms.coded_form import Code
from djinnd.weights.layout import Layout

STACKS = (("gate_up_proj", "down_proj"), ("up_proj", "down_proj"))  # with a gate, and without
_WIDTH, _ROWS, _PICKS = 16, 4, 2  # of the trial's tensors

Fetch = Callable[[Tensor], Tensor]  # picks of all rows → picks to compute with; fetches those to the parameters' memory
Decode = Callable[[str, int], Tensor]  # a parameter's name, an expert → the expert's matrix of that parameter


@dataclass(frozen=True, slots=True)
class Kind:
    """The facts of a family's experts that the kernels need."""

    stacks: tuple[str, str]  # the parameters' names
    activation: Activation
    is_transposed: bool  # parameters are [experts, in, out]
    has_bias: bool


class FusedExperts:
    """Takes the place of the module's `forward`. The module keeps its parameters and hooks.

    A batch with few rows for each expert reads their codes, if `bind` has given any. Every other batch reads the
    module's parameters, after the fetch if there is one. The family's forward computes where a kernel is not available.

    If `bind` has given a `decode`, the parameters have no memory: every batch reads the codes, after the fetch if there
    is one. Where a kernel is not available, experts are decoded one after the other.
    """

    def __init__(self, module: nn.Module, kind: Kind, real: Callable[[], Tensor | None]) -> None:
        """real: → int32 [1], the rows of the running step before its padding; or None."""
        self.kind = kind
        self._module = module
        self._own = module.forward
        self._signature = inspect.signature(module.forward)
        self._real = real
        self._stored: tuple[Matrices, Matrices] | None = None
        self._fetch: Fetch | None = None
        self._decode: Decode | None = None
        module.forward = self

    def bind(self, stored: Mapping[str, Matrices] | None, fetch: Fetch | None, decode: Decode | None = None) -> None:
        """Sets where the weights are.

        stored: the stacks by their parameters' names, without biases, if the device has them in a code.
        fetch: brings experts to the parameters; with `decode`, to `stored`. None if all are there, or none is.
        decode: None if the parameters hold the experts that a batch needs, after its fetch.
        """
        first, second = self.kind.stacks
        self._stored = None if stored is None else (stored[first], stored[second])
        self._fetch, self._decode = fetch, decode

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """x [rows, hidden], picks int64 [rows, picks], and their weights → [rows, hidden]."""
        x, picked, weights = self._signature.bind(*args, **kwargs).args
        real, activation, decode = self._real(), self.kind.activation, self._decode
        if decode is not None and self._fetch is not None:
            picked = self._fetch(picked)
        if self._stored is not None and (
            decode is not None or reads_codes(len(picked), picked.shape[1], self._stored[0].experts)
        ):
            try:
                first, second = (replace(each, bias=self._bias(number)) for number, each in enumerate(self._stored))
                return experts_forward(x, picked, weights, first, second, activation, real)
            except UNAVAILABLE:
                if decode is not None:
                    return self._one_by_one(x, picked, weights, decode)
        if self._fetch is not None:
            picked = self._fetch(picked)
        try:
            return experts_forward(x, picked, weights, self._plain(0), self._plain(1), activation, real)
        except UNAVAILABLE:
            out: Tensor = self._own(x, picked, weights)
            return out

    def _one_by_one(self, x: Tensor, picked: Tensor, weights: Tensor, decode: Decode) -> Tensor:
        """Like `__call__`. Waits for the device, and takes the memory of one decoded expert."""
        out, experts = torch.zeros_like(x), range(self._stored[0].experts if self._stored is not None else 0)
        for expert in filter(experts.__contains__, picked.unique().tolist()):
            rows, picks = (picked == expert).nonzero(as_tuple=True)
            y = x[rows]
            for number, name in enumerate(self.kind.stacks):
                weight, bias = decode(name, expert), self._bias(number)
                y = y @ (weight if self.kind.is_transposed else weight.T)
                y = y if bias is None else y + bias[expert]
                y = y if number else reference(self.kind.activation, y)
            out.index_add_(0, rows, (y * weights[rows, picks, None]).to(out.dtype))
        return out

    def _plain(self, number: int) -> Matrices:
        weight = self._module._parameters[self.kind.stacks[number]]
        assert weight is not None
        return plain_matrices(weight, self._bias(number), is_transposed=self.kind.is_transposed)

    def _bias(self, number: int) -> Tensor | None:
        return self._module._parameters[f"{self.kind.stacks[number]}_bias"] if self.kind.has_bias else None


def fused_experts_of(module: nn.Module, real: Callable[[], Tensor | None]) -> FusedExperts | None:
    """Installs the kernels in a module of stacked experts. None if they do not compute what the module does."""
    kind = None if isinstance(module.forward, FusedExperts) else kind_of(module)
    return None if kind is None else FusedExperts(module, kind, real)


def codes_suffice(module: nn.Module, layout: Layout, codes: Mapping[str, Code]) -> bool:
    """Returns True if the kernels compute what the module does from the codes of its stacks alone. layout: of the
    stacks. codes: by their names in the layout."""
    kind = kind_of(module) if codes else None
    if kind is None:
        return False
    shapes = {name: code.stack_shape(layout.entries[name].shape) for name, code in codes.items()}
    return all(
        code.is_transposed == kind.is_transposed and facts_of(code.coding, *shapes[name][1:]) is not None
        for name, code in codes.items()
    )


@torch.inference_mode()
def kind_of(module: nn.Module) -> Kind | None:
    """None if the kernels cannot compute what the module does. Its parameters may be on any device."""
    parameters = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    names = parameters.keys()
    stacks = next((pair for pair in STACKS if names >= set(pair)), None)
    if stacks is None:
        return None
    biases_of = tuple(f"{name}_bias" for name in stacks)
    has_bias, is_transposed = names >= set(biases_of), bool(getattr(module, "is_transposed", False))
    experts = len(parameters[stacks[0]])
    if names - {*stacks, *(biases_of if has_bias else ())} or experts != len(parameters[stacks[1]]):
        return None
    trial, activations = copy.copy(module), _candidates(module, is_gated=stacks == STACKS[0])
    first, second, biases = _random_weights(experts, 2 if stacks == STACKS[0] else 1)
    weights_of = [each.transpose(1, 2).contiguous() if is_transposed else each for each in (first, second)]
    given = dict(zip(stacks + biases_of, [*weights_of, *biases], strict=True))
    trial._parameters = {name: nn.Parameter(given[name], requires_grad=False) for name in names}
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(_ROWS, _WIDTH, generator=generator)
    picked = torch.stack([torch.randperm(experts, generator=generator)[:_PICKS] for _ in range(_ROWS)])
    weights = torch.rand(_ROWS, _PICKS, generator=generator)
    try:
        wanted = trial.forward(x, picked, weights)
    except Exception:  # a family's forward may raise exceptions of any type
        return None
    for activation in activations:
        if is_transposed and activation.is_gated and not activation.is_interleaved:
            continue  # the kernels would load single numbers
        both = torch.einsum("rh,rpoh->rpo", x, first[picked]) + (biases[0][picked] if has_bias else 0)
        y = torch.einsum("rpw,rphw->rph", reference(activation, both), second[picked])
        got = ((y + (biases[1][picked] if has_bias else 0)) * weights.unsqueeze(-1)).sum(1)
        if wanted.shape == got.shape and torch.allclose(wanted, got, rtol=1e-4, atol=1e-4 * float(got.abs().max())):
            return Kind(stacks, activation, is_transposed, has_bias)
    return None


def _candidates(module: nn.Module, *, is_gated: bool) -> list[Activation]:
    if not is_gated:
        return [Activation(RELU_SQUARED.value)]
    found = [Activation(kind.value) for kind in (SILU, GELU_TANH)]
    alpha, limit = getattr(module, "alpha", None), getattr(module, "limit", None)
    if isinstance(alpha, int | float) and isinstance(limit, int | float):
        found.append(Activation(CLAMPED.value, alpha=float(alpha), limit=float(limit)))
    return found + [replace(each, is_interleaved=True) for each in found]


def _random_weights(experts: int, parts: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """→ both stacks [experts, out, in] and their biases. An expert's first matrix has `parts` times _WIDTH rows. The
    results of the first product are large enough for clamps to matter."""
    generator = torch.Generator().manual_seed(0)
    first = 2 * torch.randn(experts, parts * _WIDTH, _WIDTH, generator=generator)
    second = torch.randn(experts, _WIDTH, _WIDTH, generator=generator)
    return first, second, [torch.randn(experts, n, generator=generator) for n in (parts * _WIDTH, _WIDTH)]
