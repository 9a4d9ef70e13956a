"""StateModule: runs a module that keeps a state over the segments of a step.

It replaces the module's forward. The module itself computes, with the states of the segment's session in the place of
transformers' cache. For single tokens, the states may stay in the pool (`Stateful.in_place`). The module then gets
their slots, and its functions for single tokens are kernels (fast/state_steps.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from djinnd.model.families.selective_scan import starting_from
from djinnd.model.states.carrier import Carrier, SlotState
from djinnd.model.states.layout import Stateful
from djinnd.model.states.segments import Segments


@dataclass(slots=True)
class StateContext:
    """The segments of the running step, shared by all modules of a model. None: tokens follow nothing, and their state
    is not kept."""

    segments: Segments | None = None


class StateModule:
    """The forward of one module. `states`: its views of the pool, [pages, *shape] each; set when there is a pool."""

    def __init__(self, module: nn.Module, told: Stateful, context: StateContext) -> None:
        self._run: Callable[..., Any] = module.forward
        self._told = told
        self._context = context
        self.states: list[Tensor] = []

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """hidden_states [1, tokens, width] → [1, tokens, width], in a tuple if the module returns one."""
        assert not args, "a module with a state is called with names"
        kwargs.pop("attention_mask", None)  # it marks padding, and there is none
        segments = self._context.segments
        if segments is None or not segments.has_tokens:  # without tokens, a step lists kernels
            return self._run(hidden_states, **{**kwargs, self._told.cache: None})
        out: Tensor | None = None
        given: Any = None
        for tokens, given in self._parts(hidden_states, segments, kwargs):
            result = given[0] if isinstance(given, tuple) else given
            if out is None:
                out = result.new_zeros(1, hidden_states.shape[1], result.shape[-1])
            out[0, tokens] = result.flatten(0, 1)
        assert out is not None
        return (out, None) if isinstance(given, tuple) else out

    def _parts(
        self, hidden: Tensor, segments: Segments, kwargs: dict[str, Any]
    ) -> Iterator[tuple[Tensor | slice, Any]]:
        """Runs the parts of the step → (their tokens, what the module returned)."""
        if len(segments.slots):
            tokens = slice(None) if segments.singles is None else segments.singles
            yield tokens, self._step(hidden[0, tokens].unsqueeze(1), segments.slots, kwargs)
        for first, count, read, write in segments.longer:
            earlier = [
                torch.zeros_like(state[:1]) if read is None else state[read : read + 1].clone() for state in self.states
            ]
            given, new = self._call(hidden[:, first : first + count], earlier, kwargs)
            for state, value in zip(self.states, new, strict=True):
                state[write].copy_(value[0])
            yield slice(first, first + count), given

    def _step(self, hidden: Tensor, slots: Tensor, kwargs: dict[str, Any]) -> Any:
        """Runs one token of each row: [rows, 1, width]."""
        told, states = self._told, [SlotState(state, slots) for state in self.states]
        if told.in_place:
            return self._run(hidden, **{**kwargs, told.cache: Carrier.with_states(told.specs, states)})
        given, new = self._call(hidden, [state.gathered() for state in states], kwargs)
        write = slots[:, 1].long()
        for state, value in zip(self.states, new, strict=True):
            state.index_copy_(0, write, value.to(state.dtype))
        return given

    def _call(self, hidden: Tensor, earlier: list[Tensor], kwargs: dict[str, Any]) -> tuple[Any, list[Tensor]]:
        told = self._told
        cache = Carrier.with_states(told.specs, earlier)
        recurrent = [state for spec, state in zip(told.specs, earlier, strict=True) if spec.kind == "recurrent"]
        with starting_from(recurrent[0] if recurrent else None):
            given = self._run(hidden, **{**kwargs, told.cache: cache})
        return given, cache.states(told.specs)
