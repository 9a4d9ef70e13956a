"""Plans the load of a model: placement of its blocks, memory, and a forecast of its speed."""

from __future__ import annotations

from djinn_client.errors import OutOfMemory
from djinn_client.protocol.fields.placing import ModelPlan
from djinnd import messages
from djinnd.device import Device
from djinnd.engine.load.forecast import Forecast
from djinnd.engine.memory.memory import ModelShape, kv_floor, pages_share, plan_kv, takes_all, workspace_bytes
from djinnd.engine.tuning import FORECAST
from djinnd.model.placing.loader import ModelLoader
from djinnd.weights.plan import BlockPlace
from djinnd.weights.store import Buffer

FIRST_TOKEN_TOKENS = 512
SESSIONS = (1, 16)
BESIDE = "CPU beside the bus: a load measures the host's products and chooses its share; these figures are without it"


def reserved_bytes(
    loader: ModelLoader, shape: ModelShape, kv_bytes: int, max_batch_tokens: int, budget: int, free: int
) -> int:
    """Bytes that KV, workspace and room for adapters take before blocks are placed. They include the share of the
    budget set aside for pages, or only the least number of pages if the blocks cannot be placed otherwise."""
    workspace = workspace_bytes(shape, max_batch_tokens) + loader.placing.adapter_bytes
    welcome = workspace + kv_floor(shape, kv_bytes, budget)
    try:
        loader.plan(welcome, free, budget)
    except OutOfMemory:
        return workspace + kv_floor(shape, kv_bytes, 0)
    return welcome


def describe(
    asked: messages.Plan, loader: ModelLoader, shape: ModelShape, device: Device, max_batch_tokens: int
) -> ModelPlan:
    """Raises OutOfMemory with the figures. A plan for a number of bytes assumes that nothing is loaded, so only the
    device's own reservation is taken."""
    budget = asked.memory_bytes or device.budget.total
    workspace = workspace_bytes(shape, max_batch_tokens)
    others = 0 if asked.memory_bytes else max(device.budget.used - asked.held_bytes - device.reserved, 0)
    free = budget - device.reserved - others
    reserved = reserved_bytes(loader, shape, asked.kv_bytes, max_batch_tokens, budget, free)
    plan = loader.plan(reserved, free, budget, pages_share(asked.kv_bytes))
    left = free - workspace - loader.placing.adapter_bytes - loader.rest_bytes - plan.nbytes
    greedy = takes_all(asked.placing, plan)
    floor = kv_floor(shape, asked.kv_bytes, budget)
    kv = plan_kv(shape, left, floor, asked.kv_bytes, asked.max_context, greedy)
    *blocks, rest = loader.store.buffers
    parameters = round(sum(map(_used_by_a_row, blocks)))
    head_bytes = max(entry.numel for entry in rest.layout.entries.values()) * loader.dtype.itemsize
    rates = device.rates()
    dtype = str(loader.dtype).removeprefix("torch.")
    forecast = Forecast(
        plan, rates, dtype, parameters, head_bytes, shape.token_bytes, FORECAST[device.torch_device.type]
    )
    return ModelPlan(
        model=asked.model,
        family=loader.skeleton.family,
        dtype=dtype,
        budget_bytes=budget,
        blocks=len(plan.places),
        blocks_plain=plan.count(BlockPlace.PLAIN),
        blocks_packed=plan.count(BlockPlace.PACKED),
        blocks_streamed=plan.count(BlockPlace.STREAMED),
        plain_block_bytes=max(size.plain for size in plan.sizes),
        packed_block_bytes=max(size.packed or 0 for size in plan.sizes),
        weight_bytes=loader.store.checkpoint_bytes,
        resident_bytes=plan.resident_bytes,
        streamed_bytes=plan.streamed_bytes,
        ring_bytes=plan.ring_bytes,
        scratch_bytes=plan.scratch_bytes,
        rest_bytes=loader.rest_bytes,
        kv_bytes=kv.num_pages * kv.page_bytes,
        page_bytes=kv.page_bytes,
        page_tokens=kv.page_size,
        workspace_bytes=workspace,
        adapter_bytes=loader.placing.adapter_bytes,
        reserved_bytes=device.reserved,
        others_bytes=others,
        host_bytes=loader.store.nbytes,
        slots=plan.slots,
        bus_bytes_per_s=rates.bus,
        memory_bytes_per_s=rates.memory,
        reading_bytes_per_s=rates.reading,
        flops_per_s=rates.products[dtype],
        launch_s=rates.launch,
        first_token_s=forecast.first_token_s(FIRST_TOKEN_TOKENS),
        first_token_tokens=FIRST_TOKEN_TOKENS,
        step_s={sessions: forecast.step_s(sessions) for sessions in SESSIONS},
        codes=loader.store.codes,
        quantised=loader.placing.quantise,
        kv_dtype=loader.placing.kv_dtype,
        notes=[*loader.notes, *plan.notes, *([BESIDE] if asked.placing.cpu_beside_bus and plan.streamed else [])],
    )


def _used_by_a_row(buffer: Buffer) -> float:
    """The number of parameters that one row is multiplied with. Of experts, that is the share that a row picks."""
    numel = sum(entry.numel for entry in buffer.layout.entries.values())
    return numel * buffer.routing.picked / buffer.routing.count if buffer.routing else numel
