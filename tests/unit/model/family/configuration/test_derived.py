from __future__ import annotations

import resource

import pytest
import torch
from transformers import AutoModelForCausalLM, CodeGenConfig, GemmaConfig, GPTJConfig, PreTrainedConfig

from djinn_client.errors import ModelRejected
from djinnd.model.family.configuration.derived import MAX_DERIVED, derived_bytes, materialise_buffers
from djinnd.model.family.skeleton import Skeleton, bind, build
from tests.families.configurations import reduced
from tests.support.models import FAMILIES, reduced_model
from tests.support.open_files import read_config
from tests.unit.model.family.test_skeleton import SMALL


@pytest.mark.parametrize("family", [*FAMILIES, "falcon_h1"])
def test_derived_buffers_equal_transformers(family: str) -> None:
    """Falcon-H1 computes a buffer of each block when it is called with the module around the blocks."""
    config = read_config(reduced_model(family)) if family in FAMILIES else reduced(family)
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    skeleton = Skeleton(build(config, torch.float32))
    materialise_buffers(skeleton.model, skeleton.adapter.blocks, torch.device("cpu"))
    own = dict(skeleton.model.named_buffers())
    for prefix, block in zip(skeleton.prefixes, skeleton.adapter.blocks, strict=True):
        own |= {prefix + name: buffer for name, buffer in block.named_buffers()}
    wanted = dict(whole.named_buffers())
    assert own.keys() == wanted.keys()
    for name, buffer in wanted.items():
        assert torch.equal(own[name], buffer), name


def test_a_buffer_that_the_family_leaves_unset_is_refused() -> None:
    model = build(GemmaConfig(**SMALL, num_key_value_heads=2, head_dim=8), torch.float32)
    model.model.norm.register_buffer("unheard_of", torch.zeros(2, device="meta"), persistent=False)
    with pytest.raises(ModelRejected, match=r"unheard_of cannot be computed"):
        materialise_buffers(model, [], torch.device("cpu"))


def test_computing_a_module_s_buffers_leaves_its_parameters_alone() -> None:
    model = build(GemmaConfig(**SMALL, num_key_value_heads=2, head_dim=8), torch.float32)
    model.model.norm.register_buffer("count", torch.zeros(2, device="meta", dtype=torch.int64), persistent=False)
    bind(model, {"model.norm.weight": torch.full((32,), 5.0)})
    materialise_buffers(model, [], torch.device("cpu"))
    assert bool((model.model.norm.weight == 5).all())


@pytest.mark.parametrize(
    "config",
    [
        GPTJConfig(vocab_size=512, n_positions=30_000_000, n_embd=64, n_layer=2, n_head=2, rotary_dim=16),
        CodeGenConfig(vocab_size=512, n_positions=20_000_000, n_embd=64, n_layer=2, n_head=4, rotary_dim=16),
    ],
    ids=lambda config: config.model_type,
)
def test_huge_tables_are_refused_before_they_have_memory(config: PreTrainedConfig) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(
        ModelRejected, match=r"makes .* GiB of tables .*; at most 256\.0 MiB are allowed: lower its number"
    ) as told:
        Skeleton(build(config, torch.float32))
    assert told.value.data["bytes"] > told.value.data["allowed"] == MAX_DERIVED
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def test_tables_of_published_models_are_accepted() -> None:
    for config in (CodeGenConfig(n_layer=34), GPTJConfig()):  # the 16B one, and the 6B one
        assert 0 < derived_bytes(build(config, torch.float32)) < MAX_DERIVED
