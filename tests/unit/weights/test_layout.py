from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from djinnd.weights.layout import ALIGNMENT, Layout

QKV = [(f"self_attn.{name}_proj.weight", (rows, 6)) for name, rows in (("q", 8), ("k", 4), ("v", 4))]
GATE_UP = [("mlp.gate_proj.weight", (10, 6)), ("mlp.up_proj.weight", (10, 6))]
OTHERS = [("input_layernorm.weight", (6,)), ("self_attn.o_proj.weight", (6, 8)), ("mlp.down_proj.weight", (6, 10))]
BLOCK = [OTHERS[0], *QKV, OTHERS[1], *GATE_UP, OTHERS[2]]


def numbered(layout: Layout) -> torch.Tensor:
    return torch.arange(layout.numel, dtype=torch.float32)


def test_q_k_v_and_gate_up_are_runs_without_a_gap() -> None:
    layout = Layout(BLOCK)
    assert layout.runs == [tuple(name for name, _ in QKV), tuple(name for name, _ in GATE_UP)]
    for run in layout.runs:
        for one, next_one in pairwise(run):
            assert layout.entries[one].end == layout.entries[next_one].offset


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_runs_and_single_tensors_are_aligned(dtype: torch.dtype) -> None:
    layout = Layout(BLOCK)
    later = {name for run in layout.runs for name in run[1:]}
    for name in layout.entries.keys() - later:
        assert layout.entries[name].offset * dtype.itemsize % ALIGNMENT == 0, name
    assert layout.nbytes(dtype) % ALIGNMENT == 0
    assert layout.nbytes(dtype) == layout.numel * dtype.itemsize


def test_views_are_the_tensors_and_share_the_buffer() -> None:
    layout = Layout(BLOCK)
    buffer = numbered(layout)
    views = layout.views(buffer)
    assert {name: tuple(view.shape) for name, view in views.items()} == dict(BLOCK)
    for view in views.values():
        view.fill_(-1)
    assert int((buffer == -1).sum()) == sum(entry.numel for entry in layout.entries.values())


def test_a_joined_run_is_a_view_of_the_concatenation() -> None:
    layout = Layout(BLOCK)
    buffer = numbered(layout)
    views = layout.views(buffer)
    for run in layout.runs:
        joined = layout.joined(buffer, run)
        assert torch.equal(joined, torch.cat([views[name] for name in run]))
        assert joined.data_ptr() == views[run[0]].data_ptr()
        joined.fill_(7)
        assert all(bool((views[name] == 7).all()) for name in run)


def test_the_order_in_which_a_family_names_them_does_not_matter() -> None:
    layout = Layout([QKV[2], OTHERS[1], QKV[0], QKV[1]])
    assert layout.runs == [tuple(name for name, _ in QKV)]


def test_biases_are_runs_too() -> None:
    biases = [(name.replace("weight", "bias"), shape[:1]) for name, shape in QKV]
    layout = Layout([*QKV, *biases])
    assert layout.runs == [tuple(name for name, _ in QKV), tuple(name for name, _ in biases)]
    buffer = numbered(layout)
    assert layout.joined(buffer, layout.runs[1]).shape == (16,)


def test_projections_of_different_inputs_are_no_run() -> None:
    layout = Layout([QKV[0], ("self_attn.k_proj.weight", (4, 5)), QKV[2]])
    assert layout.runs == [] and len(layout.entries) == 3


def test_an_incomplete_run_is_none() -> None:
    assert Layout([QKV[0], QKV[2], GATE_UP[0]]).runs == []


def test_namesakes_of_different_parents_are_no_run() -> None:
    assert Layout([("a.gate_proj.weight", (2, 2)), ("b.up_proj.weight", (2, 2))]).runs == []
    two = Layout([(f"{parent}.{name}_proj.weight", (2, 2)) for name in ("gate", "up") for parent in ("a", "b")])
    assert two.runs == [(f"{p}.gate_proj.weight", f"{p}.up_proj.weight") for p in ("a", "b")]


def test_a_name_without_a_module_stands_alone() -> None:
    layout = Layout([("scale", (3,)), ("q_proj", (2, 2))])
    assert layout.runs == [] and set(layout.entries) == {"scale", "q_proj"}


GPT_OSS_20B = [
    *((f"self_attn.{name}_proj.weight", (rows, 2880)) for name, rows in (("q", 4096), ("k", 512), ("v", 512))),
    ("mlp.router.weight", (32, 2880)),
    ("mlp.experts.gate_up_proj_bias", (32, 5760)),
    ("mlp.experts.down_proj_bias", (32, 2880)),
    ("input_layernorm.weight", (2880,)),
    ("self_attn.o_proj.weight", (2880, 4096)),
]


def test_small_matrices_are_behind_the_large_ones_and_before_the_vectors() -> None:
    layout = Layout(GPT_OSS_20B)
    names = [name for name, _ in GPT_OSS_20B]
    assert layout.large == [tuple(names[:3]), ("self_attn.o_proj.weight",)] == layout.units[:2]
    assert layout.units[2:] == [(name,) for name in names[3:6]]
    assert layout.matrices == layout.entries["input_layernorm.weight"].offset == layout.numel - 2944


@pytest.mark.parametrize(
    ("largest", "other", "is_large"),
    [
        ((1 << 12, 1 << 12), (1, 1 << 20), True),
        ((1 << 12, 1 << 12), (1, (1 << 20) - 1), False),
        ((1 << 20, 1 << 12), (1, 1 << 20), True),  # less than the share of the largest
        ((16, 64), (1, 64), True),
        ((16, 64), (1, 63), False),
    ],
)
def test_a_large_matrix_has_a_million_numbers_or_a_share_of_the_largest(
    largest: tuple[int, int], other: tuple[int, int], is_large: bool
) -> None:
    layout = Layout([("other", other), ("largest", largest)])
    assert layout.large == ([("other",), ("largest",)] if is_large else [("largest",)])


def test_an_end_of_a_buffer_has_the_tensors_in_it() -> None:
    layout = Layout(GPT_OSS_20B)
    buffer = numbered(layout)
    run = layout.units[2]
    end = buffer[layout.entries[run[0]].offset :]
    found = layout.views_of_end(end)
    assert list(found) == [name for name, _ in GPT_OSS_20B[3:7]]
    assert all(torch.equal(view, layout.views(buffer)[name]) for name, view in found.items())
    assert torch.equal(layout.joined(end, run), layout.joined(buffer, run))
    with pytest.raises(AssertionError):
        layout.joined(end, layout.units[0])


def test_a_buffer_of_another_size_is_an_assertion() -> None:
    layout = Layout(BLOCK)
    with pytest.raises(AssertionError):
        layout.views(torch.zeros(layout.numel - 1))
