"""Falcon takes its attention from a table of classes instead of the attention interface. This adds paged attention to
the table."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.falcon import modeling_falcon

from djinnd.model.attention.hf_attention import NAME, paged_attention


class PagedFalconAttention(modeling_falcon.FalconAttention):
    def forward(  # type: ignore[override]  # unused arguments come by name
        self,
        hidden_states: Tensor,
        alibi: Tensor | None,
        attention_mask: Tensor | None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """hidden_states: [1, tokens, width] → [1, tokens, width].

        In each of Falcon's three layouts, a KV head follows its group of query heads: a group of all heads
        (multi-query), of one (multi-head), or of `heads / kv_heads`. Transformers repeats K and V for each query head;
        here they are kept once.
        """
        tokens, kv_heads = hidden_states.shape[1], self.num_kv_heads
        assert kv_heads is not None
        group = self.num_heads // kv_heads
        qkv = self.query_key_value(hidden_states).view(1, tokens, kv_heads, group + 2, self.head_dim)
        query, key, value = qkv[..., :group, :].flatten(2, 3), qkv[..., group, :], qkv[..., group + 1, :]
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        if position_embeddings is not None:
            query, key = modeling_falcon.apply_rotary_pos_emb(query, key, *position_embeddings)
        # Paged attention does not support alibi: a model that passes a tensor is refused at load.
        out, _weights = paged_attention(self, query, key, value, attention_mask, alibi=alibi)
        return self.dense(out.flatten(2)), None


def install() -> None:
    modeling_falcon.FALCON_ATTENTION_CLASSES[NAME] = PagedFalconAttention
