"""Experts on demand: fetches only the stacked experts that a batch's router has picked.

    host memory, pinned (streamed)  ─┐  after the router: the picked experts,
    device memory (packed)          ─┴──► unpacked on the way ──► scratch, at their own places ──► the family's module
    host memory, codes (streamed)   ────► as they are stored  ──► scratch, at their own places ──► kernels

The family's module has its [experts, …] parameters over the scratch buffer, and reads only the picked ones. The places
of the others hold leftovers of other blocks. Kernels that multiply by codes read them there. Copied as they are, codes
come at the rate of the bus; decoding on the way would read them in lines too short for it.

The fetch runs on the compute stream between the router and the experts. The picks are not known earlier, so no
computation hides the fetch. A decode step of one row moves `picked` of `count` experts; a prefill that needs all of
them moves as many bytes as the ring would have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils.hooks import RemovableHandle

from djinn_client.handover.packed import GROUP
from djinnd.weights.forms.coded_form import CodedForm
from djinnd.weights.layout import Layout
from djinnd.weights.plan import are_fetched
from djinnd.weights.store import BufferForm, Routing


@dataclass(frozen=True, slots=True)
class Stack:
    """The stacked experts of a block. They are parameters of one module, which is called with hidden states, the
    picked experts and their weights."""

    names: tuple[str, ...]  # of its [experts, …, …] parameters, relative to the block
    routing: Routing


class _Called(Exception):
    def __init__(self, picked: Tensor) -> None:
        self.picked = picked


@torch.inference_mode()
def find_stack(block: nn.Module, width: int) -> Stack | None:
    """The stacked experts of a block on the meta device whose hidden states have `width`.

    None if the block has none, if a row picks all of them, or if they are called in an unknown way. The number of
    experts that a row picks is learnt by running the parent module until it calls them.
    """
    stacks = {path: own for path, module in block.named_modules() if (own := stacked_parameters(module))}
    if len(stacks) != 1:
        return None
    ((path, parameters),) = stacks.items()
    experts, owner = block.get_submodule(path), block.get_submodule(path.rpartition(".")[0])
    count = len(next(iter(parameters.values())))
    if any(len(p) != count or p.numel() % (GROUP * count) for p in parameters.values()):
        return None  # an expert must be a whole number of packing groups, to be unpacked alone

    def called(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _Called(find_picked(args, kwargs))

    with experts.register_forward_pre_hook(called, with_kwargs=True):
        try:
            owner(torch.empty(1, 2, width, device="meta"))
        except _Called as call:
            picked = call.picked.shape[-1]
        except Exception:  # a family's forward may raise exceptions of any type
            return None
        else:
            return None
    if not are_fetched(count, picked):
        return None
    return Stack(tuple(f"{path}.{name}" for name in parameters), Routing(count, picked))


def stacked_parameters(module: nn.Module) -> dict[str, Tensor]:
    """The module's stacked experts: its three-dimensional parameters, [experts, …, …]. A convolution has none."""
    if isinstance(module, _ConvNd):
        return {}
    return {name: p for name, p in module._parameters.items() if p is not None and p.dim() == 3}


