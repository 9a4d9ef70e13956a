from __future__ import annotations

import re

import msgspec
import pytest

from djinn_client.errors import InvalidRequest
from djinn_client.protocol.fields.points import Point, PointMap

LLAMA = PointMap(
    blocks=12,
    width=8,
    vocab=50,
    layers="model.layers",
    attention="self_attn",
    mlp="mlp",
    norm="model.norm",
    head="lm_head",
)
GPT2 = PointMap(
    blocks=2,
    width=8,
    vocab=50,
    layers="transformer.h",
    attention="attn",
    mlp="mlp",
    norm="transformer.ln_f",
    head="lm_head",
)
BARE = PointMap(blocks=2, width=8, vocab=50)  # its modules have no known names


@pytest.mark.parametrize(
    ("names", "point"),
    [
        (["hook_embed", "blocks.0.hook_resid_pre"], Point("resid", 0)),
        (["blocks.3.hook_resid_pre", "blocks.2.hook_resid_post", "blocks.2", "model.layers.2"], Point("resid", 3)),
        (["blocks.11.hook_resid_post", "blocks.11", "model.layers.11"], Point("resid", 12)),
        (["blocks.3.hook_attn_out", "blocks.3.attn.hook_out", "model.layers.3.self_attn"], Point("attn", 3)),
        (["blocks.10.hook_mlp_out", "blocks.10.mlp.hook_out", "model.layers.10.mlp"], Point("mlp", 10)),
        (["ln_final.hook_normalized", "model.norm"], Point("norm")),
        (["logits", "hook_logits", "lm_head"], Point("logits")),
    ],
)
def test_every_name_of_a_point(names: list[str], point: Point) -> None:
    for name in names:
        assert LLAMA.resolve(name) == {name: point}


def test_names_are_those_of_the_family() -> None:
    assert GPT2.resolve("transformer.h.1.attn") == {"transformer.h.1.attn": Point("attn", 1)}
    assert GPT2.resolve("transformer.ln_f") == {"transformer.ln_f": Point("norm")}
    for name in ("model.layers.1", "transformer.h.1.self_attn", "transformerxh.1", "model.norm"):
        with pytest.raises(InvalidRequest):
            GPT2.resolve(name)


def test_a_star_is_every_block() -> None:
    assert LLAMA.resolve("blocks.*.hook_resid_post") == {
        f"blocks.{n}.hook_resid_post": Point("resid", n + 1) for n in range(12)
    }
    assert list(GPT2.resolve("transformer.h.*.mlp")) == ["transformer.h.0.mlp", "transformer.h.1.mlp"]
    assert list(GPT2.resolve("blocks.*")) == ["blocks.0", "blocks.1"]


def test_several_names_each_once() -> None:
    found = GPT2.resolve_all(["blocks.1.hook_mlp_out", "blocks.*.hook_mlp_out", "logits"])
    assert list(found) == ["blocks.1.hook_mlp_out", "blocks.0.hook_mlp_out", "logits"]


@pytest.mark.parametrize(("model", "points"), [(LLAMA, 13 + 12 + 12 + 2), (GPT2, 3 + 2 + 2 + 2), (BARE, 3 + 1)])
def test_the_names_that_are_listed_are_all_points_in_the_order_of_computing(model: PointMap, points: int) -> None:
    found = model.resolve_all(model.names())
    order = [model.order(point) for point in found.values()]
    assert order == sorted(order)
    assert found["hook_embed"] == Point("resid", 0) and found["logits"] == Point("logits")
    assert len(set(found.values())) == points


def test_a_model_of_which_little_is_known_has_no_points_within_blocks() -> None:
    assert list(BARE.names()) == [
        "hook_embed",
        "blocks.0.hook_resid_pre",
        "blocks.0.hook_resid_post",
        "blocks.1.hook_resid_pre",
        "blocks.1.hook_resid_post",
        "logits",
    ]
    for name in ("blocks.0.hook_attn_out", "blocks.0.mlp.hook_out", "ln_final.hook_normalized", "", ".1"):
        with pytest.raises(InvalidRequest):
            BARE.resolve(name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("blocks.3.hook_resid_pst", "did you mean blocks.3.hook_resid_post"),
        ("model.layers.3.self_atn", "did you mean model.layers.3.self_attn"),
        ("model.nrm", "did you mean model.norm"),
        ("logit", "did you mean logits"),
        ("blocks.12", "it has 12 blocks, from 0 on"),
        ("model.layers.999.mlp", "it has 12 blocks, from 0 on"),
        ("nothing at all", "points() lists those that it has"),
        ("blocks.-1", "the model has no point"),
        ("blocks.1234567", "the model has no point"),
        ("blocks.3\n", "the model has no point"),
        ("*", "the model has no point"),
        ("blocks.*.*", "'blocks.*.*' has two stars"),
    ],
)
def test_unknown_points_are_refused(name: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(words)) as refused:
        LLAMA.resolve(name)
    assert refused.value.data["field"] == "point"


def test_the_logits_have_the_width_of_the_vocabulary() -> None:
    assert (LLAMA.width_at(Point("logits")), LLAMA.width_at(Point("norm"))) == (50, 8)


def test_points_survive_encoding() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(LLAMA), type=PointMap) == LLAMA
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(Point("attn", 3)), type=Point) == Point("attn", 3)
