"""Prepares a loaded model for serving: reserves workspace and KV pool, compiles kernels, and checks the model.

begin ──► compile missing kernels in another process, while other models step ──► check in parts, between the steps of
other models ──► ModelRunner
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

import torch
from msgspec import structs

from djinn_client.errors import ModelRejected
from djinnd.device import Device
from djinnd.engine.adapters.residency import room_label
from djinnd.engine.kernels.compiler import Compiling
from djinnd.engine.memory.memory import ModelShape, kv_floor, plan_kv, takes_all, workspace_bytes, workspace_label
from djinnd.engine.run.hidden_states import HiddenStates
from djinnd.engine.run.model_runner import ModelRunner
from djinnd.engine.run.page_memory import PageMemory, kv_label
from djinnd.messages import Load
from djinnd.model.check.equality import check_paging
from djinnd.model.placing.loader import Weights
from djinnd.model.step.page_regions import layout_of
from djinnd.model.step.paged_model import PagedModel

if TYPE_CHECKING:  # only CUDA builds of torch bring Triton
    from djinnd.model.kernels.launching.variants import Variant

Compile = Callable[[list["Variant"]], Compiling]

# Kernels that torch can replace, and how the model's notes describe that. The replacements need the host in each step,
# so such a model runs without graphs.
_REPLACEABLE = {
    "kv_write_kernel": "attention gathers pages",
    "decode_kernel": "attention gathers pages",
    "combine_kernel": "attention gathers pages",
    "chunks_kernel": "attention gathers pages",
    "singles_kernel": "attention gathers pages",
    "combine_mixed_kernel": "attention gathers pages",
    "latent_kernel": "attention expands all latents in each step",
    "matvec_kernel": "products with few rows are cuBLAS's",
    "few_rows_kernel": "products with few rows are cuBLAS's",
}


def prepare_model(
    load: Load,
    weights: Weights,
    shape: ModelShape,
    device: Device,
    max_tokens: int,
    max_rows: int,
    compile: Compile | None = None,
) -> Generator[Compiling | None, None, ModelRunner]:
    """Prepares one model on the engine's thread, in parts between steps. Returns its runner, which can serve then.

    `max_tokens` and `max_rows` are limits of a step. `compile` begins to compile kernels in another process; None:
    kernels are compiled at launch, or the device has none. Yields the compilation, and goes on when it is over. Then
    yields None after each part of the check at load and of loading the kernels. These take a second or more, in parts
    of a few milliseconds; if the model streams, a part is a pass over the bus. The caller may step other models between
    two parts.

    A failure gives back all memory of the model, also that of its weights. Raises OutOfMemory or ModelRejected.
    """
    labels: list[str] = []
    try:
        runner = _reserve(load, weights, shape, device, max_tokens, max_rows, labels)
        if compile is not None and (missing := _missing_kernels(runner)):
            compiling = compile(missing)
            yield compiling
            _use_compiled(runner, compiling)
        yield from check_paging(runner.model, runner.plan.max_context, again=weights.is_adopted)
        if runner.hidden is not None:
            runner.use_hidden_states(runner.hidden)
        yield from runner.graphs.compile()
    except Exception:
        weights.release(device)
        for label in labels:
            device.release(label)
        raise
    return runner


def _reserve(
    load: Load,
    weights: Weights,
    shape: ModelShape,
    device: Device,
    max_tokens: int,
    max_rows: int,
    labels: list[str],
) -> ModelRunner:
    """Reserves workspace, room for adapters and hidden states, and KV pool, and adds their labels to `labels`."""
    device.budget.reserve(workspace_label(load.model), workspace_bytes(shape, max_tokens))
    labels.append(workspace_label(load.model))
    if room := load.placing.adapter_bytes:
        device.budget.reserve(room_label(load.model), room)
        labels.append(room_label(load.model))
    hidden = None
    if weights.skeleton.head_input is not None:
        hidden = HiddenStates(device, load.model, max_tokens, shape.width, weights.dtype)
        labels.append(hidden.label)
    floor = kv_floor(shape, load.kv_bytes, device.budget.total)
    assert weights.placement.plan is not None
    greedy = takes_all(load.placing, weights.placement.plan)
    if load.is_draft and not load.kv_bytes:
        load = structs.replace(load, kv_bytes=min(floor, device.budget.free))  # also after a change of the budget
    plan = plan_kv(shape, device.budget.free, floor, load.kv_bytes, load.max_context, greedy)
    layout = layout_of(shape.kv_dtype(weights.dtype), plan.page_size, shape.kv, shape.state_bytes)
    assert layout.page_bytes == plan.page_bytes
    pool = device.allocate(kv_label(load.model), (plan.num_pages, plan.page_bytes), torch.uint8, zero=True)
    labels.append(kv_label(load.model))
    model = PagedModel(weights.skeleton, weights.placement, weights.dtype, layout, pool)
    pages = PageMemory(load.model, model, plan, device)
    runner = ModelRunner(load, weights, model, shape, pages, device, max_tokens, max_rows, hidden)
    expands_always = not all(latents.can_be_absorbed for latents in model.latents)
    if (model.latents or model.has_states) and runner.graphs.current is not None:
        what = "latent attention reads" if model.latents else "modules with a state read"
        if expands_always or not model.steps_in_place:
            runner.graphs.give_up()
            weights.notes.append(f"steps run without CUDA graphs: {what} the sessions' lengths on the host")
        else:
            weights.notes.append(f"steps with chunks run without CUDA graphs: {what} their lengths on the host")
    return runner


def _missing_kernels(runner: ModelRunner) -> list[Variant]:
    """The kernels of the model that are not compiled yet. Only for a CUDA device."""
    from djinnd.model.check.rehearsal import list_kernels

    return list_kernels(runner.model, runner.max_tokens, runner.plan.max_context)


def _use_compiled(runner: ModelRunner, compiling: Compiling) -> None:
    """Takes over the compiled kernels. Kernels that could not be compiled are replaced by torch. Raises ModelRejected
    if torch cannot replace one of them."""
    from djinnd.model.kernels.launching.launches import launches

    failed = compiling.failed
    launches.settle(compiling.variants, failed)
    for variant, reason in failed.items():
        if variant.name not in _REPLACEABLE:
            told = f"{runner.name} needs the kernel {variant}, which cannot be compiled here: {reason}"
            raise ModelRejected(told, kernel=variant.name)
    notes = {v.name: f"{_REPLACEABLE[v.name]}, as {v} cannot be compiled: {why}" for v, why in failed.items()}
    runner.weights.notes += notes.values()
    if notes:
        runner.graphs.give_up()
