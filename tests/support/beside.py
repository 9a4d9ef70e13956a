"""Models with MLPs of streamed blocks on the host. Their number does not depend on measured rates."""

from __future__ import annotations

import pytest
from torch import Tensor

from djinnd.model.placing import beside_bus
from djinnd.model.placing.beside_plan import BesideRates
from djinnd.model.placing.host_mlp import HostMlp

ROWS = 4  # of the largest step for which the host computes


def host_takes(monkeypatch: pytest.MonkeyPatch, mlps: int) -> None:
    """From now on, loads choose so many MLPs for the host, for steps of up to ROWS rows."""
    monkeypatch.setattr(beside_bus, "measured", lambda *_: BesideRates(1e9, 1e9, {1: 1.0}))
    monkeypatch.setattr(beside_bus, "best_share", lambda streamed, rates, most: min(mlps, most))
    monkeypatch.setattr(beside_bus, "most_rows", lambda streamed, rates, mlps: ROWS)


def rows_on_host(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """→ a list that gets the rows of each MLP that the host computes from now on."""
    rows: list[int] = []
    multiply = HostMlp.multiply

    def noted(mlp: HostMlp, x: Tensor) -> Tensor:
        rows.append(len(x))
        return multiply(mlp, x)

    monkeypatch.setattr(HostMlp, "multiply", noted)
    return rows
