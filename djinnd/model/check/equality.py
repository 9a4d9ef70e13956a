"""The check at load: verifies that a model runs correctly block by block over pages.

A family that ignores the attention interface, or that keeps state outside of it, would give wrong answers without an
error. Four things must hold with the weights that will be served:

    djinnd's attention ran exactly once in each block;
    each block gives a prompt in chunks and single steps the same hidden states as the prompt in one pass, with the same
    inputs (first_pass.py) and the same experts (routing.py), and the routers would have picked mostly the same;
    so does the head, with logits;
    far positions are computed as transformers computes them (far_positions.py).

Chunks and steps use the bound on KV length that captured graphs use: the longest context.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from djinn_client.errors import ModelRejected
from djinn_client.protocol.fields.kv_layout import FP8
from djinnd.model.check.far_positions import check_far_positions
from djinnd.model.check.first_pass import FirstPass
from djinnd.model.check.routing import PinnedRouting
from djinnd.model.step.inputs import StepInputs
from djinnd.model.step.paged_model import PagedModel
from djinnd.model.tuning import (
    BLOCK_TOLERANCE,
    CHUNKS,
    FEW_SINGLES,
    FP8_TOLERANCE,
    SAME_PICKS,
    SINGLES,
)
from djinnd.model.whitebox.editing import warm_up


def tolerance(dtype: torch.dtype, kv_dtype: str = "") -> float:
    """Allowed relative error of one block or of the logits. `kv_dtype`: of the pages."""
    return max(BLOCK_TOLERANCE[dtype], FP8_TOLERANCE if kv_dtype == FP8 else 0.0)


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

    first, routing = FirstPass(model), PinnedRouting(model)

    def run(start: int, count: int) -> Tensor:
        with first, routing:
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
    starts = [*accumulate(CHUNKS, initial=0), *range(sum(CHUNKS) + 1, count + 1)]
    passes = []
    for start, end in pairwise(starts):
        first.begin(start)
        routing.begin(start)
        passes.append(run(start, end - start))
        yield
    model.zero_pages(pages.tolist())
    with model.device.computing():
        for width in (model.skeleton.points.width, model.vocab):
            warm_up(width, model.dtype, model.pool.device)
    chunks = range(len(CHUNKS))
    kinds = [*(slice(each, each + 1) for each in chunks), slice(len(CHUNKS), None)]
    errors = torch.stack([first.errors(kind) for kind in kinds]).amax(dim=0)
    singles, wanted = torch.cat(passes[len(CHUNKS) :]), whole[sum(CHUNKS) :]
    error = ((singles - wanted).norm(dim=1) / wanted.norm(dim=1)).median()
    _expect_equal(model, [*errors.tolist(), error.item()], routing.agreement())
    yield
    check_far_positions(model, max_context)


def _expect_equal(model: PagedModel, errors: list[float], agreement: float) -> None:
    """errors: of the embeds, of each block and of the logits. agreement: PinnedRouting.agreement. Raises
    ModelRejected."""
    family, allowed = model.skeleton.family, tolerance(model.dtype, model.layout.dtype)
    parts = ["its embeds", *(f"what block {index} adds" for index in range(model.num_blocks)), "its logits"]
    for part, error in zip(parts, errors, strict=True):
        if not error < allowed:
            raise ModelRejected(
                f"{family} fails the check at load: {part} in one pass over a prompt and token by token differ by "
                f"{error:.2g} of the norm; {allowed:.2g} is allowed",
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
