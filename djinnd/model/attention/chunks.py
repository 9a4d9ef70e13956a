"""Attention of a row of many tokens in PyTorch, over all its keys in one tensor and all its values in another."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from djinnd.model.paged_batch import Softmax


def attend_chunk(q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
    """Computes one row: q [queries, heads, width], k and v [keys, kv_heads, width] → [queries, heads, value width]."""
    queries, length, gqa = q.shape[0], k.shape[0], q.shape[1] != k.shape[1]
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    if queries == length and softmax.is_causal_only(length):
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=softmax.scale, enable_gqa=gqa)
        return out[0].transpose(0, 1)
    position = torch.arange(length - queries, length, device=q.device)[:, None]
    at = torch.arange(length, device=q.device)
    seen = at <= position
    if softmax.window:
        seen &= at > position - softmax.window
    if softmax.chunk:
        seen &= at >= position // softmax.chunk * softmax.chunk
    if softmax.is_plain:
        out = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=softmax.scale, enable_gqa=gqa)
    else:
        out = attend_in_steps(q.unflatten(1, (k.shape[1], -1)), k, v, seen, softmax).flatten(1, 2)
    return out[0].transpose(0, 1)


def attend_in_steps(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, softmax: Softmax) -> Tensor:
    """Computes a softmax that torch's attention lacks, each step of it in float32. q [rows, kv_heads, group, queries,
    width], k and v [rows, kv_heads, keys, width] → [rows, kv_heads, group, queries, value width]."""
    scores = q.float() @ k.unsqueeze(2).transpose(-1, -2).float() * softmax.scale
    if softmax.softcap:
        scores = softmax.softcap * torch.tanh(scores / softmax.softcap)
    scores = scores.masked_fill(~seen, -math.inf)
    if softmax.sinks is not None:
        sinks = softmax.sinks.float().view(q.shape[1], q.shape[2], 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return (weights @ v.unsqueeze(2).float()).to(q.dtype)
