"""From loaded weights to a model that serves: workspace and KV pool reserved, the check passed, graphs captured."""

from __future__ import annotations

from collections.abc import Callable

from djinnd.device import Device
from djinnd.engine.memory import ModelShape, kv_floor, plan_kv, takes_all, workspace_bytes
from djinnd.engine.model_runner import ModelRunner, kv_label, workspace_label
from djinnd.messages import Load
from djinnd.model.check import check_paging
from djinnd.model.loader import Weights
from djinnd.model.paged_model import PagedModel


def make_runner(
    load: Load,
    weights: Weights,
    shape: ModelShape,
    device: Device,
    max_batch_tokens: int,
    max_rows: int,
    beat: Callable[[], None] = lambda: None,
) -> ModelRunner:
    """Runs on the engine's thread, between steps. Raises OutOfMemory or ModelRejected, and has then given back the
    weights, too. `beat` is called often: kernels are compiled here, and the server kills an engine that is silent."""
    labels: list[str] = []
    try:
        device.budget.reserve(workspace_label(load.model), workspace_bytes(shape, max_batch_tokens))
        labels.append(workspace_label(load.model))
        floor = kv_floor(shape, load.kv_bytes, device.budget.total)
        assert weights.residency.plan is not None
        greedy = takes_all(load.placing, weights.residency.plan)
        plan = plan_kv(shape, device.budget.free, floor, load.kv_bytes, load.max_context, greedy)
        pool = device.allocate(
            kv_label(load.model),
            (plan.num_pages, shape.num_blocks, 2, plan.page_size, shape.kv_heads, shape.head_dim),
            weights.dtype,
            zero=True,
        )
        labels.append(kv_label(load.model))
        model = PagedModel(weights.skeleton, weights.residency, weights.dtype, pool)
        check_paging(model, device, plan.page_size, plan.max_context, beat, again=weights.is_adopted)
        runner = ModelRunner(load, weights, model, shape, plan, device, max_batch_tokens, max_rows)
        runner.compile(beat)
        return runner
    except BaseException:
        weights.release(device)
        for label in labels:
            device.release(label)
        raise
