"""The forward passes of a step: one by a captured graph, one eagerly, or both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from djinnd.core.batch import blocks_of
from djinnd.device import Device
from djinnd.engine.adapters.residency import AdapterResidency
from djinnd.engine.probes.model_probes import ModelProbes
from djinnd.engine.probes.partial_rows import with_partial_rows
from djinnd.engine.probes.step_probe import Part, Touched
from djinnd.engine.run.batch_inputs import Rows, compose, told_positions
from djinnd.engine.run.guessed_rows import sampled_tokens
from djinnd.engine.run.logit_rows import LogitRows
from djinnd.engine.run.logits_window import LogitsWindow
from djinnd.engine.run.prompt_scores import PromptScorer
from djinnd.model.adapter_rows import most_tiles
from djinnd.model.step.graphs import StepGraphs
from djinnd.model.step.inputs import StepInputs
from djinnd.model.step.last_tokens import LastTokens
from djinnd.model.step.paged_model import PagedModel
from djinnd.model.step.shapes import Shape
from djinnd.model.whitebox.probe import Probe

# Takes the rows of a pass through the last block, and their hidden states [1, tokens, width], which the next pass may
# overwrite: it queues its work on the current stream. There may be padding behind the rows' tokens.
Behind = Callable[[Rows, Tensor], None]


class BlockTables(Protocol):
    """Where the KV of sessions is: see KvManager, which has these methods."""

    def pages_held(self, session_id: str) -> int: ...

    def page_table(self, session_ids: Sequence[str]) -> npt.NDArray[np.int32]: ...


@dataclass(eq=False)
class Passes:
    """The forward passes of one model. Owns the inputs of eager passes; a graph's inputs are the graph's."""

    model: PagedModel
    device: Device
    kv: BlockTables
    probes: ModelProbes | None  # None: no edits, and no captures
    adapters: AdapterResidency
    windows: Mapping[int, LogitsWindow]  # by request: the logits of forward passes that run
    scores: PromptScorer
    page_size: int  # tokens
    tile_tokens: int
    last_tokens: LastTokens | None  # of the last step, if the next one may be launched before they are read
    behind: Behind | None = None  # takes the result of the last block
    ran: Shape | None = field(init=False, default=None)  # of the last pass of all blocks that a graph can replay
    inputs: StepInputs | None = field(init=False, default=None)  # of the last pass; the device may not have taken them

    def over(self, tables: BlockTables, last_tokens: LastTokens) -> Passes:
        """Further passes of the model, over other block tables and without edits and captures. No step may run
        meanwhile: both may use the inputs of the same graphs."""
        return replace(
            self, kv=tables, probes=None, windows={}, scores=PromptScorer(), last_tokens=last_tokens, behind=None
        )

    def wait(self) -> None:
        """Waits until the device has taken the last inputs."""
        if self.inputs is not None:
            self.inputs.wait()

    def run(self, rows: Rows, touched: Touched | None, graphs: StepGraphs | None) -> tuple[Rows, Tensor | None]:
        """Runs the rows of a batch. → the rows in the order of the passes, and the logits of rows that sample, or None.

        Rows that need more than a graph gives run eagerly. They get a pass of their own, so that the other rows keep
        the graph. If weights stream, all rows run eagerly together, because each pass over the blocks costs the bus.
        """
        whole = None if touched is None else touched.part(range(len(rows)))
        if graphs is None or (_have_adapters(rows) and not self.adapters.can_be_captured):
            return rows, self._mixed(rows, whole)
        behind = frozenset[int]() if touched is None else touched.behind
        apart = [
            i for i, row in enumerate(rows) if i in behind or (row.request.wants_prompt_logits and told_positions(row))
        ]
        if not apart:
            return rows, self._replay(graphs, rows, whole)
        if len(apart) == len(rows) or self.model.placement.streams:
            return rows, self._mixed(rows, whole)
        others = sorted(set(range(len(rows))).difference(apart))
        first, last = (None if touched is None else touched.part(some) for some in (others, apart))
        order = [rows[index] for index in (*others, *apart)]
        given = [self._replay(graphs, order[: len(others)], first), self._mixed(order[len(others) :], last)]
        logits = [some for some in given if some is not None]
        return order, torch.cat(logits) if logits else None

    def _replay(self, graphs: StepGraphs, rows: Rows, part: Part | None) -> Tensor | None:
        """Replays a graph for these rows. None of them is edited or captured after the last block. → the logits of
        rows that sample, or None."""
        counts = [row.count for row in rows]
        sampling = sampled_tokens(rows)  # a graph has logits for as many tokens as rows
        shape = graphs.fitting(sum(counts), max(len(rows), len(sampling)), max(counts), _have_adapters(rows))
        if shape is None:
            return self._mixed(rows, part)
        inputs = graphs.inputs(shape)
        self._compose(inputs, rows)
        inputs.host["logit_rows"][: len(sampling)] = sampling
        inputs.pad(sum(counts), len(rows), len(sampling))
        probe = self._probe(inputs, rows, part)
        blocks = blocks_of(rows)
        if len(blocks) == self.model.num_blocks:
            self.ran = shape
        behind = None if self.behind is None else partial(self.behind, rows)
        return graphs.run(shape, len(sampling), probe, blocks, behind)

    def _mixed(self, rows: Rows, part: Part | None) -> Tensor | None:
        """Runs these rows eagerly. → the logits of rows that sample, or None."""
        counts = [row.count for row in rows]
        width, tiles = max(self.kv.pages_held(row.session.id) for row in rows), 0
        if _have_adapters(rows):
            tiles = most_tiles(sum(counts), len(rows), self.tile_tokens)
        inputs = StepInputs(
            self.device, sum(counts), len(rows), width, tiles, self.model.state_tokens, self.last_tokens
        )
        self._compose(inputs, rows)
        ends = list(accumulate(counts))
        sampling = sampled_tokens(rows)
        told = [at + end - row.end for row, end in zip(rows, ends, strict=True) for at in told_positions(row)]
        seen = [] if part is None else part.seen_behind(sampling)
        logit_rows = LogitRows(self.model, inputs, part, [*sampling, *told, *seen])
        probe = self._probe(inputs, rows, part)
        inputs.send()
        longest, fresh = max(row.end for row in rows), all(row.start == 0 for row in rows)
        batch = inputs.paged_batch(max_query=max(counts), max_kv=longest, fresh=fresh)
        blocks = blocks_of(rows)
        logit_rows.hidden = self.model.forward(inputs, batch, probe, blocks)
        if self.behind is not None and blocks.stop == self.model.num_blocks:
            self.behind(rows, logit_rows.hidden)
        logits = logit_rows.logits(0, len(sampling)) if sampling else None
        self._tell_logits(logit_rows, len(sampling), rows)
        for _ in logit_rows.pieces(len(sampling) + len(told), len(seen)):
            pass  # the probe reads them
        return logits

    def _probe(self, inputs: StepInputs, rows: Rows, part: Part | None) -> Probe | None:
        """The probe of a pass's prologue and blocks. `inputs` have been filled for the pass."""
        probe, probes = None if part is None else part.probe(), self.probes
        # a row that will wait is captured, one that has waited is parked
        if probes is None or not (probes.parked or probes.captures):
            return probe
        return with_partial_rows(self.device, inputs, probes.parked, rows, self.model.num_blocks, probe)

    def _tell_logits(self, logit_rows: LogitRows, first: int, rows: Rows) -> None:
        """Writes the logits from entry `first` of `logit_rows` on to the windows of forward passes, and scores the
        prompts that want it."""
        for row in rows:
            positions = told_positions(row)
            if not positions:
                continue
            pieces = logit_rows.pieces(first, len(positions))
            if row.request.logits:
                position = positions.start - row.request.first
                for logits in pieces:
                    self.windows[row.request.id].write(position, logits)
                    position += len(logits)
            else:
                self.scores.add(row, positions, pieces)
            first += len(positions)

    def _compose(self, inputs: StepInputs, rows: Rows) -> None:
        """Fills `inputs`. First waits until the device has taken the last pass's inputs, which may be the same buffers:
        so the host is at most one pass ahead. That the results of an earlier step have been read does not tell that,
        because the last step may have been launched behind it."""
        self.wait()
        self.inputs = inputs
        compose(inputs, rows, self.kv.page_table([row.session.id for row in rows]), self.page_size)
        if inputs.tiles:
            inputs.fill_adapters(self.adapters.slots_of(rows), [row.count for row in rows], self.tile_tokens)


def _have_adapters(rows: Rows) -> bool:
    return any(row.session.adapter for row in rows)
