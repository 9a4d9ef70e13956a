"""Part of the check at load: verifies positions that no short prompt reaches.

A family may compute differently from some position on, and may take the position from an argument that djinnd does not
pass. So two things are checked at each boundary that the configuration suggests (boundaries.py):

    attention gets the same queries, keys and values as when transformers runs the family after so many tokens;
    each block's mask equals the window or the chunks that attention is called with.

This needs no KV: attention itself does not run, and one block of each kind is enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NoReturn

import torch
from torch import Tensor

from djinn_client.errors import ModelRejected
from djinnd.model.attention.latents import Latents
from djinnd.model.attention.paged import PagedAttention
from djinnd.model.family.adapter import Prologue
from djinnd.model.family.configuration.boundaries import boundaries
from djinnd.model.family.learning.kinds import kind_of
from djinnd.model.family.own_forward import Rule, prologue_after
from djinnd.model.paged_batch import PagedBatch, Softmax
from djinnd.model.step.paged_model import PagedModel
from djinnd.model.tuning import CHECKED_BEFORE, POSITION_TOLERANCE


class _Catching(PagedAttention):
    """Replaces attention: keeps the arguments of the last call, and returns a part of each token's own query."""

    tensors: tuple[Tensor, ...]  # q, k, v: [tokens, heads, width]; only q if the block shares an earlier one's KV
    softmax: Softmax  # without sinks

    def write(self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch) -> None:
        pass

    def attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        keys: Tensor,
        values: Tensor,
        batch: PagedBatch,
        softmax: Softmax,
        latents: Latents | None = None,
    ) -> Tensor:
        self.tensors = tuple(x.clone() for x in (q, k, v) if x is not None)
        self.softmax = replace(softmax, sinks=None)
        width = values.shape[3] if v is None else v.shape[2]
        return q.repeat(1, 1, -(-width // q.shape[2]))[..., :width].contiguous()


@torch.inference_mode()
def check_far_positions(model: PagedModel, max_context: int) -> None:
    """Checks the boundaries up to `max_context`. The model must have run before. Raises ModelRejected."""
    looked_at = boundaries(model.skeleton.config.to_dict(), max_context)
    rows = [range(max(0, end - CHECKED_BEFORE - 1), min(end + 1, max_context)) for end in looked_at]
    usual, model.context.kernels = model.context.kernels, (catching := _Catching())
    model.placement.tokens.real = None  # all tokens are real
    model.states.segments = None
    try:
        with model.device.computing():
            _check(model, rows, catching)
            model.device.synchronize()
    finally:
        model.context.kernels = usual


def _check(model: PagedModel, rows: list[range], catching: _Catching) -> None:
    positions = torch.tensor([[position for row in rows for position in row]], device=model.pool.device)
    ids = positions * 7919 % model.vocab
    ours = model.adapter.prologue(ids, positions)
    starts = [0, *torch.tensor([len(row) for row in rows]).cumsum(0).tolist()]
    spans = [slice(start, start + len(row)) for start, row in zip(starts, rows, strict=False)]
    theirs = [prologue_after(model.adapter, ids[:, at], row.start) for at, row in zip(spans, rows, strict=True)]
    for (own, _), at, row in zip(theirs, spans, rows, strict=True):
        _compare(model, ours.hidden[0, at], own.hidden[0], row, "embeds")
    model.placement.begin_pass(positions.numel(), adapters=False)
    for index in _one_of_each_kind(model):
        given, softmax = _run(model, index, ours, catching)
        for (own, rules), at, row in zip(theirs, spans, rows, strict=True):
            wanted, usual = _run(model, index, own, catching)
            for got, want in zip(given, wanted, strict=True):
                _compare(model, got[at], want, row, "attends")
            if softmax != usual:
                _refuse(model, row, f"block {index} calls attention with {usual} behind a cache, {softmax} without")
            _check_mask(model, index, rules[index], softmax, rows)
        model.placement.end(index)


def _run(model: PagedModel, index: int, prologue: Prologue, catching: _Catching) -> tuple[tuple[Tensor, ...], Softmax]:
    """Runs a block up to its attention → the arguments of attention."""
    model.run_block(index, prologue.hidden.clone(), prologue.arguments[index])
    return catching.tensors, catching.softmax


def _one_of_each_kind(model: PagedModel) -> Iterator[int]:
    """One pass over the model that yields one block with attention of each kind; the caller calls `placement.end` for
    it."""
    seen: set[object] = set()
    having = {attention.block for attention in model.skeleton.attentions}
    for index, block in enumerate(model.adapter.blocks):
        kind = kind_of(block)
        if kind in seen or index not in having:
            model.placement.skip(range(index, index + 1))
            continue
        seen.add(kind)
        model.placement.begin(index)
        yield index


def _compare(model: PagedModel, ours: Tensor, theirs: Tensor, row: range, does: str) -> None:
    """Compares tokens whose numbers are finite; a few rows of an embedding may hold NaN. Raises ModelRejected."""
    ours, theirs = ours.flatten(1).float(), theirs.flatten(1).float()
    norms = theirs.norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
    errors = ((ours - theirs).norm(dim=1) / norms)[theirs.isfinite().all(dim=1)]
    if not len(errors):
        return
    error, allowed = errors.max().item(), POSITION_TOLERANCE[model.dtype]
    if not error <= allowed:
        told = f"it {does} differently with positions than with a cache, by {error:.2g} of the norm"
        _refuse(model, row, f"{told}; {allowed:.2g} is allowed")


def _check_mask(model: PagedModel, index: int, rule: Rule | None, softmax: Softmax, rows: list[range]) -> None:
    """Compares the family's mask with causality and the window or chunks of `softmax`, for queries and keys at the
    boundaries and at the ends of their windows. Raises ModelRejected."""
    if rule is None:
        return
    reached = {position for row in rows for position in row}
    window, chunk = softmax.window, softmax.chunk
    at = sorted({0} | reached | {p - window + end for p in reached for end in (0, 1) if window and p >= window})
    places = torch.tensor(at, device=model.pool.device)
    zero, query, key = torch.zeros_like(places[:1]), places[:, None], places[None, :]
    seen = (key <= query) & ((key > query - window) if window else True)
    if chunk:
        seen &= key >= query // chunk * chunk
    try:
        own = rule(zero, zero, query, key)
    except IndexError:  # it looks the position up in a tensor that has an entry for each token of the request
        _refuse(model, rows[0], f"the mask of block {index} depends on the tokens of a request, not on positions alone")
    wrong = (own != seen).nonzero().tolist()
    if wrong:
        q, k = (at[place] for place in wrong[0])
        row, told = range(q, q + 1), f"chunks of {chunk} tokens" if chunk else f"a window of {window} tokens"
        _refuse(model, row, f"the mask of block {index} and {told} differ about token {k}")


def _refuse(model: PagedModel, row: range, why: str) -> NoReturn:
    family, position = model.skeleton.family, row.stop - 1
    raise ModelRejected(
        f"{family} fails the check at load, near position {position:,}: {why}", family=family, position=position
    )
