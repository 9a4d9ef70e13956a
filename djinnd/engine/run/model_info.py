"""The description of a model that serves, as clients and the server read it."""

from __future__ import annotations

from djinn_client.protocol import ModelInfo
from djinnd.engine.run.model_runner import ModelRunner
from djinnd.weights.plan import BlockPlace


def info_of(runner: ModelRunner) -> ModelInfo:
    """The figures of the device. Tiers.fill adds those of the tiers below it."""
    load, weights, model, plan = runner.load, runner.weights, runner.model, runner.plan
    places, beside = runner.places, model.placement.beside
    return ModelInfo(
        name=runner.name,
        path=load.path,
        family=model.skeleton.family,
        state="ready",
        dtype=str(model.dtype).removeprefix("torch."),
        codes=weights.store.codes,
        quantised=load.placing.quantise,
        kv_dtype=load.placing.kv_dtype,
        parameters=weights.parameters,
        blocks=model.num_blocks,
        vocab=model.vocab,
        points=model.skeleton.points,
        max_context=plan.max_context,
        weight_bytes=weights.nbytes,
        blocks_plain=places.count(BlockPlace.PLAIN),
        blocks_packed=places.count(BlockPlace.PACKED),
        blocks_streamed=places.count(BlockPlace.STREAMED),
        streamed_bytes=places.streamed_bytes - (0 if beside is None else beside.saved_bytes),
        ring_bytes=places.ring_bytes,
        scratch_bytes=places.scratch_bytes,
        notes=[*weights.notes, *places.notes, *([] if beside is None else beside.notes)],
        kv_bytes=runner.pages.nbytes,
        fingerprint=weights.identity,
        kv_heads=model.layout.kv_heads,
        head_dim=model.layout.head_dim,
        kv=model.layout,
        page_size=plan.page_size,
        page_bytes=plan.page_bytes,
        pages=runner.kv.pool.capacity,
        pages_used=runner.kv.pool.used,
    )
