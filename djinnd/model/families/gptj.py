"""GPT-J picks its attention from a table of classes instead of the attention interface. This adds ours to the table."""

from __future__ import annotations

from torch import Tensor
from transformers.models.gptj import modeling_gptj

from djinnd.model.hf_attention import NAME, paged_attention


class PagedGPTJAttention(modeling_gptj.GPTJAttention):
    def _attn(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """query, key, value: [1, heads, tokens, head_dim], the rotation applied → [1, heads, tokens, head_dim]."""
        out, _ = paged_attention(self, query, key, value, attention_mask, scaling=1.0 / self.scale_attn)
        return out.transpose(1, 2), None


def install() -> None:
    modeling_gptj.GPTJ_ATTENTION_CLASSES[NAME] = PagedGPTJAttention
