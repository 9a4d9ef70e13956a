"""The choice of the host's share, with rates that are really measured, and its memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import linear, silu

from djinn_client.protocol import Placing
from djinnd.device.cpu import CpuDevice
from djinnd.model.placing import beside_bus
from djinnd.model.placing.beside_bus import measured
from djinnd.model.placing.host_matrix import HostMatrix, PlainMatrix
from djinnd.model.placing.host_mlp import Crossing, HostMlp, host_mlp_of
from djinnd.model.placing.projections import install_products
from djinnd.model.tuning import BESIDE_ROWS
from djinnd.weights.layout import Layout
from tests.support.beside import host_takes
from tests.support.checkpoints import altered, cast
from tests.support.loaded import MEMORY, load_weights

WIDTH, INNER = 64, 96


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(MEMORY)
    yield device
    device.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return altered(tmp_path_factory.mktemp("bf16") / "m", "llama-2", lambda tensors: cast(tensors, torch.bfloat16))


def memory_of(matrix: HostMatrix) -> int:
    assert isinstance(matrix, PlainMatrix)
    return matrix.weight.untyped_storage().data_ptr()


def an_mlp(crossing: Crossing | None = None) -> tuple[HostMlp, torch.Tensor, torch.Tensor]:
    mlp = HostMlp("mlp", silu)
    gate_up, down = torch.randn(2 * INNER, WIDTH), torch.randn(WIDTH, INNER)
    mlp.bind(PlainMatrix(gate_up), PlainMatrix(down), crossing)
    return mlp, gate_up, down


def test_rates_are_measured_while_copies_go_on(device: CpuDevice) -> None:
    target, source = torch.zeros(1 << 20, dtype=torch.uint8), torch.ones(1 << 20, dtype=torch.uint8)
    rates = measured(device, [an_mlp()[0]], (target, source), WIDTH, torch.float32)
    assert tuple(rates.mlp_s) == BESIDE_ROWS and all(seconds > 0 for seconds in rates.mlp_s.values())
    assert 0 < rates.bus_beside <= rates.bus
    assert torch.equal(target, source), "all copies have ended"


def test_mlps_are_multiplied_by_in_turns(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    mlps, multiplied = [an_mlp()[0] for _ in range(3)], list[HostMlp]()
    whole = HostMlp.multiply

    def noted(mlp: HostMlp, x: torch.Tensor) -> torch.Tensor:
        multiplied.append(mlp)
        return whole(mlp, x)

    monkeypatch.setattr(HostMlp, "multiply", noted)
    target, source = torch.zeros(1 << 20, dtype=torch.uint8), torch.ones(1 << 20, dtype=torch.uint8)
    measured(device, mlps, (target, source), WIDTH, torch.float32)
    assert multiplied == [mlps[turn % 3] for turn in range(len(multiplied))]
    assert len(multiplied) > 3 * len(BESIDE_ROWS)


def test_after_a_slow_product_no_more_rows_are_measured(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside_bus, "BESIDE_SLOW_S", 0.0)
    target, source = torch.zeros(1 << 20, dtype=torch.uint8), torch.ones(1 << 20, dtype=torch.uint8)
    rates = measured(device, [an_mlp()[0]], (target, source), WIDTH, torch.float32)
    assert tuple(rates.mlp_s) == BESIDE_ROWS[:1] and rates.mlp_s[1] > 0


def test_rows_cross_and_come_back_multiplied(device: CpuDevice) -> None:
    mlp, gate_up, down = an_mlp()
    crossing = Crossing(device, 4, WIDTH, torch.float32)
    for rows in (1, 3, 4):
        x = torch.randn(1, rows, WIDTH)
        gate, up = linear(x, gate_up).chunk(2, dim=-1)
        torch.testing.assert_close(crossing.compute(mlp.multiply, x), linear(silu(gate) * up, down))


def test_decoded_copies_are_exact_and_in_private_memory(
    device: CpuDevice, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host_takes(monkeypatch, 4)
    placing = Placing(resident=0, slots=2, cpu_beside_bus=True)
    weights = load_weights(folder, device, "bfloat16", placing=placing)
    beside, store = weights.placement.beside, weights.store
    assert beside is not None and store.is_packed
    for index, mlp in beside._mlps.items():
        form, layout = store.forms[index], store.buffers[index].layout
        assert form is not None and mlp._weights is not None
        plain = torch.empty(layout.numel, dtype=torch.bfloat16)
        form.unpack(store.host(index), plain)
        for unit, matrix in zip(mlp.units, mlp._weights, strict=True):
            assert isinstance(matrix, PlainMatrix) and torch.equal(matrix.weight, layout.joined(plain, unit))
    weights.release(device)


def test_plain_weights_are_read_in_the_arena(device: CpuDevice, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host_takes(monkeypatch, 4)
    placing = Placing(resident=0, packing=False, cpu_beside_bus=True)
    weights = load_weights(folder, device, "bfloat16", placing=placing)
    assert weights.placement.beside is not None
    for index, mlp in weights.placement.beside._mlps.items():
        assert mlp._weights is not None
        own = weights.store.host(index).untyped_storage().data_ptr()
        assert {memory_of(matrix) for matrix in mlp._weights} == {own}
    weights.release(device)


@pytest.mark.parametrize(("mlps", "bound"), [(0, 0), (2, 2), (9, 4)])
def test_copies_are_bounded_by_the_host_s_memory(
    mlps: int, bound: int, device: CpuDevice, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host_takes(monkeypatch, 4)
    weights = load_weights(folder, device, "bfloat16", placing=Placing(resident=0, cpu_beside_bus=True))
    beside, plan = weights.placement.beside, weights.placement.plan
    assert beside is not None and plan is not None
    free = int((mlps + 0.5) * beside._weights[0].copied_bytes / beside_bus.BESIDE_MEMORY)
    monkeypatch.setattr(beside_bus, "available", lambda: free)
    weights.placement.move(plan)
    assert sum(mlp.is_bound for mlp in beside._mlps.values()) == bound
    assert any("no memory" in note for note in beside.notes) == (not bound)
    weights.release(device)


class Gated(nn.Module):
    """A gated MLP with an activation that a test chooses."""

    def __init__(self, activation: object, factor: float = 1.0) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(INNER, WIDTH, bias=False)
        self.act_fn, self.factor = activation, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self.factor * self.act_fn(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[operator]
        return out


WITHOUT_MEMORY = nn.PReLU(device="meta")


@pytest.mark.parametrize(
    ("mlp", "is_found"),
    [(Gated(silu), True), (Gated(silu, factor=2.0), False), (Gated(WITHOUT_MEMORY), False), (Gated(None), False)],
    ids=["gated", "with a factor", "an activation without memory", "no activation"],
)
def test_only_mlps_that_compute_what_the_host_computes_are_found(mlp: Gated, is_found: bool) -> None:
    block = nn.Module()
    block.mlp = mlp
    layout = Layout((name, tuple(parameter.shape)) for name, parameter in block.named_parameters() if "act" not in name)
    products = install_products(block, layout)
    found = host_mlp_of(block, layout, products, torch.float32)
    assert (found is not None and found.path == "mlp") == is_found
