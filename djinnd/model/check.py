"""The check at load: is this family really run block by block over our pages?

A family that ignores the attention interface, or that carries state past it, would answer and be wrong. Two things must
hold, on the weights that will serve: our attention ran exactly once in each block, and a prompt that is run at once
gives the logits of the same prompt run in a chunk and single steps.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from djinn_client.errors import ModelRejected
from djinnd.device import Device
from djinnd.model.inputs import StepInputs
from djinnd.model.paged_model import PagedModel

TOKENS = 12
CHUNK = 8
# ‖a - b‖ / ‖b‖ of logits that two roundings of the same arithmetic may show; a wrong path shows 0.1 to 1.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}


def check_paging(model: PagedModel, device: Device, page_size: int) -> None:
    """Raises ModelRejected. Uses the pool's first pages, which nobody has yet, and leaves them zeroed."""
    pages = np.arange(1, 2 + TOKENS // page_size, dtype=np.int32)
    tokens = np.random.default_rng(0).integers(0, model.vocab, TOKENS)
    for paged in model.paged:
        paged.calls = 0
    whole = _run(model, device, tokens, 0, pages, page_size)
    calls = {paged.calls for paged in model.paged}
    if calls != {1}:
        raise ModelRejected(
            f"{model.skeleton.family} fails the check at load: attention ran {sorted(calls)} times in its blocks, not once",
            family=model.skeleton.family,
        )
    _run(model, device, tokens[:CHUNK], 0, pages, page_size)
    for position in range(CHUNK, TOKENS):
        single = _run(model, device, tokens[position : position + 1], position, pages, page_size)
    model.zero_pages(pages.tolist())
    error = ((single - whole).norm() / whole.norm()).item()
    if not error < _TOLERANCE[model.dtype]:
        raise ModelRejected(
            f"{model.skeleton.family} fails the check at load: prompt at once and token by token differ by {error:.2g} "
            f"of the logits' norm, {_TOLERANCE[model.dtype]:.2g} is allowed",
            family=model.skeleton.family,
            error=error,
        )


def _run(
    model: PagedModel, device: Device, tokens: np.ndarray, start: int, pages: np.ndarray, page_size: int
) -> Tensor:
    """Logits [vocab], float32, of the last of `tokens`, which stand at positions from `start`."""
    count = len(tokens)
    inputs = StepInputs(device, count, 1, len(pages))
    positions = np.arange(start, start + count)
    host = inputs.host
    host["ids"][:] = tokens
    host["positions"][:] = positions
    host["slots"][:] = pages[positions // page_size].astype(np.int64) * page_size + positions % page_size
    host["picks"][:] = count - 1
    host["starts"][:] = (0, count)
    host["lengths"][:] = start + count
    host["table"][:] = pages
    with device.computing():
        inputs.send()
        hidden = model.forward(inputs, max_query=count, max_kv=start + count, fresh=start == 0)
        logits = model.logits(hidden, inputs.picks(1))[0].float()
        device.synchronize()
    return logits
