"""Sessions whose pages hold latents and rotary keys, and a plain implementation of attention over them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from djinnd.model.paged_batch import Softmax
from tests.support.paged import Scene


@dataclass
class LatentScene(Scene):
    """A Scene with latents as keys and rotary keys as values, of one head. `group`: heads of the queries.
    `q` [tokens, heads, rank + rotary]: queries after absorption."""

    def __post_init__(self) -> None:
        assert self.kv_heads == 1
        super().__post_init__()
        self.q = torch.randn(len(self.slots), self.group, self.rank + self.rotary, device=self.device).to(self.dtype)

    @classmethod
    def of(
        cls,
        counts: list[int],
        lengths: list[int],
        *,
        heads: int = 4,
        rank: int = 32,
        rotary: int = 8,
        page_size: int = 16,
        padding: int = 0,
        width: int = 0,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        device: str = "cpu",
    ) -> LatentScene:
        shape = {"kv_heads": 1, "group": heads, "head_dim": rank, "value_dim": rotary}
        types = {"dtype": dtype, "kv_dtype": kv_dtype, "device": device}
        return cls(counts, lengths, page_size, **shape, **types, padding=padding, width=width)

    @property
    def rank(self) -> int:
        return self.head_dim

    @property
    def rotary(self) -> int:
        return self.value_dim

    def queries(self) -> tuple[Tensor, Tensor]:
        """The queries of latents, and those of rotary keys, a view as in a model."""
        return self.q[..., : self.rank].transpose(0, 1).contiguous().transpose(0, 1), self.q[..., self.rank :]

    def held(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Latents and rotary keys of each session with this step's tokens, [length, width] each, in float64."""
        pool = self.written()
        for row, length in enumerate(self.lengths):
            pages = self.table[row, : -(-length // self.page_size)].long()
            latents, rotaries = (view[pages].flatten(0, 1)[:length, 0].double() for view in self._views(pool))
            yield latents, rotaries

    def sums(self, softmax: Softmax) -> Tensor:
        """[tokens, heads, rank] in float64: the sums of latents that attention must give."""
        out, start = [], 0
        for count, (latents, rotaries) in zip(self.counts, self.held(), strict=True):
            length = len(latents)
            q = self.q[start : start + count].double()
            scores = torch.einsum("qhd,kd->hqk", q, torch.cat([latents, rotaries], 1)) * softmax.scale
            position = torch.arange(length - count, length, device=q.device)[:, None]
            at = torch.arange(length, device=q.device)
            seen = (at <= position) & (at > position - (softmax.window or length))
            if softmax.chunk:
                seen &= at >= position // softmax.chunk * softmax.chunk
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            out.append(torch.einsum("hqk,kd->qhd", weights, latents))
            start += count
        return torch.cat(out)
