"""The hidden states that a head reads, on the device: of all tokens of its target's last step, and of a few earlier.

    previous [tokens] │ kept [HEADS.places] │ step [tokens]

    previous    before each token of the head's next pass (model/family/heads.py)
    kept        of positions before a token that is not known yet, or too few for a pass
    step        of all tokens of the target's last step

A place is the index of a row. The target and its head are on one stream: a place that has been given back may be
written as soon as the pass that reads it has been launched.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from djinnd.core.tuning import HEADS
from djinnd.device import Device
from djinnd.model.copies.upload import upload


class HiddenStates:
    """Owned by the head's runner. Its other calls belong to `computing` of the device. `tokens`: most of a step."""

    def __init__(self, device: Device, head: str, tokens: int, width: int, dtype: torch.dtype) -> None:
        self.label = f"hidden states of {head}"
        self._device = device
        self._states = device.allocate(self.label, (2 * tokens + HEADS.places, width), dtype, zero=True)
        self.previous = self._states[:tokens]
        self.step = tokens + HEADS.places  # place of the first token of the target's last step
        self._free = list(range(tokens, self.step))

    @property
    def nbytes(self) -> int:
        return self._states.nbytes

    @property
    def free(self) -> int:
        """Places for hidden states that are kept."""
        return len(self._free)

    def note(self, first: int, states: Tensor) -> None:
        """states [tokens, width]: of the target's step, from its token `first` on."""
        begin = self.step + first
        self._states[begin : begin + len(states)].copy_(states)

    def keep(self, places: Sequence[int]) -> list[int]:
        """Copies the hidden states at these places of the step. → their places from now on, until `give_back`."""
        kept = self._free[len(self._free) - len(places) :]
        assert len(kept) == len(places), f"{len(places)} hidden states, and {len(kept)} places"
        del self._free[len(self._free) - len(places) :]
        source, target = upload([places, kept], torch.int64, self._states.device)
        self._states.index_copy_(0, target, self._states.index_select(0, source))
        return kept

    def give_back(self, places: Sequence[int]) -> None:
        """The hidden states there are needed no more. Places in `step` are never free: each step overwrites them."""
        self._free += [place for place in places if place < self.step]

    def feed(self, places: Sequence[int]) -> None:
        """Puts the hidden states at these places before the tokens of the head's next pass."""
        source = upload(places, torch.int64, self._states.device)
        self.feed_back(self._states.index_select(0, source))

    def feed_back(self, states: Tensor) -> None:
        """Puts these hidden states [tokens, width] before the tokens of the head's next pass."""
        self.previous[: len(states)].copy_(states)

    def release(self) -> None:
        del self._states, self.previous
        self._device.release(self.label)
