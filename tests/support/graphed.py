"""A model with captured graphs on a CUDA device, run a step at a time: as a graph, or kernel by kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from djinn_client.protocol.fields.placing import Placing
from djinnd.device.cuda import CudaDevice
from djinnd.model.placing.loader import Weights
from djinnd.model.step.graphs import StepGraphs
from djinnd.model.step.paged_model import PagedModel
from djinnd.model.step.shapes import Shape
from djinnd.model.whitebox.probe import Probe
from tests.support.cuda import cuda_device
from tests.support.loaded import InputRow, fill, load_weights, paged_model, random_prompt
from tests.support.models import reduced_model

PAGE, PAGES, WIDTH = 16, 200, 20
MAX_TOKENS, MAX_ROWS = 128, 20
FOLDER = reduced_model("llama-3.1")

Rows = list[tuple[int, int]]  # (tokens of the row, tokens of its session after it)


@dataclass
class Graphed:
    device: CudaDevice
    weights: Weights
    model: PagedModel
    graphs: StepGraphs

    @torch.inference_mode()
    def compose(self, rows: list[InputRow]) -> tuple[Shape, int]:
        """Wants the logits of each row's last token."""
        counts = [len(tokens) for tokens, _, _ in rows]
        shape = self.graphs.fitting(sum(counts), len(rows), max(counts))
        assert shape is not None
        inputs = self.graphs.inputs(shape)
        fill(inputs, rows, PAGE)
        inputs.host["logit_rows"][: len(rows)] = inputs.host["starts"][1 : len(rows) + 1] - 1
        inputs.pad(sum(counts), len(rows), len(rows))
        return shape, len(rows)

    @torch.inference_mode()
    def replay(self, rows: list[InputRow], probe: Probe | None = None) -> Tensor:
        shape, logit_rows = self.compose(rows)
        with self.device.computing():
            if self.graphs.wants(shape):
                self.graphs.run(shape, logit_rows)
                self.graphs.capture(shape)
            logits = self.graphs.run(shape, logit_rows, probe)
        self.device.synchronize()
        assert logits is not None
        return logits.clone()

    @torch.inference_mode()
    def eager(self, rows: list[InputRow], probe: Probe | None = None) -> Tensor:
        """Runs the same inputs with the same bounds, without a graph."""
        shape, logit_rows = self.compose(rows)
        inputs = self.graphs.inputs(shape)
        with self.device.computing():
            inputs.send()
            longest = WIDTH * PAGE
            batch = inputs.paged_batch(max_query=shape.max_query, max_kv=longest, fresh=False)
            hidden = self.model.forward(inputs, batch, probe)
            logits = self.model.logits(hidden, inputs.logit_rows(shape.rows), probe)
        self.device.synchronize()
        return logits[:logit_rows].clone()


@contextmanager
def graphed_model(dtype: str, placing: Placing) -> Iterator[Graphed]:
    with cuda_device() as device:
        weights = load_weights(FOLDER, device, dtype, placing=placing)
        model = paged_model(weights, PAGES, PAGE, device)
        yield Graphed(device, weights, model, StepGraphs(model, device, MAX_TOKENS, MAX_ROWS, WIDTH, WIDTH * PAGE))
        weights.release(device)
        device.release("pool")


def sessions(lengths: list[int]) -> list[tuple[list[int], list[int]]]:
    """(tokens, pages) of a session for each length, with pages in random order."""
    order = (torch.randperm(PAGES - 1, generator=torch.Generator().manual_seed(0)) + 1).tolist()
    held = []
    for seed, length in enumerate(lengths):
        pages = [order.pop() for _ in range(-(-length // PAGE))]
        held.append((random_prompt(length, 512, seed), pages))
    return held


def with_history(graphed: Graphed, rows: Rows) -> tuple[list[InputRow], list[list[int]]]:
    """Rows that bring `count` tokens to sessions of then `length` tokens; the pages hold the earlier ones."""
    graphed.model.pool.zero_()
    held = sessions([length for _, length in rows])
    for (count, length), (tokens, pages) in zip(rows, held, strict=True):
        for start in range(0, length - count, MAX_TOKENS):
            graphed.eager([(tokens[start : min(start + MAX_TOKENS, length - count)], start, pages)])
    step = [
        (tokens[length - count :], length - count, pages)
        for (count, length), (tokens, pages) in zip(rows, held, strict=True)
    ]
    return step, [tokens for tokens, _ in held]


def named(rows: Rows) -> str:
    return f"{len(rows)} rows, {sum(count for count, _ in rows)} tokens"
