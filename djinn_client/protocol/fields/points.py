"""Points: places in a model where a session may look at activations, and change them.

                        ┌────────── block i ──────────┐
    ids ─► embed ─► resid i ─► … attn … mlp … ─► resid i+1 ─► … ─► resid N ─► norm ─► logits

Names are TransformerLens', or the paths of the Hugging Face modules whose output a point is:

    hook_embed                         the first block's input (the same as blocks.0.hook_resid_pre)
    blocks.3.hook_resid_pre            block 3's input
    blocks.3.hook_attn_out             its attention's output   blocks.3.attn.hook_out   model.layers.3.self_attn
    blocks.3.hook_mlp_out              its MLP's output         blocks.3.mlp.hook_out    model.layers.3.mlp
    blocks.3.hook_resid_post           block 3's output         blocks.3                 model.layers.3
    ln_final.hook_normalized           the final norm's output                           model.norm
    logits                             the sampler's input      hook_logits              lm_head

A `*` stands for every block.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

from djinn_client.errors import InvalidRequest

Where = Literal["resid", "attn", "mlp", "norm", "logits"]


class Point(msgspec.Struct, frozen=True, array_like=True):
    """`block` of attn and mlp is their block. Of resid it is the block with this input; the last block's output has the
    number of blocks. For other points it is 0."""

    where: Where
    block: int = 0

    @property
    def is_behind(self) -> bool:
        """True if the point is behind all blocks. Only tokens with wanted logits come there."""
        return self.where in ("norm", "logits")


class PointMap(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The points of a model, and the names of its own modules; "" if it has no such module."""

    blocks: int
    width: int  # of an activation, at every point but logits
    vocab: int
    layers: str = ""  # the path of the list of blocks: model.layers
    attention: str = ""  # within a block: self_attn
    mlp: str = ""
    norm: str = ""  # the path of the final norm: model.norm
    head: str = ""

    def names(self) -> Iterator[str]:
        """One name for each point, in the order of computing."""
        yield "hook_embed"
        for block in range(self.blocks):
            yield f"blocks.{block}.hook_resid_pre"
            if self.attention:
                yield f"blocks.{block}.hook_attn_out"
            if self.mlp:
                yield f"blocks.{block}.hook_mlp_out"
            yield f"blocks.{block}.hook_resid_post"
        if self.norm:
            yield "ln_final.hook_normalized"
        yield "logits"

    def width_at(self, point: Point) -> int:
        return self.vocab if point.where == "logits" else self.width

    def order(self, point: Point) -> tuple[int, int]:
        """The key that sorts points in the order of computing."""
        block = self.blocks if point.is_behind else point.block
        return block, ("resid", "attn", "mlp", "norm", "logits").index(point.where)

    def resolve(self, name: str) -> dict[str, Point]:
        """Name → point, for one point; with a `*` for each block's, in their order.

        Raises InvalidRequest for an unknown name, with similar ones."""
        if "*" not in name:
            return {name: self._find(name)}
        blocks = [name.replace("*", str(block), 1) for block in range(self.blocks)]
        if "*" in blocks[0]:
            raise InvalidRequest(f"{name!r} has two stars, and there is one number in a point's name", field="point")
        return {each: self._find(each) for each in blocks}

    def resolve_all(self, names: Iterable[str]) -> dict[str, Point]:
        """The names of several points, each once."""
        return {name: point for pattern in names for name, point in self.resolve(pattern).items()}

    def _find(self, name: str) -> Point:
        for pattern, where, shift in self._patterns():
            match = re.fullmatch(pattern, name)
            if match is None:
                continue
            block = int(match[1]) if match.groups() else 0
            if block < self.blocks:
                return Point(where, block + shift)
            raise self._unknown(name, f": it has {self.blocks} blocks, from 0 on")
        near = difflib.get_close_matches(name, [*self.names(), *self._modules()], n=3)
        raise self._unknown(
            name, f": did you mean {', '.join(near)}?" if near else "; points() lists those that it has"
        )

    def _unknown(self, name: str, why: str) -> InvalidRequest:
        return InvalidRequest(f"the model has no point {name!r}{why}", field="point", blocks=self.blocks)

    def _modules(self) -> Iterator[str]:
        """The paths of the modules whose output a point is."""
        for block in range(self.blocks) if self.layers else ():
            path = f"{self.layers}.{block}"
            yield from (path, *(f"{path}.{module}" for module in (self.attention, self.mlp) if module))
        yield from filter(None, (self.norm, self.head))

    def _patterns(self) -> Iterator[tuple[str, Where, int]]:
        """For each kind of point: a pattern of its names, and how far its block is from the number in them."""
        block = r"blocks\.(\d{1,6})"
        yield r"hook_embed", "resid", 0
        yield rf"{block}\.hook_resid_pre", "resid", 0
        yield rf"{block}(?:\.hook_resid_post)?", "resid", 1
        if self.attention:
            yield rf"{block}\.(?:hook_attn_out|attn\.hook_out)", "attn", 0
        if self.mlp:
            yield rf"{block}\.(?:hook_mlp_out|mlp\.hook_out)", "mlp", 0
        if self.norm:
            yield rf"ln_final\.hook_normalized|{re.escape(self.norm)}", "norm", 0
        yield rf"(?:hook_)?logits|{re.escape(self.head or 'logits')}", "logits", 0
        if self.layers:
            layer = rf"{re.escape(self.layers)}\.(\d{{1,6}})"
            yield layer, "resid", 1
            if self.attention:
                yield rf"{layer}\.{re.escape(self.attention)}", "attn", 0
            if self.mlp:
                yield rf"{layer}\.{re.escape(self.mlp)}", "mlp", 0
