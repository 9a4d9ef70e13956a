"""The check at load: verifies that a model runs correctly block by block over pages.

A family that ignores the attention interface, or that keeps state outside of it, would give wrong answers without an
error. Three things must hold with the weights that will be served:

    djinnd's attention ran exactly once in each block;
    a prompt in one pass gives the same logits as the prompt in chunks and single steps, with the same experts
    (routing.py), and their own routers would have picked mostly the same;
    far positions are computed as transformers computes them (far_positions.py).

Chunks and steps use the bound on KV length that captured graphs use: the longest context.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from djinn_client.errors import ModelRejected
from djinn_client.protocol.fields.kv_layout import FP8
from djinnd.model.check.far_positions import check_far_positions
from djinnd.model.check.routing import PinnedRouting
from djinnd.model.step.inputs import StepInputs
from djinnd.model.step.paged_model import PagedModel
from djinnd.model.tuning import (
    CHUNKS,
    FEW_SINGLES,
    FP8_TOLERANCE,
    LOGITS_TOLERANCE,
    SAME_PICKS,
    SINGLES,
    TOLERANCE_DEPTH,
)
from djinnd.model.whitebox.editing import warm_up


def tolerance(dtype: torch.dtype, blocks: int, kv_dtype: str = "") -> float:
    """Allowed relative error of the logits; grows with the square root of the depth. `kv_dtype`: of the pages."""
    allowed = max(LOGITS_TOLERANCE[dtype], FP8_TOLERANCE if kv_dtype == FP8 else 0.0)
    return allowed * math.sqrt(max(1.0, blocks / TOLERANCE_DEPTH))


def check_paging(model: PagedModel, max_context: int, *, again: bool = False) -> Iterator[None]:
    """Runs the check in parts of one forward pass each; the caller may step other models between two parts.

    Uses the pool's first pages, which no session may have yet, and leaves them zeroed. `again`: an earlier engine has
    checked these weights. Raises ModelRejected.
    """
    family = model.skeleton.family
    count = sum(CHUNKS) + (FEW_SINGLES if model.placement.streams or again else SINGLES)
    pages = np.arange(1, 2 + count // model.page_size, dtype=np.int32)
    tokens = np.random.default_rng(0).integers(0, model.vocab, count)
    for paged in model.paged:
        paged.calls = 0

    routing = PinnedRouting(model)

    def run(start: int, count: int) -> Tensor:
        with routing:
            return _run(model, tokens[start : start + count], start, pages, max_context if start else count)

    try:
        whole = run(0, count)
    except torch.OutOfMemoryError:
        raise
    except Exception as fault:  # a family's forward may raise exceptions of any type
        raise ModelRejected(f"{family} fails the check at load: {fault!r}", family=family) from fault
    if bool(whole.isnan().any()):
        _refuse_not_finite(model)
    calls = {paged.calls for paged in model.paged}
    if calls - {1}:  # a model without attention has none
        raise ModelRejected(
            f"{family} fails the check at load: attention ran {sorted(calls)} times in its blocks, not once",
            family=family,
        )
    yield
    start = 0
    for chunk in CHUNKS:
        routing.begin(start)
        run(start, chunk)
        start += chunk
        yield
    steps = []
    for position in range(start, count):
        routing.begin(position)
        steps.append(run(position, 1))
        yield
    singles = torch.cat(steps)
    model.zero_pages(pages.tolist())
    with model.device.computing():
        for width in (model.skeleton.points.width, model.vocab):
            warm_up(width, model.dtype, model.pool.device)
    error = ((singles - whole[start:]).norm(dim=1) / whole[start:].norm(dim=1)).median().item()
    _expect_equal(model, error, routing.agreement())
    yield
    check_far_positions(model, max_context)


def _expect_equal(model: PagedModel, error: float, agreement: float) -> None:
    """error: of the logits of single steps. agreement: PinnedRouting.agreement. Raises ModelRejected."""
    family, allowed = model.skeleton.family, tolerance(model.dtype, model.num_blocks, model.layout.dtype)
    if not error < allowed:
        raise ModelRejected(
            f"{family} fails the check at load: the logits of a prompt in one pass and token by token differ by "
            f"{error:.2g} of their norm; {allowed:.2g} is allowed",
            family=family,
            error=error,
        )
    if not agreement > SAME_PICKS:
        raise ModelRejected(
            f"{family} fails the check at load: of the experts that its routers pick in single steps, {agreement:.0%} "
            f"are those of one pass; {SAME_PICKS:.0%} are needed",
            family=family,
            agreement=agreement,
        )


def _refuse_not_finite(model: PagedModel) -> None:
    family, tensor = model.skeleton.family, model.placement.not_finite()
    why = f"its activations overflow {model.dtype}" if tensor is None else f"NaN or infinity in tensor {tensor}"
    raise ModelRejected(
        f"{family} fails the check at load: its logits contain NaN: {why}", family=family, tensor=tensor
    )


def _run(
    model: PagedModel, tokens: npt.NDArray[np.int64], start: int, pages: npt.NDArray[np.int32], max_kv: int
) -> Tensor:
    """Runs `tokens` at positions from `start` → logits [tokens, vocab], float32."""
    count, page_size, device = len(tokens), model.page_size, model.device
    inputs = StepInputs(device, count, 1, len(pages), state_tokens=model.state_tokens)
    positions = np.arange(start, start + count)
    host = inputs.host
    host["ids"][:] = tokens
    host["positions"][:] = positions
    host["slots"][:] = pages[positions // page_size].astype(np.int64) * page_size + positions % page_size
    host["logit_rows"][:] = np.arange(count)
    host["starts"][:] = (0, count)
    host["lengths"][:] = start + count
    host["table"][:] = pages
    with device.computing(), torch.inference_mode():
        inputs.send()
        batch = inputs.paged_batch(max_query=count, max_kv=max_kv, fresh=start == 0)
        hidden = model.forward(inputs, batch)
        logits = model.logits(hidden, inputs.logit_rows(count)).float()
        device.synchronize()
    return logits
