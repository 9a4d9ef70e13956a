"""Counts the experts that blocks fetch on demand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from djinnd.model.family.experts import Experts


class FetchCounter:
    """Counts on the device, so a captured graph holds the counting, and its replays count."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._counts: dict[Experts, Tensor] = {}
        fetch = Experts.fetch

        def counted(experts: Experts, picked: Tensor) -> None:
            fetch(experts, picked)
            if experts not in self._counts:
                entry = next(iter(experts.layout.entries.values()))
                self._counts[experts] = torch.zeros(entry.shape[0], dtype=torch.int64, device=picked.device)
            count = self._counts[experts]
            count += torch.zeros_like(count).index_fill_(0, picked.reshape(-1), 1)

        monkeypatch.setattr(Experts, "fetch", counted)

    def total(self) -> int:
        """Number of fetches of one expert of one block. Waits for the device."""
        return sum(int(count.sum()) for count in self._counts.values())
