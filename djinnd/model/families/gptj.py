"""GPT-J takes its attention from a table of classes instead of the attention interface. This adds paged attention to
the table.

From transformers 5.24 on, GPT-J uses the interface, and there is no table.
"""

from __future__ import annotations

from torch import Tensor
from transformers.models.gptj import modeling_gptj

from djinnd.model.attention.hf_attention import NAME, paged_attention


class PagedGPTJAttention(modeling_gptj.GPTJAttention):
    def _attn(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """query, key, value: [1, heads, tokens, head_dim], the rotation applied → [1, heads, tokens, head_dim]."""
        out, _ = paged_attention(self, query, key, value, attention_mask)
        return out.transpose(1, 2), None


def install() -> None:
    table = getattr(modeling_gptj, "GPTJ_ATTENTION_CLASSES", None)
    if table is not None:
        table[NAME] = PagedGPTJAttention
