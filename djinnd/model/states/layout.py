"""The modules of a model that keep a state, and where their states are in a page's state region.

state region of a page:  │ states of module 0 │ pad │ states of module 1 │ … │     each state on ALIGNMENT bytes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from djinn_client.protocol.fields.kv_layout import KvLayout, aligned
from djinnd.model.states.carrier import StateSpec
from djinnd.model.states.step_calls import StepCall
from djinnd.model.states.workspace import NOTHING, StateWorkspace


@dataclass(frozen=True, slots=True)
class Stateful:
    """A module with states."""

    block: int
    path: str  # within the block
    cache: str  # name of the forward's argument for the cache
    specs: tuple[StateSpec, ...]
    workspace: StateWorkspace = NOTHING
    calls: tuple[StepCall, ...] = ()  # for single tokens; none: its states must be gathered
    in_place: bool = False  # for single tokens, kernels read and write its states where they are


def state_bytes(modules: Sequence[Stateful]) -> int:
    """Bytes of the state region of a page; 0 for a model without states."""
    return sum(aligned(spec.nbytes) for module in modules for spec in module.specs)


def state_views(pool: Tensor, layout: KvLayout, modules: Sequence[Stateful]) -> list[list[Tensor]]:
    """For each module the views of its states, [pages, *shape] each. pool: uint8 [pages, page_bytes], contiguous."""
    specs = [spec for module in modules for spec in module.specs]
    offsets = accumulate((aligned(spec.nbytes) for spec in specs), initial=layout.state_offset)
    views = iter([_view(pool, offset, spec) for offset, spec in zip(offsets, specs, strict=False)])
    return [[next(views) for _ in module.specs] for module in modules]


def _view(pool: Tensor, offset: int, spec: StateSpec) -> Tensor:
    first, rest = divmod(offset, spec.dtype.itemsize)
    assert rest == 0
    elements = pool.view(spec.dtype)[:, first : first + torch.Size(spec.shape).numel()]
    return elements.unflatten(1, spec.shape)
