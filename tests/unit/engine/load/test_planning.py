"""Plans of `djinnctl plan`, compared with the model when it is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from djinn_client.errors import InvalidRequest, OutOfMemory
from djinn_client.protocol import Placing
from djinn_client.protocol.fields.placing import ModelPlan
from djinnd import messages
from djinnd.core.rates import Rates
from djinnd.device.cpu import CpuDevice
from djinnd.engine.load.loading import model_shape
from djinnd.engine.load.planning import describe
from tests.support.checkpoints import altered, cast
from tests.support.engine_thread import EngineThread
from tests.support.loaded import MEMORY
from tests.support.models import reduced_model
from tests.support.open_files import loader_of
from tests.support.parameters import long_except
from tests.support.rates import RATES

TOKENS = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return altered(tmp_path_factory.mktemp("bf16") / "m", "llama-3.1", lambda tensors: cast(tensors, torch.bfloat16))


class Measured(CpuDevice):
    def rates(self) -> Rates:
        return RATES


def planned(folder: Path, memory: int = MEMORY, asked_memory: int = 0, used: int = 0, **fields: Any) -> ModelPlan:
    device = Measured(memory)
    device.budget.reserve("what is loaded", used)
    asked = messages.Plan(1, "m", str(folder), memory_bytes=asked_memory, **fields)
    try:
        loader = loader_of(folder, device, asked.dtype, asked.placing)
        plan = describe(asked, loader, model_shape(loader), device, TOKENS)
    finally:
        assert device.budget.used == used
        device.close()
    return plan


def least(folder: Path, **fields: Any) -> int:
    with pytest.raises(OutOfMemory) as told:
        planned(folder, asked_memory=1, **fields)
    needed: int = told.value.data["needed"]
    return needed


WISHES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "packing off": {"placing": Placing(packing=False)},
    "float32": {"dtype": "float32"},
    "half resident": {"placing": Placing(resident=0.5, slots=1)},
    "none resident, a ring in bytes": {"placing": Placing(resident=0, ring_bytes=1 << 18)},
    "KV asked for": {"kv_bytes": 5 << 20},
    "a short context": {"max_context": 600},
    "KV in FP8": {"placing": Placing(kv_dtype="fp8")},
    "room for adapters": {"placing": Placing(adapter_bytes=3 << 20)},
}


@pytest.mark.parametrize("more", [0, 300_000, 1 << 25])
def test_a_plan_for_now_equals_the_model_loaded_beside_another(folder: Path, more: int) -> None:
    with EngineThread(CpuDevice(2 * least(folder) + (1 << 20) + more), max_batch_tokens=TOKENS) as engine:
        engine.loaded(folder, "first", kv_bytes=1 << 18)
        report = engine.report()
        plan = planned(folder, report.budget_bytes, used=report.used_bytes)
        alone = planned(folder, report.budget_bytes, used=report.used_bytes, held_bytes=report.used_bytes)
        info = engine.loaded(folder, "second")
    for name in ("blocks_plain", "blocks_packed", "blocks_streamed", "ring_bytes", "kv_bytes"):
        assert getattr(plan, name) == getattr(info, name), name
    assert plan.others_bytes == report.used_bytes
    assert alone.others_bytes == 0 and alone.kv_bytes > plan.kv_bytes, "the model's own memory counts as free"


@pytest.mark.parametrize("wish", long_except(("as it comes", "half resident", "KV asked for"), WISHES))
@pytest.mark.parametrize(
    "more", long_except((0, 300_000, 1 << 25), [0, 100_000, 200_000, 300_000, 1 << 20, 1 << 25, 1 << 29])
)
def test_a_plan_equals_the_loaded_model(folder: Path, wish: str, more: int) -> None:
    fields = {"dtype": "bfloat16", **WISHES[wish]}
    budget = least(folder, **fields) + more
    plan = planned(folder, asked_memory=budget, **fields)
    wanted: list[messages.NeedArena] = []
    with EngineThread(CpuDevice(budget), max_batch_tokens=TOKENS) as engine:

        def grant(need: messages.NeedArena) -> messages.ArenaReady:
            wanted.append(need)
            return engine.grant(need)

        info = engine.loaded(folder, grant=grant, **fields)
        used = engine.report().used_bytes
    for name in ("blocks", "blocks_plain", "blocks_packed", "blocks_streamed", "streamed_bytes", "ring_bytes"):
        assert getattr(plan, name) == getattr(info, name), name
    for name in ("scratch_bytes", "kv_bytes", "notes", "family", "dtype"):
        assert getattr(plan, name) == getattr(info, name), name
    assert plan.kv_bytes == (info.pages + 1) * plan.page_bytes  # with the scratch page
    on_device = plan.resident_bytes + plan.ring_bytes + plan.scratch_bytes + plan.rest_bytes
    assert on_device == info.weight_bytes
    others = plan.kv_bytes + plan.workspace_bytes + plan.adapter_bytes + plan.reserved_bytes
    assert on_device + others == used <= plan.budget_bytes == budget
    assert [need.nbytes for need in wanted] == [plan.host_bytes]


def test_a_plan_tells_the_tokens_and_the_bytes_of_a_page(folder: Path) -> None:
    plans = [planned(folder, dtype="bfloat16", placing=Placing(kv_dtype=form)) for form in ("", "fp8")]
    plain, in_fp8 = (plan.page_bytes / plan.page_tokens for plan in plans)
    assert plain == 2 * in_fp8 == 4 * 2 * 2 * 16 * 2  # blocks, K and V, heads, width, bytes


def test_a_plan_uses_the_device_s_budget_by_default(folder: Path) -> None:
    assert planned(folder, dtype="bfloat16").budget_bytes == MEMORY
    assert planned(folder, asked_memory=2 * MEMORY).budget_bytes == 2 * MEMORY


def test_streaming_takes_longer_and_a_full_ring_shortens_the_first_token(folder: Path) -> None:
    plans = [planned(folder, dtype="bfloat16", placing=Placing(resident=r, slots=1)) for r in (4, 2, 0)]
    assert [plan.streamed_bytes for plan in plans] == sorted(plan.streamed_bytes for plan in plans)
    for plan in plans:
        assert plan.step_s[1] >= plan.streamed_bytes / plan.bus_bytes_per_s
        assert plan.first_token_s > 0 and plan.step_s[16] >= plan.step_s[1] > 0
    full = planned(folder, dtype="bfloat16", placing=Placing(resident=0, slots=4))
    assert full.first_token_s <= plans[2].first_token_s


def test_a_plan_says_why_blocks_stay_plain(folder: Path) -> None:
    assert planned(folder, placing=Placing(packing=False)).notes == ["blocks stay plain: packing is off"]
    (note,) = planned(reduced_model("llama-2")).notes
    assert "only bfloat16 weights can be packed, and these are float32" in note
    (note,) = planned(folder, dtype="float32").notes
    assert "these are bfloat16, computed in float32" in note


def test_a_plan_with_streamed_blocks_says_that_a_load_chooses_the_host_s_share(folder: Path) -> None:
    for resident, count in ((2, 1), (4, 0)):
        notes = planned(folder, placing=Placing(resident=resident, cpu_beside_bus=True)).notes
        assert sum("CPU beside the bus: a load measures" in note for note in notes) == count
    assert not any("CPU" in note for note in planned(folder, placing=Placing(resident=2)).notes)


def test_impossible_placements_are_refused(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="the model has 4 blocks"):
        planned(folder, placing=Placing(resident=5))
    with pytest.raises(InvalidRequest, match="is too small: the largest streamed block has"):
        planned(folder, placing=Placing(resident=0, ring_bytes=1))


def test_a_plan_beside_a_served_model_changes_nothing(folder: Path) -> None:
    """Asked of an engine. The plan assumes an empty budget."""
    with EngineThread(Measured(MEMORY), max_batch_tokens=TOKENS) as engine:
        engine.loaded(folder, kv_bytes=600 << 20)
        before = engine.report()
        engine.send(messages.Plan(50, "m", str(folder), kv_bytes=600 << 20))
        reply = engine.until(messages.Planned)
        assert reply.request == 50 and reply.plan.blocks_plain == 4
        engine.send(messages.Plan(51, "m", str(folder), memory_bytes=1))
        refusal = engine.until(messages.Failed)
        assert (refusal.request, refusal.code) == (51, "out_of_memory")
        engine.send(messages.Plan(52, "m", str(folder / "nowhere")))
        assert engine.until(messages.Failed).code == "model_not_found"
        after = engine.report()
        assert (after.used_bytes, after.budget_bytes) == (before.used_bytes, before.budget_bytes)
