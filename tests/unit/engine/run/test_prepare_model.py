from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from djinn_client.errors import ModelRejected, OutOfMemory
from djinnd.device.cpu import CpuDevice
from djinnd.engine.load.loading import model_shape
from djinnd.engine.load.planning import reserved_bytes
from djinnd.engine.memory.memory import ModelShape, workspace_bytes, workspace_label
from djinnd.engine.run import prepare_model as serving
from djinnd.engine.run.model_info import info_of
from djinnd.engine.run.page_memory import kv_label
from djinnd.messages import Load
from djinnd.model.placing.loader import Weights
from tests.support.loaded import MEMORY, anonymous_arena, made_runner
from tests.support.models import reduced_model
from tests.support.open_files import loader_of

TOKENS, ROWS = 64, 16


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(MEMORY)
    yield device
    assert device.budget.used == 0
    device.close()


def loaded(device: CpuDevice) -> tuple[Weights, ModelShape]:
    loader = loader_of(reduced_model("llama-2"), device, "auto")
    shape = model_shape(loader)
    reserved = reserved_bytes(loader, shape, 0, TOKENS, device.budget.total, device.budget.free)
    return loader.run(anonymous_arena, lambda stage, done, total: None, reserved), shape


def test_weights_workspace_and_pages_are_reserved(device: CpuDevice) -> None:
    weights, shape = loaded(device)
    runner = made_runner(Load(1, "m", "/a/path"), weights, shape, device, TOKENS, ROWS)
    pages = runner.plan.num_pages * runner.plan.page_bytes
    assert device.budget.used == weights.nbytes + workspace_bytes(shape, TOKENS) + pages
    assert runner.model.pool.nbytes == pages and not bool(runner.model.pool[1:].any())
    assert (runner.name, info_of(runner).path) == ("m", "/a/path")
    assert runner.nbytes == device.budget.used and runner.pages.nbytes == pages
    runner.release()


def test_a_draft_takes_few_pages_unless_a_number_was_asked_for(device: CpuDevice) -> None:
    pools = []
    for load in (
        Load(1, "m", ""),
        Load(1, "m", "", is_draft=True),
        Load(1, "m", "", is_draft=True, kv_bytes=MEMORY // 8),
    ):
        weights, shape = loaded(device)
        runner = made_runner(load, weights, shape, device, TOKENS, ROWS)
        pools.append(runner.pages.nbytes / device.budget.total)
        assert bool(runner.load.kv_bytes) == load.is_draft, "a change of the budget keeps the number"
        runner.release()
    assert pools[1] <= 1 / 32 < pools[0] and 1 / 9 < pools[2] <= 1 / 8


def test_a_model_is_served_in_the_least_budget_that_its_refusal_names() -> None:
    """The budget is then full. One byte less is refused as before."""
    device = CpuDevice(1)
    with pytest.raises(OutOfMemory, match=r"m needs at least .* of device memory") as told:
        loaded(device)
    device.close()
    device = CpuDevice(told.value.data["needed"])
    weights, shape = loaded(device)
    runner = made_runner(Load(1, "m", ""), weights, shape, device, TOKENS, ROWS)
    assert device.budget.used == device.budget.total
    runner.release()
    device.close()
    device = CpuDevice(told.value.data["needed"] - 1)
    with pytest.raises(OutOfMemory, match=r"m needs at least .* of device memory"):
        loaded(device)
    device.close()


def test_more_pages_than_fit_are_refused_and_everything_is_given_back(device: CpuDevice) -> None:
    weights, shape = loaded(device)
    with pytest.raises(OutOfMemory, match=r"KV pages of m needs 2\.00 GiB of device memory"):
        made_runner(Load(1, "m", "", kv_bytes=2 << 30), weights, shape, device, TOKENS, ROWS)


def test_without_room_for_the_workspace_everything_is_given_back(device: CpuDevice) -> None:
    weights, shape = loaded(device)
    device.budget.reserve("somebody else", device.budget.free - 100)
    with pytest.raises(OutOfMemory, match="workspace of m needs"):
        made_runner(Load(1, "m", ""), weights, shape, device, TOKENS, ROWS)
    device.budget.release("somebody else")


class Blind(nn.Module):
    def forward(self, hidden_states: torch.Tensor, **arguments: object) -> tuple[torch.Tensor, None]:
        return hidden_states, None


def test_a_family_that_fails_the_check_is_refused_and_everything_is_given_back(device: CpuDevice) -> None:
    weights, shape = loaded(device)
    weights.skeleton.adapter.blocks[1].self_attn = Blind()
    with pytest.raises(ModelRejected, match="llama fails the check at load"):
        made_runner(Load(1, "m", ""), weights, shape, device, TOKENS, ROWS)


@pytest.mark.parametrize("taken", ["nothing", "pages"])
def test_any_failure_gives_everything_back(device: CpuDevice, monkeypatch: pytest.MonkeyPatch, taken: str) -> None:
    def fails(*args: object, **options: object) -> None:
        assert (taken == "pages") == (device.budget.used > weights.nbytes)
        raise RuntimeError("nobody foresaw this")

    monkeypatch.setattr(serving, "workspace_bytes" if taken == "nothing" else "check_paging", fails)
    weights, shape = loaded(device)
    with pytest.raises(RuntimeError, match="nobody foresaw"):
        made_runner(Load(1, "m", ""), weights, shape, device, TOKENS, ROWS)


def test_labels_name_the_model() -> None:
    assert {kv_label("m"), workspace_label("m")}.isdisjoint({kv_label("n"), workspace_label("n")})
