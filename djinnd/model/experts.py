"""Experts on demand: of stacked experts, only those that a batch's router has picked come to where they are read.

    host memory, pinned (streamed)  ─┐  when the router has picked: those experts,
    device memory (packed)          ─┴──► decoded on the way ──► scratch, at their own places ──► the family's module

The family's experts module reads [experts, …] parameters over the scratch buffer, of which it touches only the picked
ones. What lies in the places of the others is left over from other blocks.

The fetch is work of the compute stream, between the router and the experts: nobody knows earlier what to fetch, so no
computing hides it. For one row it moves `picked` of `count` experts; a prefill that needs all of them moves the bytes
that the ring would have moved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from djinn_client.packed import GROUP, PackedForm
from djinnd.weights.layout import Layout
from djinnd.weights.plan import are_fetched
from djinnd.weights.store import Routing


@dataclass(frozen=True, slots=True)
class Stack:
    """Stacked experts of a block: parameters of one module, called with hidden states, which experts, their weights."""

    names: tuple[str, ...]  # of its [experts, …, …] parameters, in the block
    routing: Routing


class _Called(Exception):
    def __init__(self, picked: Tensor) -> None:
        self.picked = picked


@torch.inference_mode()
def find_stack(block: nn.Module, width: int) -> Stack | None:
    """Of a block on the meta device, whose hidden states have `width`. None: it has no experts, its router picks all of
    them, or they are not called as others are.

    How many experts a row picks is learnt: the module that has the experts is run until it calls them.
    """
    stacks = {path: own for path, module in block.named_modules() if (own := _stacked(module))}
    if len(stacks) != 1:
        return None
    ((path, parameters),) = stacks.items()
    experts, owner = block.get_submodule(path), block.get_submodule(path.rpartition(".")[0])
    count = len(next(iter(parameters.values())))
    if any(len(p) != count or p.numel() % (GROUP * count) for p in parameters.values()):
        return None  # an expert that is no whole groups cannot be decoded alone

    def called(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _Called(_picked(args, kwargs))

    with experts.register_forward_pre_hook(called, with_kwargs=True):
        try:
            owner(torch.empty(1, 2, width, device="meta"))
        except _Called as call:
            picked = call.picked.shape[-1]
        except Exception:  # whatever a family's forward stumbles over
            return None
        else:
            return None
    if not are_fetched(count, picked):
        return None
    return Stack(tuple(f"{path}.{name}" for name in parameters), Routing(count, picked))


def _stacked(module: nn.Module) -> dict[str, Tensor]:
    """Its parameters that are [experts, …, …]."""
    return {name: p for name, p in module._parameters.items() if p is not None and p.dim() == 3}


def _picked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Which experts each row picks, int64 [rows, picked]: the one argument that is no floating point."""
    integers = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and not a.is_floating_point()]
    if len(integers) != 1 or integers[0].dim() != 2:
        raise TypeError("the experts are not told which of them each row picks")
    return integers[0]


@dataclass(slots=True)
class StepTokens:
    """Of the step that runs, for all blocks of a model."""

    real: Tensor | None = None  # int32 [1] on the device: how many tokens there are before those that pad


class Experts:
    """The experts of one block that are not on the device as they are computed with."""

    def __init__(
        self,
        block: nn.Module,
        layout: Layout,
        form: PackedForm | None,
        routing: Routing,
        tokens: StepTokens,
        device: torch.device,
    ) -> None:
        self.layout = layout
        self.form = form
        self._module = block.get_submodule(next(iter(layout.entries)).rpartition(".")[0])
        self._routing = routing
        self._tokens = tokens
        self._picked = torch.zeros(routing.count, dtype=torch.int32, device=device)
        self._fetches = torch.zeros(routing.count, dtype=torch.int64, device=device)  # of each, since they were bound
        self._source: Tensor | None = None
        self._scratch: Tensor | None = None
        self._hook: RemovableHandle | None = None

    def bind(self, source: Tensor, scratch: Tensor) -> None:
        """`source`: where all of them are, packed if they have a packed form; in pinned host memory, or on the device.
        `scratch`: flat, where the module reads the ones that have been fetched."""
        self.unbind()
        self._source, self._scratch = source, scratch
        self._fetches.zero_()
        self._hook = self._module.register_forward_pre_hook(self._before, with_kwargs=True)

    def unbind(self) -> None:
        """The module finds its parameters by itself, or must not run."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = self._source = self._scratch = None

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        picked = _picked(args, kwargs)
        wanted = self._of_real_tokens(picked)
        self.fetch(wanted)
        args = tuple(wanted if argument is picked else argument for argument in args)
        return args, {name: wanted if argument is picked else argument for name, argument in kwargs.items()}

    def _of_real_tokens(self, picked: Tensor) -> Tensor:
        """Tokens that pad pick what the first one picks: nothing is fetched for them."""
        real = self._tokens.real
        if real is None:
            return picked
        rows = torch.arange(len(picked), device=picked.device).unsqueeze(1)
        return torch.where(rows < real, picked, picked[:1])

    def fetch(self, picked: Tensor) -> None:
        """Queues the fetch of the experts in `picked`, int64 on the device. A captured graph may hold it: a replay
        fetches what is picked then."""
        source, scratch = self._source, self._scratch
        assert source is not None and scratch is not None
        self._picked.zero_().index_fill_(0, picked.reshape(-1), 1)
        self._fetches += self._picked
        if scratch.device.type == "cuda":
            self._fetch_by_kernel(source, scratch)
        else:
            self._fetch_by_copies(source, scratch)

    def _fetch_by_kernel(self, source: Tensor, scratch: Tensor) -> None:
        from djinnd.model.kernels import fetch_packed, fetch_plain  # needs Triton, of CUDA builds of torch

        if self.form is not None:
            fetch_packed(self._picked, self.form, source, scratch)
            return
        for stack, out in zip(self._stacks(source), self._stacks(scratch), strict=True):
            fetch_plain(self._picked, stack, out)

    def _fetch_by_copies(self, source: Tensor, scratch: Tensor) -> None:
        picked = self._picked.nonzero().squeeze(1).tolist()
        if self.form is not None:
            for number, out in enumerate(self._stacks(scratch)):
                rows = self.form.units[number].rows // self._routing.count
                for expert in picked:
                    self.form.unpack_rows(source, number, expert * rows, rows, out[expert].view(-1))
            return
        for stack, out in zip(self._stacks(source), self._stacks(scratch), strict=True):
            for expert in picked:
                out[expert].copy_(stack[expert])

    def _stacks(self, memory: Tensor) -> list[Tensor]:
        """[experts, …] each, in the order of the layout, which is that of the form's units."""
        return list(self.layout.views(memory).values())

    @property
    def fetched_bytes(self) -> int:
        """Since they were bound, without patches. Waits for the device."""
        assert self._source is not None
        expert = self.layout.numel // self._routing.count
        return int(self._fetches.sum()) * (expert * 3 // 2 if self.form else expert * self._source.itemsize)
