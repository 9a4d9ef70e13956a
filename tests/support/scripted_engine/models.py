"""The models of the scripted engine: their descriptions, and the memory that they would take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from djinn_client.protocol import ModelInfo
from djinn_client.protocol.fields.placing import ModelPlan, Placing
from djinn_client.protocol.fields.points import PointMap
from djinnd import messages
from tests.support.scripted_engine.channel import Channel
from tests.support.scripted_engine.script import (
    ARENA_BYTES,
    BLOCK_BYTES,
    BLOCKS,
    BUDGET,
    PAGE_BYTES,
    PAGE_SIZE,
    RING_BYTES,
    WEIGHT_BYTES,
    WIDTH,
)


class Models:
    """`memory`: bytes of the budget; 0: BUDGET."""

    def __init__(self, channel: Channel, memory: int) -> None:
        self._channel = channel
        self.budget = memory or BUDGET
        self.infos: dict[str, ModelInfo] = {}  # by name

    def add(self, load: messages.Load, context: int) -> ModelInfo:
        config = json.loads((Path(load.path) / "config.json").read_text())
        self.infos[load.model] = info = ModelInfo(
            name=load.model,
            path=load.path,
            family=config["model_type"],
            state="ready",
            vocab=config["vocab_size"],
            max_context=context,
            weight_bytes=ARENA_BYTES,
            kv_bytes=load.kv_bytes or 1 << 20,
            page_size=PAGE_SIZE,
            page_bytes=PAGE_BYTES,
            dtype="float32" if load.dtype == "auto" else load.dtype,
            points=PointMap(
                blocks=BLOCKS,
                width=WIDTH,
                vocab=config["vocab_size"],
                layers="model.layers",
                attention="self_attn",
                mlp="mlp",
                norm="model.norm",
                head="lm_head",
            ),
            **places(resident_blocks(load.placing)),
        )
        return info

    def change(self, model: str, **fields: Any) -> None:
        self.infos[model] = msgspec.structs.replace(self.infos[model], **fields)

    def on_plan(self, plan: messages.Plan) -> None:
        budget = plan.memory_bytes or self.budget
        if budget < RING_BYTES:
            why = f"a budget of {budget} bytes; the ring alone takes {RING_BYTES}"
            self._channel.refuse(plan.request, why, RING_BYTES)
            return
        where = places(min(resident_blocks(plan.placing), (budget - RING_BYTES) // BLOCK_BYTES))
        planned = ModelPlan(
            model=plan.model,
            family=json.loads((Path(plan.path) / "config.json").read_text())["model_type"],
            dtype=plan.dtype,
            budget_bytes=budget,
            blocks=BLOCKS,
            blocks_plain=where["blocks_plain"],
            blocks_packed=0,
            blocks_streamed=where["blocks_streamed"],
            plain_block_bytes=BLOCK_BYTES,
            packed_block_bytes=0,
            weight_bytes=WEIGHT_BYTES,
            resident_bytes=where["blocks_plain"] * BLOCK_BYTES,
            streamed_bytes=where["streamed_bytes"],
            ring_bytes=plan.placing.ring_bytes or where["ring_bytes"],
            scratch_bytes=0,
            rest_bytes=0,
            kv_bytes=plan.kv_bytes,
            workspace_bytes=0,
            reserved_bytes=0,
            host_bytes=WEIGHT_BYTES,
            slots=plan.placing.slots or 3,
            bus_bytes_per_s=55e9,
            memory_bytes_per_s=4e12,
            flops_per_s=7e14,
            first_token_s=0.1,
            step_s={1: 0.01, 16: 0.02},
            notes=["the script packs nothing"] if plan.placing.packing else [],
        )
        self._channel.send(messages.Planned(plan.request, planned))

    def on_setbudget(self, message: messages.SetBudget) -> None:
        """Every model gets a ring and as many resident blocks as fit."""
        if message.memory_bytes < RING_BYTES:
            self._channel.refuse(message.request, f"the budget could go down to {RING_BYTES} bytes", RING_BYTES)
            return
        self.budget = message.memory_bytes
        fit = min(BLOCKS, (self.budget - RING_BYTES) // BLOCK_BYTES)
        for name in self.infos:
            self.change(name, **places(fit))
        models, used = list(self.infos.values()), RING_BYTES + fit * BLOCK_BYTES
        self._channel.send(messages.BudgetSet(message.request, self.budget, used, 0.25, models))


def resident_blocks(placing: Placing) -> int:
    if placing.resident is None:
        return BLOCKS
    return int(placing.resident * BLOCKS) if isinstance(placing.resident, float) else placing.resident


def places(resident: int) -> dict[str, Any]:
    """Fields of a ModelInfo."""
    streamed = BLOCKS - resident
    return {
        "blocks": BLOCKS,
        "blocks_plain": resident,
        "blocks_streamed": streamed,
        "streamed_bytes": streamed * BLOCK_BYTES,
        "ring_bytes": RING_BYTES if streamed else 0,
    }
