"""Latent attention without expanding latents: absorption (DeepSeek-V2: arXiv 2405.04434, section 2.1.2).

Keys and values are products of a latent c with the parts of one matrix: k = W_UK c, v = W_UV c. So a score is
q · W_UK c = (W_UKᵀ q) · c, and a sum of values is W_UV times the same sum of latents. A step with few queries
multiplies these by W_UK and W_UV, instead of all latents of its sessions. All heads then attend to the same latents:

    q ─┬─ plain part ── · W_UK ──► [tokens, heads, rank]  ─┐
       └─ rotary part ───────────► [tokens, heads, rotary] ┴► sums of latents [tokens, heads, rank] ── · W_UVᵀ ──► out
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# latents and rotary keys [rows, 1, tokens, width] → keys and values [rows, heads, tokens, width]
Expand = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Absorption:
    """Where `expand_kv` finds keys and values in its product with the latents.

    The matrix is [heads * (plain + value), rank]: for each head, the rows of W_UK, then those of W_UV. A key is its
    plain part, then the rotary key.
    """

    path: str  # of the linear module within the block
    heads: int
    plain: int  # width of a key without its rotary part
    rotary: int
    value: int

    def keys_part(self, matrix: Tensor) -> Tensor:
        """W_UK of all heads, a view: [heads, plain, rank]."""
        return matrix.unflatten(0, (self.heads, -1))[:, : self.plain]

    def values_part(self, matrix: Tensor) -> Tensor:
        """W_UV of all heads, a view: [heads, value, rank]."""
        return matrix.unflatten(0, (self.heads, -1))[:, self.plain :]

    def query(self, q: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """q [tokens, heads, plain + rotary] → the queries of latents [tokens, heads, rank], and of rotary keys, a
        view."""
        plain, rotary = q.split((self.plain, self.rotary), 2)
        return torch.bmm(plain.transpose(0, 1), self.keys_part(matrix)).transpose(0, 1), rotary

    def output(self, summed: Tensor, matrix: Tensor) -> Tensor:
        """Sums of latents [tokens, heads, rank] → of values [tokens, heads, value], contiguous."""
        values = torch.bmm(summed.transpose(0, 1), self.values_part(matrix).transpose(1, 2))
        return values.transpose(0, 1).contiguous()

    def unexpanded(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Tensors that have the shapes of the keys and values of [1, 1, tokens, rank], and no contents."""
        nothing = latents.new_empty(1, 1, 1, 1)
        shape = (1, self.heads, latents.shape[2])
        return nothing.expand(*shape, self.plain + self.rotary), nothing.expand(*shape, self.value)


def learn_absorption(
    block: nn.Module, paths: tuple[str, ...], expand: Expand, latents: int, rotary: int
) -> Absorption | None:
    """Finds out by a run of `expand` on numbers that are all different. None: its keys and values are not those above.

    paths: of the linear modules in `block` that `expand` calls. latents, rotary: widths. The modules are on the meta
    device.
    """
    if len(paths) != 1:
        return None
    linear = block.get_submodule(paths[0])
    assert isinstance(linear, nn.Linear)
    if linear.bias is not None or linear.in_features != latents:
        return None
    numbers = torch.arange(linear.out_features, dtype=torch.float64, device="cpu")
    shared = -1 - torch.arange(rotary, dtype=torch.float64, device="cpu")
    linear.forward = lambda _: numbers.view(1, 1, 1, -1)
    try:
        keys, values = expand(numbers.new_zeros(1, 1, 1, latents), shared.view(1, 1, 1, -1))
    finally:
        del linear.forward
    heads, plain, value = keys.shape[1], keys.shape[3] - rotary, values.shape[3]
    if plain < 1 or heads * (plain + value) != len(numbers):
        return None
    of_head = numbers.view(heads, plain + value)
    wanted = torch.cat([of_head[:, :plain], shared.expand(heads, rotary)], 1)
    is_known = torch.equal(keys[0, :, 0], wanted) and torch.equal(values[0, :, 0], of_head[:, plain:])
    return Absorption(paths[0], heads, plain, rotary, value) if is_known else None
