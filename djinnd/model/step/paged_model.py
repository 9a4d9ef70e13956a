"""PagedModel: a loaded model with its KV pool, and the forward pass that runs it block by block."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from djinn_client.protocol.fields.kv_layout import KvLayout
from djinn_client.protocol.fields.points import Point
from djinnd.model.attention.hf_attention import AttentionContext, BlockKV
from djinnd.model.attention.latents import Latents
from djinnd.model.attention.paged import attention_for
from djinnd.model.copies.upload import upload
from djinnd.model.family.skeleton import Skeleton
from djinnd.model.lora.products import LoraProducts
from djinnd.model.lora.targets import find_targets
from djinnd.model.paged_batch import PagedBatch
from djinnd.model.placing.projections import Projection
from djinnd.model.placing.weight_placement import WeightPlacement
from djinnd.model.states.layout import Stateful, state_views
from djinnd.model.states.module import StateContext, StateModule
from djinnd.model.states.segments import Segments, cut
from djinnd.model.step.inputs import StepInputs
from djinnd.model.step.page_regions import kv_regions
from djinnd.model.tuning import SLOTS
from djinnd.model.whitebox.probe import Probe, look, looks_inside, watching


class PagedModel:
    """A model that is ready to run. Its modules are bound to device buffers, and its attention reads and writes pages.

    Owns the KV pool, uint8 [pages, page_bytes]. The pool is page-major: a page's keys and values of all blocks are
    contiguous, as `layout` says. Page 0 is the scratch page: the KV of padding tokens is written there.
    """

    def __init__(
        self, skeleton: Skeleton, placement: WeightPlacement, dtype: torch.dtype, layout: KvLayout, pool: Tensor
    ) -> None:
        self.skeleton = skeleton
        self.adapter = skeleton.adapter
        self.placement = placement
        self.device = placement.device
        self.dtype = dtype
        self.layout = layout
        self.context = AttentionContext(attention_for(pool.device))
        self.states = StateContext()
        self._state_modules = [self._replace_forward(told) for told in skeleton.stateful]
        self.adapters: LoraProducts | None = None  # once one was loaded
        if placement.beside is not None:
            placement.beside.install(self.adapter.blocks)
        self.use_pool(pool)

    def use_pool(self, pool: Tensor) -> None:
        """Points the attention of every block at `pool`. Graphs that were captured over an earlier pool are invalid."""
        self.pool = pool
        self.paged: list[BlockKV] = []  # of each attention
        regions = kv_regions(pool, self.layout)[: len(self.skeleton.kv)]
        for at, shape, region in zip(self.skeleton.attentions, self.skeleton.kv, regions, strict=True):
            assert region is not None
            paged = BlockKV(self.context, *region, at.latents, is_shared=isinstance(shape, int))
            if at.latents is not None:
                at.latents.dtype = paged.keys.dtype
                self._let_absorb(at.block, at.latents)
            self.adapter.blocks[at.block].get_submodule(at.path).paged = paged  # type: ignore[assignment]
            self.paged.append(paged)
        views = state_views(pool, self.layout, self.skeleton.stateful)
        for module, states in zip(self._state_modules, views, strict=True):
            module.states = states

    def _let_absorb(self, block: int, latents: Latents) -> None:
        """Lets attention use the weights that expand latents, if they can be found."""
        if latents.absorption is None:
            return
        module, context = self.adapter.blocks[block].get_submodule(latents.absorption.path), self.context
        if not isinstance(module, Projection):
            matrix = partial(getattr, module, "weight")
        elif module.has_own_product:
            matrix = partial(getattr, module.product, "weight")
        else:
            return
        latents.absorb(matrix, lambda: context.batch is not None and context.kernels.absorbs(context.batch))

    def _replace_forward(self, told: Stateful) -> StateModule:
        module = self.adapter.blocks[told.block].get_submodule(told.path)
        made = StateModule(module, told, self.states)
        module.forward = made
        return made

    @property
    def num_blocks(self) -> int:
        return len(self.adapter.blocks)

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.layout.page_size

    def first_byte(self, block: int) -> int:
        """Byte of a page at which the KV of the blocks from `block` on begins."""
        return self.layout.first_byte(sum(at.block < block for at in self.skeleton.attentions))

    @property
    def has_states(self) -> bool:
        """True for a hybrid model: some of its modules keep a state."""
        return bool(self._state_modules)

    @property
    def steps_in_place(self) -> bool:
        """True if a step of single tokens needs nothing from the host to find its states: kernels read and write them
        in the pool. True for a model without states, too."""
        return all(told.in_place for told in self.skeleton.stateful)

    @property
    def state_tokens(self) -> int:
        """Tokens of a page, if it has a state region; otherwise 0."""
        return self.page_size if self.has_states else 0

    @property
    def latents(self) -> list[Latents]:
        """The latents of each attention that has some. Steps that expand them read lengths on the host, so that graphs
        cannot hold these steps."""
        return [at.latents for at in self.skeleton.attentions if at.latents is not None]

    @property
    def vocab(self) -> int:
        return int(self.skeleton.config.vocab_size)

    @torch.inference_mode()
    def forward(
        self, inputs: StepInputs, batch: PagedBatch, probe: Probe | None = None, blocks: range | None = None
    ) -> Tensor:
        """Runs the tokens of `inputs` through `blocks` (default: all) → hidden states [1, tokens, width].

        batch: from `inputs.paged_batch`.
        The first block of `blocks` gets the output of the prologue, even if it is not block 0; `probe` may replace it.
        `probe` is called at its points in these blocks. `logits` calls it at norm and logits.
        """
        blocks = range(self.num_blocks) if blocks is None else blocks
        self.attend(batch)
        with self.device.span("compute", "prologue"):
            prologue = self.adapter.prologue(inputs.ids, inputs.positions)
        hidden = prologue.hidden
        self.placement.begin_pass(prologue.hidden.shape[1], adapters=batch.adapters is not None)
        self.placement.skip(range(blocks.start))
        if probe is not None:
            look(probe, Point("resid", blocks.start), hidden)
        for index in blocks:
            self.placement.begin(index)
            within = probe if probe is not None and looks_inside(probe, index) else None
            hidden = self.run_block(index, hidden, prologue.arguments[index], within)
            self.placement.end(index)
            if probe is not None:
                look(probe, Point("resid", index + 1), hidden)
        self.placement.skip(range(blocks.stop, self.num_blocks))
        return hidden

    def attend(self, batch: PagedBatch) -> None:
        """Sets the batch for the blocks that run next: attention reads its pages, experts are fetched only for its real
        tokens, and adapters add to the results of their rows. Tokens behind the real ones are padding."""
        self.placement.tokens.real = batch.query_starts[-1:]
        self.context.batch = batch
        self.states.segments = self._segments(batch) if self._state_modules else None
        if self.adapters is not None:
            self.adapters.rows = batch.adapters

    def _segments(self, batch: PagedBatch) -> Segments:
        """Without a look at the batch on the host if all rows have one token, and all states stay where they are."""
        if batch.states is not None and self.steps_in_place:
            return Segments(None, batch.states, [])
        return cut(batch, self.page_size)

    def install_adapters(self) -> LoraProducts:
        """The adapters' products, which are installed at the first call."""
        if self.adapters is None:
            from djinnd.model.step.adapter_rehearsal import served_targets  # which runs a PagedModel

            prefixes = self.skeleton.prefixes
            expanding = {prefixes[at.block] + path for at in self.skeleton.attentions for path in at.expanding}
            targets = find_targets(self.adapter.blocks, prefixes, expanding)
            self.adapters = LoraProducts(served_targets(self, targets), SLOTS, self.pool.device)
        return self.adapters

    def run_block(self, index: int, hidden: Tensor, arguments: dict[str, Any], probe: Probe | None = None) -> Tensor:
        """Unpacks the block if its form needs that, and computes it. A captured graph holds exactly this call.
        `probe` is called at the block's attn and mlp points."""
        self.placement.prepare(index, hidden.shape[1])
        if probe is None:
            return self.adapter.run_block(index, hidden, arguments)
        with watching(probe, self._points_in(index)):
            return self.adapter.run_block(index, hidden, arguments)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, logit_rows: Tensor, probe: Probe | None = None) -> Tensor:
        """hidden [1, tokens, width], logit_rows int64 [rows] → logits [rows, vocab] of these tokens. `probe` is called
        at the norm and logits points."""
        chosen = hidden.index_select(1, logit_rows)
        with self.device.span("compute", "epilogue"):
            if probe is None:
                return self.adapter.epilogue(chosen)
            with watching(probe, self._points_behind()):
                logits = self.adapter.epilogue(chosen)
            look(probe, Point("logits"), logits.unsqueeze(0))
            return logits

    def _points_in(self, index: int) -> dict[Point, nn.Module]:
        """The block's modules at the attn and mlp points. They are looked up by path each time, because faster modules
        replace them when the model is placed on its device."""
        block, points = self.adapter.blocks[index], self.skeleton.points
        paths = {Point("attn", index): points.attention, Point("mlp", index): points.mlp}
        return {point: block.get_submodule(path) for point, path in paths.items() if path}

    def _points_behind(self) -> dict[Point, nn.Module]:
        norm = self.skeleton.points.norm
        return {Point("norm"): self.adapter.model.get_submodule(norm)} if norm else {}

    @torch.inference_mode()
    def zero_pages(self, pages: list[int]) -> None:
        """Clears pages before another tenant may use them."""
        words = self.pool.view(torch.int64)  # the widest dtype: fewest elements to write
        words.index_fill_(0, upload(pages, torch.int64, words.device), 0)

    @torch.inference_mode()
    def copy_page(self, source: int, target: int) -> None:
        self.pool[target].copy_(self.pool[source])
