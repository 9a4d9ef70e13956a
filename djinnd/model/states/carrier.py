"""Carrier: stands in for transformers' cache in one call of a module that keeps a state.

The states of a batch go in, the module's forward asks for them and replaces them, and the new ones come out. A module
may keep several convolution states (a window of its last inputs) and one recurrent state (a matrix for each head).
transformers' own cache layer does what a family expects of its cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

Kind = Literal["conv", "recurrent"]

MOST_STATES = 8  # of one kind in one module; Kimi Linear has three windows


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One state of one module."""

    kind: Kind
    index: int  # transformers' state_idx
    shape: tuple[int, ...]  # of one session
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class SlotState:
    """Stands in for one state of all rows of a step: it stays where it is. Only djinnd's kernels know it, in the place
    of a family's functions for single tokens (step_calls.py)."""

    states: Tensor  # [pages, *shape], a view of the pool
    slots: Tensor  # int32 [rows, 2]: see kernels/states/slots.py

    def gathered(self) -> Tensor:
        """The rows' states, [rows, *shape], copied."""
        read = self.slots[:, 0]
        states = self.states.index_select(0, read.clamp(min=0))
        return states.masked_fill((read < 0).view(-1, *[1] * (states.dim() - 1)), 0)

    def to(self, dtype: torch.dtype) -> SlotState:
        """A family may convert the new state to the dtype of its cache; it has that of the pool."""
        return self


class Carrier:
    """The part of transformers' cache that modules with a state use, for one module. transformers 5.24 has methods for
    all of it; in older versions families reach into `layers`."""

    def __init__(self, states: int) -> None:
        self._layer = LinearAttentionLayer(number_of_states=states)
        self.layers = _Everywhere(self._layer)

    @classmethod
    def with_states(cls, specs: Sequence[StateSpec], states: Sequence[Tensor | SlotState]) -> Carrier:
        """A cache that holds `states` [rows, *shape], one for each of `specs`. They are overwritten."""
        carrier = cls(1 + max(spec.index for spec in specs))
        layer: Any = carrier._layer
        for spec, state in zip(specs, states, strict=True):
            if spec.kind == "conv":
                layer.conv_states[spec.index] = state
                layer.conv_kernel_size[spec.index] = spec.shape[-1]
                layer.is_conv_states_initialized[spec.index] = True
            else:
                layer.recurrent_states[spec.index] = state
                layer.is_recurrent_states_initialized[spec.index] = True
        for index in range(layer.number_of_states):
            layer.has_previous_state[index] = True
        return carrier

    def states(self, specs: Sequence[StateSpec]) -> list[Tensor]:
        """The states after the call, [rows, *shape]."""
        layer = self._layer
        made = [(layer.conv_states if spec.kind == "conv" else layer.recurrent_states)[spec.index] for spec in specs]
        assert all(state is not None for state in made)
        return [state for state in made if state is not None]

    def specs(self) -> list[StateSpec]:
        """The states that a call without earlier ones has made, of one session."""
        layer = self._layer
        made: list[tuple[Kind, dict[int, Tensor | None]]] = [
            ("conv", layer.conv_states),
            ("recurrent", layer.recurrent_states),
        ]
        return [
            StateSpec(kind, index, tuple(state.shape[1:]), state.dtype)
            for kind, states in made
            for index, state in states.items()
            if state is not None
        ]

    # --- transformers' interface --------------------------------------------------------------------------------------

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return bool(self._layer.has_previous_state[state_idx or 0])

    def is_recording_past(self, layer_idx: int = 0) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._layer.conv_states[state_idx] if self._layer.has_previous_state[state_idx] else None

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        return self._layer.update_conv_state(conv_states, state_idx, **kwargs)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._layer.recurrent_states[state_idx] if self._layer.has_previous_state[state_idx] else None

    def update_recurrent_state(
        self, recurrent_states: Tensor | SlotState, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor | SlotState:
        if isinstance(recurrent_states, SlotState):
            return recurrent_states  # the kernel has written it
        return self._layer.update_recurrent_state(recurrent_states, state_idx, **kwargs)


class _Everywhere:
    """A list that has one layer at every index."""

    def __init__(self, layer: LinearAttentionLayer) -> None:
        self._layer = layer

    def __getitem__(self, index: int) -> LinearAttentionLayer:
        return self._layer