def find_picked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The experts that each row picks, int64 [rows, picked]: the only integer tensor among the arguments."""
    integers = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and not a.is_floating_point()]
    if len(integers) != 1 or integers[0].dim() != 2:
        raise TypeError("the arguments of the experts have no single [rows, picked] tensor of integers")
    return integers[0]


@dataclass(slots=True)
class StepTokens:
    """The token count of the running step, shared by all blocks of a model."""

    real: Tensor | None = None  # int32 [1] on the device: tokens before the padding; None: no token is padding


class Experts:
    """The stacked experts of one packed or streamed block. Before each call of the experts' module, the picked ones are
    fetched into scratch: by a hook, or by the kernels that take the place of the module's forward
    (model/fast/experts.py)."""

    def __init__(
        self,
        block: nn.Module,
        layout: Layout,
        form: BufferForm | None,
        routing: Routing,
        tokens: StepTokens,
        device: torch.device,
    ) -> None:
        self.layout = layout
        self.form = form
        self.module = block.get_submodule(next(iter(layout.entries)).rpartition(".")[0])
        self.routing = routing
        self._tokens = tokens
        self._picked = torch.zeros(routing.count, dtype=torch.int32, device=device)
        self._source: Tensor | None = None
        self._scratch: Tensor | None = None
        self._hook: RemovableHandle | None = None

    @property
    def real(self) -> Tensor | None:
        """StepTokens.real."""
        return self._tokens.real

    def bind(self, source: Tensor, scratch: Tensor, *, by_hook: bool = True) -> None:
        """Sets the memory to fetch from and to.

        source: all experts of the block, in their form if there is one, in pinned host memory or on the device.
        scratch: flat, in the compute dtype; the module reads the fetched experts there. uint8, if the form is a
            CodedForm: of the form, and kernels read the fetched codes there.
        by_hook: otherwise the module's forward calls `fetch_for_step`.
        """
        self.unbind()
        self._source, self._scratch = source, scratch
        if by_hook:
            self._hook = self.module.register_forward_pre_hook(self._before, with_kwargs=True)

    def unbind(self) -> None:
        """Stops fetching. The module then has plain parameters, or must not run."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = self._source = self._scratch = None

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        picked = find_picked(args, kwargs)
        wanted = self.fetch_for_step(picked)
        args = tuple(wanted if argument is picked else argument for argument in args)
        return args, {name: wanted if argument is picked else argument for name, argument in kwargs.items()}

    def fetch_for_step(self, picked: Tensor) -> Tensor:
        """Fetches what the real tokens of the step pick. → picks of all rows, int64 [rows, picked], to compute with."""
        wanted = self._of_real_tokens(picked)
        self.fetch(wanted)
        return wanted

    def _of_real_tokens(self, picked: Tensor) -> Tensor:
        """Gives padding tokens the picks of the first token, so that no expert is fetched for them."""
        real = self._tokens.real
        if real is None:
            return picked
        rows = torch.arange(len(picked), device=picked.device).unsqueeze(1)
        return torch.where(rows < real, picked, picked[:1])

    def fetch(self, picked: Tensor) -> None:
        """Queues the fetch of the experts in `picked`, int64 on the device. A captured graph may hold this call: a
        replay fetches the experts that are picked at that time."""
        source, scratch = self._source, self._scratch
        assert source is not None and scratch is not None
        self._picked.zero_().index_fill_(0, picked.reshape(-1), 1)
        if scratch.device.type == "cuda":
            self._fetch_by_kernel(source, scratch)
        else:
            self._fetch_by_copies(source, scratch)

    def _fetch_by_kernel(self, source: Tensor, scratch: Tensor) -> None:
        from djinnd.model.kernels.host_memory.fetch import (  # Triton comes with CUDA builds of torch
            fetch_packed,
            fetch_plain,
        )

        if isinstance(self.form, CodedForm) and scratch.dtype != torch.uint8:
            from djinnd.model.kernels.coded.buffers import fetch_coded

            fetch_coded(self._picked, self.form, source, scratch)
            return
        if isinstance(self.form, CodedForm):
            for stack, out in zip(self.form.stacks(source), self.form.stacks(scratch), strict=True):
                fetch_plain(self._picked, stack, out)
            return
        if self.form is not None:
            fetch_packed(self._picked, self.form, source, scratch)
            return
        for stack, out in zip(self._stacks(source), self._stacks(scratch), strict=True):
            fetch_plain(self._picked, stack, out)

    def _fetch_by_copies(self, source: Tensor, scratch: Tensor) -> None:
        picked = self._picked.nonzero().squeeze(1).tolist()
        if isinstance(self.form, CodedForm) and scratch.dtype != torch.uint8:
            for name, out in self.layout.views(scratch).items():
                for expert in picked:
                    self.form.unpack_expert(source, name, expert, out[expert])
            return
        if isinstance(self.form, CodedForm):
            for stack, out in zip(self.form.stacks(source), self.form.stacks(scratch), strict=True):
                out[picked] = stack[picked]
            return
        if self.form is not None:
            for number, out in enumerate(self._stacks(scratch)):
                rows = self.form.units[number].rows // self.routing.count
                for expert in picked:
                    self.form.unpack_rows(source, number, expert * rows, rows, out[expert].view(-1))
            return
        for stack, out in zip(self._stacks(source), self._stacks(scratch), strict=True):
            for expert in picked:
                out[expert].copy_(stack[expert])

    def _stacks(self, memory: Tensor) -> list[Tensor]:
        """Views [experts, …] of each parameter, in the order of the layout, which is also the order of the form's
        units."""
        return list(self.layout.views(memory).values())
