"""The memory that a module with a state needs is measured on the meta device."""

from __future__ import annotations

import pytest
import torch

from djinnd.kvcache.tuning import MOST_STATE_TOKENS
from djinnd.model.families.selective_scan import starting_from
from djinnd.model.family.skeleton import Skeleton, build
from djinnd.model.states.carrier import Carrier, StateSpec
from djinnd.model.states.workspace import StateWorkspace, largest, measure, peak_bytes
from tests.families.configurations import reduced

STATE = StateSpec("recurrent", 0, (1, 8), torch.float32)


def test_a_peak_counts_what_exists_at_a_time() -> None:
    def run() -> torch.Tensor:
        a = torch.empty(1000, device="meta")
        b = a + 1
        view = b.view(10, 100)  # keeps the memory of b
        del a, b
        c = view * 2
        del view
        return c + 1

    with torch.inference_mode():
        assert peak_bytes(run) == 8000


def test_views_of_what_was_there_before_cost_nothing() -> None:
    before = torch.empty(1000, device="meta")
    with torch.inference_mode():
        assert peak_bytes(lambda: before.view(10, 100)[:3]) == 0


@pytest.mark.parametrize("family", ["qwen3_5_text", "mamba2", "mamba"])
@torch.inference_mode()
def test_larger_steps_are_covered(family: str) -> None:
    skeleton = Skeleton(build(reduced(family), torch.bfloat16))
    told = skeleton.stateful[0]
    module = skeleton.adapter.blocks[told.block].get_submodule(told.path)

    def peak(rows: int, tokens: int) -> int:
        states = [torch.empty(rows, *spec.shape, dtype=spec.dtype, device="meta") for spec in told.specs]
        x = torch.empty(rows, tokens, 64, dtype=torch.bfloat16, device="meta")
        with starting_from(
            next((s for s, spec in zip(states, told.specs, strict=True) if spec.kind == "recurrent"), None)
        ):
            return peak_bytes(lambda: module(x, **{told.cache: Carrier.with_states(told.specs, states)}))

    for tokens in (512, 2048, MOST_STATE_TOKENS):
        part = peak(1, tokens)
        assert part <= told.workspace.of(tokens, 1) < 2 * part
    singles = peak(256, 1)
    assert singles <= told.workspace.of(1, 256) < 2 * singles
    assert largest([StateWorkspace((1, 2, 9), 5, 2), StateWorkspace((3, 4, 8), 4, 1)]) == StateWorkspace(
        (3, 4, 9), 5, 2
    )


@torch.inference_mode()
def test_a_tensor_with_an_element_for_each_pair_of_chunks_is_foreseen() -> None:
    class Pairs(torch.nn.Module):
        def forward(self, hidden: torch.Tensor, cache: object) -> torch.Tensor:
            chunks = hidden[:, ::32].float()
            return (chunks[:, :, None] * chunks[:, None]).sum(1)

    told = measure(Pairs(), "cache", [STATE], torch.empty(1, 2, 8, device="meta"), {})
    pairs = 128**2 * 8 * 4
    assert pairs < told.of(4096, 1) < 1.3 * pairs


@torch.inference_mode()
def test_a_module_that_cannot_run_without_values_has_no_figures() -> None:
    class Needs(torch.nn.Module):
        def forward(self, hidden: torch.Tensor, cache: object) -> torch.Tensor:
            return hidden * hidden.sum().item()

    assert measure(Needs(), "cache", [STATE], torch.empty(1, 2, 8, device="meta"), {}) == StateWorkspace()
