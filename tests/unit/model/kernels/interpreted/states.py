"""The kernels for single tokens of modules with a state, in Triton's interpreter. They give what transformers'
functions give in float32, for the calls of each family's modules."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from djinnd.model.family.skeleton import Skeleton, build
from djinnd.model.fast.state_chunks import OF_STEP, ChunkFunction, replace_chunk_of
from djinnd.model.fast.state_steps import StepFunction, agrees, replace_steps
from djinnd.model.kernels.launching.interpreter import INTERPRETED
from djinnd.model.kernels.states.chunks import Rule, run_chunks
from djinnd.model.states.carrier import SlotState
from djinnd.model.states.layout import Stateful
from djinnd.model.states.step_calls import StepCall, names_of
from tests.families.configurations import reduced
from tests.families.one_family import Outcome, try_family
from tests.support import reference
from tests.support.checkpoints import random_model
from tests.support.loaded import Served, random_prompt, small_pages
from tests.support.parameters import long_except

assert INTERPRETED

CPU = torch.device("cpu")
FAMILIES = [
    *("qwen3_5_text", "kimi_linear", "nemotron_h", "jamba", "lfm2"),  # a rule or a variant each
    *("qwen3_next", "olmo_hybrid", "bamba", "falcon_h1", "granitemoehybrid", "mamba2", "mamba", "falcon_mamba"),
]


def learnt(family: str, dtype: torch.dtype = torch.float32) -> tuple[list[nn.Module], list[Stateful]]:
    skeleton = Skeleton(build(reduced(family), dtype))
    return list(skeleton.adapter.blocks), skeleton.stateful


def with_others(call: StepCall, **other: object) -> StepCall:
    return replace(call, arguments={**call.arguments, **other})


def function_of(blocks: list[nn.Module], told: Stateful, call: StepCall) -> StepFunction:
    own = names_of(blocks[told.block].get_submodule(told.path))[call.function]
    return StepFunction(call.function, getattr(own, "own", own))


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, torch.float32) for family in FAMILIES[:5]),
        *(pytest.param(family, torch.float32, marks=pytest.mark.long) for family in FAMILIES[5:]),
        *(pytest.param(family, torch.bfloat16, marks=pytest.mark.long) for family in FAMILIES[:3]),
    ],
    ids=str,
)
def test_the_kernels_serve_the_modules_of_a_family(family: str, dtype: torch.dtype) -> None:
    blocks, stateful = learnt(family, dtype)
    assert stateful and all(told.calls for told in stateful)
    assert all(told.in_place for told in replace_steps(blocks, stateful, CPU))


def delta(rows: int, heads: int, key_heads: int, key: int, value: int, by_channel: bool) -> StepCall:
    def meta(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device="meta")

    decay = meta(rows, 1, heads, key) if by_channel else meta(rows, 1, heads)
    state = SlotState(meta(1, heads, key, value), meta(rows, 2))
    qkv = {"query": meta(rows, 1, key_heads, key), "key": meta(rows, 1, key_heads, key)}
    other = {"g": decay, "beta": meta(rows, 1, heads), "initial_state": state, "output_final_state": True}
    name = "recurrent_kimi_delta_attention" if by_channel else "torch_recurrent_gated_delta_rule"
    return StepCall(name, {**qkv, "value": meta(rows, 1, heads, value), **other, "use_qk_l2norm_in_kernel": True})


@pytest.mark.parametrize("normalised", long_except((True,), (True, False)))
@pytest.mark.parametrize(
    ("family", "call"),
    [
        pytest.param("qwen3_5_text", delta(4, 4, 2, 128, 128, False), id="Qwen3.5's widths"),
        pytest.param("qwen3_5_text", delta(4, 3, 1, 24, 40, False), id="widths that are no powers of two"),
        pytest.param("kimi_linear", delta(4, 2, 2, 128, 128, True), id="Kimi Linear's widths"),
    ],
)
def test_delta_rules_of_other_widths(family: str, call: StepCall, normalised: bool) -> None:
    blocks, (told, *_) = learnt(family)
    assert agrees(function_of(blocks, told, call), with_others(call, use_qk_l2norm_in_kernel=normalised), CPU)


def test_selective_states_of_other_widths() -> None:
    """Nemotron-H's: 64 by 128. All terms, and a step that is not passed through softplus."""
    blocks, (told, *_) = learnt("nemotron_h")
    call = next(call for call in told.calls if call.function == "mamba2_selective_state_update")

    def meta(*shape: int, dims: int = 0) -> torch.Tensor:
        return torch.empty(shape, device="meta")[(..., *[None] * dims)]

    rows, heads, width, state, groups = 4, 4, 64, 128, 2
    wide = with_others(
        call,
        state=SlotState(meta(1, heads, width, state), meta(rows, 2)),
        hidden_states=meta(rows, heads, width),
        z=meta(rows, heads, width),
        dt=meta(rows, heads, dims=1).expand(-1, -1, width),
        A=meta(heads, dims=2).expand(-1, width, state),
        **dict.fromkeys(("B", "C"), meta(rows, groups, state)),
        **dict.fromkeys(("D", "dt_bias"), meta(heads, dims=1).expand(-1, width)),
    )
    for other in ({}, {"dt_softplus": False}, {"z": None, "D": None, "dt_bias": None}):
        assert agrees(function_of(blocks, told, wide), with_others(wide, **other), CPU)


