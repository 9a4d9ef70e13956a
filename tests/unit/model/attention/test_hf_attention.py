from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from djinnd.model.attention.hf_attention import AttentionContext, BlockKV, NoPages, Wanted, paged_attention
from djinnd.model.attention.paged import PagedAttention, TorchAttention
from djinnd.model.paged_batch import PagedBatch, Softmax
from tests.support.paged import Scene, same_bytes


class Recorded(TorchAttention):
    """Keeps the softmax of its last call."""

    softmax: Softmax

    def attend(self, *args: Any) -> Tensor:
        self.softmax = args[6]
        return super().attend(*args)


def as_transformers(x: Tensor) -> Tensor:
    """[tokens, heads, head_dim] → [1, heads, tokens, head_dim]"""
    return x.transpose(0, 1).unsqueeze(0)


def module_over(scene: Scene, kernels: PagedAttention, batch: PagedBatch | None) -> nn.Module:
    module = nn.Module()
    module.paged = BlockKV(AttentionContext(kernels, batch), scene.keys, scene.values)  # type: ignore[assignment]
    return module


@pytest.fixture
def scene() -> Scene:
    torch.manual_seed(0)
    return Scene([1, 5, 3], [20, 5, 40], group=2)


def test_attention_writes_to_pages_and_attends_over_them(scene: Scene) -> None:
    module = module_over(scene, TorchAttention(), scene.batch())
    written = scene.written()
    out, weights = paged_attention(module, *map(as_transformers, (scene.q, scene.k, scene.v)), None, scaling=0.125)
    assert weights is None and out.shape == (1, scene.tokens, 4, 64)
    torch.testing.assert_close(out[0].double(), scene.reference(written, Softmax(0.125)), rtol=1e-5, atol=1e-5)
    assert module.paged.calls == 1


@pytest.mark.parametrize(
    ("given", "softmax"),
    [
        ({}, Softmax(scale=0.125)),
        ({"scaling": 0.5, "sliding_window": 7, "softcap": 3.0}, Softmax(scale=0.5, window=7, softcap=3.0)),
        ({"sliding_window": None, "softcap": None, "scaling": None, "position_ids": torch.zeros(1)}, Softmax(0.125)),
    ],
    ids=["none", "all", "nothing in particular"],
)
def test_options_have_the_meaning_of_transformers(scene: Scene, given: dict[str, Any], softmax: Softmax) -> None:
    kernels = Recorded()
    module = module_over(scene, kernels, scene.batch())
    paged_attention(module, *map(as_transformers, (scene.q, scene.k, scene.v)), None, **given)
    assert kernels.softmax == softmax


def test_sinks_are_passed_on(scene: Scene) -> None:
    sinks = torch.randn(4)
    module = module_over(scene, TorchAttention(), scene.batch())
    written = scene.written()
    out, _ = paged_attention(module, *map(as_transformers, (scene.q, scene.k, scene.v)), None, s_aux=sinks)
    reference = scene.reference(written, Softmax(0.125, sinks=sinks))
    torch.testing.assert_close(out[0].double(), reference, rtol=1e-5, atol=1e-5)


def test_a_block_that_shares_kv_reads_the_pages_and_writes_none(scene: Scene) -> None:
    """The step's own keys and values, which an earlier block has written, may be placeholders."""
    module = module_over(scene, TorchAttention(), scene.batch(fresh=False))
    own = [scene.k, scene.v]
    paged_attention(module, *map(as_transformers, (scene.q, *own)), None, scaling=0.125)
    written = scene.pool.clone()
    module.paged.is_shared = True
    out, _ = paged_attention(module, as_transformers(scene.q), *(as_transformers(0 * x) for x in own), None, 0.125)
    assert same_bytes(scene.pool, written)
    torch.testing.assert_close(out[0].double(), scene.reference(written, Softmax(0.125)), rtol=1e-5, atol=1e-5)


def wanted_by(module: nn.Module, mask: Tensor | None = None, **arguments: Any) -> Wanted:
    q, k, v = torch.zeros(1, 8, 3, 16), torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 12)
    with pytest.raises(NoPages) as call:
        paged_attention(module, q, k, v, mask, **arguments)
    return call.value.wanted


def test_without_pages_the_wanted_shape_is_raised() -> None:
    harmless = {"position_ids": torch.zeros(1), "cache_position": torch.zeros(1), "output_attentions": False}
    module = nn.Module()
    wanted = wanted_by(module, **harmless)
    assert wanted.module is module and (wanted.window, wanted.unserved) == (0, "")
    assert (wanted.key.shape, wanted.value.shape) == ((1, 2, 3, 16), (1, 2, 3, 12))
    assert wanted_by(nn.Module(), sliding_window=64).window == 64


@pytest.mark.parametrize(
    ("arguments", "unserved"),
    [
        ({"mask": torch.zeros(1)}, "a mask of its own"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"indices": torch.zeros(1), "is_causal": False}, "indices, attention to later tokens"),
    ],
    ids=str,
)
def test_unsupported_arguments_are_named(arguments: dict[str, Any], unserved: str) -> None:
    assert wanted_by(nn.Module(), **arguments).unserved == unserved


def test_a_module_that_is_not_causal_is_detected() -> None:
    module = nn.Module()
    module.is_causal = False  # type: ignore[assignment]
    assert wanted_by(module).unserved == "attention to later tokens"