def test_an_unknown_variant_stays_with_the_family(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, stateful = learnt("qwen3_5_text")
    (told, *_) = stateful
    convolution, rule = told.calls
    assert not agrees(function_of(blocks, told, convolution), with_others(convolution, activation="gelu"), CPU)

    own = function_of(blocks, told, rule).own

    @functools.wraps(own)
    def another_rule(query: torch.Tensor, *args: object, **kwargs: object) -> object:
        return own(2 * query, *args, **{**kwargs, "use_qk_l2norm_in_kernel": False})

    names = names_of(blocks[told.block].get_submodule(told.path))
    monkeypatch.setitem(names, rule.function, another_rule)
    assert not any(told.in_place for told in replace_steps(blocks, stateful, CPU))
    assert names[rule.function] is another_rule


@pytest.mark.parametrize(
    "family", long_except(("qwen3_5_text", "kimi_linear"), ("qwen3_5_text", "kimi_linear", "nemotron_h"))
)
def test_several_tokens_go_through_chunks(family: str) -> None:
    blocks, (told, *_) = learnt(family)
    names = dict(names_of(blocks[told.block].get_submodule(told.path)))
    (call,) = [call for call in told.calls if call.function in OF_STEP]
    assert replace_chunk_of(call, names, CPU)
    function = names[OF_STEP[call.function]]
    assert isinstance(function, ChunkFunction)

    def changed(**given: object) -> object:
        return [2 * value for value in function.own(**given)]

    another = ChunkFunction(OF_STEP[call.function], functools.wraps(function.own)(changed))
    assert not replace_chunk_of(call, {OF_STEP[call.function]: another}, CPU)


@pytest.mark.parametrize("strength", [0.1, 30.0])
def test_channels_that_decay_by_any_amount_have_the_results_of_single_steps(strength: float) -> None:
    """Kimi Delta Attention token by token. Decays of e⁻³⁰ a token would overflow if they were divided."""
    tokens, key_heads, heads, key, value = 2 * 64 + 21, 1, 2, 24, 40
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(tokens, key_heads, key, generator=generator) for _ in range(2))
    v, state = (torch.randn(shape, generator=generator) for shape in ((tokens, heads, value), (heads, key, value)))
    decay = -strength * torch.rand(tokens, heads, key, generator=generator)
    rate = torch.rand(tokens, heads, generator=generator)
    out, after = run_chunks(q, k, v, decay, rate, state, Rule(True, key**-0.5, True), "ieee")
    wanted = []
    for token in range(tokens):
        query, known = (each[token] / (each[token].square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
        state = state * decay[token].exp().unsqueeze(-1)
        new = rate[token].unsqueeze(-1) * (v[token] - torch.einsum("hk,hkv->hv", known.expand(heads, key), state))
        state = state + known.expand(heads, key).unsqueeze(-1) * new.unsqueeze(1)
        wanted.append(torch.einsum("hk,hkv->hv", query.expand(heads, key) * key**-0.5, state))
    torch.testing.assert_close(out, torch.stack(wanted), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(after, state, rtol=1e-4, atol=1e-4)


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Stateful]]:
    """Models on the CPU use the kernels, as those on a GPU do. → the modules with a state of the models."""
    modules: list[Stateful] = []
    learn, own = Skeleton.__init__, {}

    def learn_and_replace(self: Skeleton, model: PreTrainedModel) -> None:
        learn(self, model)
        for told in self.stateful:
            names = names_of(self.adapter.blocks[told.block].get_submodule(told.path))
            own.setdefault(id(names), (names, dict(names)))
        self.stateful = replace_steps(self.adapter.blocks, self.stateful, CPU)
        modules.extend(self.stateful)

    monkeypatch.setattr(Skeleton, "__init__", learn_and_replace)
    yield modules
    for names, before in own.values():
        names.update(before)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES[1:3])  # the next test has the first one
def test_sessions_have_the_tokens_and_logits_of_transformers(
    family: str, in_place: list[Stateful], tmp_path: Path
) -> None:
    assert try_family(family, tmp_path) == Outcome(True)
    assert in_place and all(told.in_place for told in in_place)


@pytest.mark.long
@pytest.mark.parametrize("generated", [3, 11])
def test_forks_and_shared_pages_keep_their_states(generated: int, in_place: list[Stateful], tmp_path: Path) -> None:
    """Pages of 16 tokens: a fork reads a full page that its parent has, and both write to pages of their own."""
    folder = random_model(tmp_path, reduced("qwen3_5_text"))
    prompt = random_prompt(30, 300, 0)
    with Served(folder, plan=small_pages(60, 16), max_batch_tokens=48) as served:
        served.shuffle_pages()
        parent = served.open()
        served.submit(parent, prompt, max_tokens=generated)
        served.run()
        child = served.fork(parent)
        for session in (parent, child):
            served.submit(session, [], max_tokens=20)
        served.run()
        for session in (parent, child):
            told = session.tokens[len(prompt) :]
            assert told == reference.greedy(folder, prompt, len(told), told)
    assert all(told.in_place for told in in_place)
