from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tools.bench.engine.step import gaps_of, main
from tools.bench.harness.command import SHIPPED

pytestmark = pytest.mark.timeout(120)


def test_operations_of_a_step_are_counted(tmp_path: Path) -> None:
    told = tmp_path / "kernels.json"
    options = ["--device", "cpu", "--memory", "1GiB", "--context", "16", "--steps", "4", "--json", str(told)]
    result = CliRunner().invoke(main, [str(SHIPPED), *options])
    assert result.exit_code == 0, result.output
    found = json.loads(told.read_text())["results"]
    assert found["blocks"]["plain"] > 0 and found["step_ms"] > 0
    products = next(kernel for kernel in found["kernels"] if kernel["name"] in ("aten::mm", "aten::addmm"))
    assert products["launches"] > found["blocks"]["plain"]  # several in each block of every step


def test_gaps_lie_between_the_end_of_all_earlier_kernels_and_the_next_one() -> None:
    spans = [("first", 0, 10_000), ("inside", 2_000, 4_000), ("next", 11_000, 12_000), ("late", 62_000, 63_000)]
    assert gaps_of(spans, steps=2) == [
        {"gap": "< 100 µs", "before": "late", "gaps": 0.5, "us": 25.0},
        {"gap": "< 2 µs", "before": "next", "gaps": 0.5, "us": 0.5},
    ]


def test_prompts_are_profiled_one_after_another(tmp_path: Path) -> None:
    told = tmp_path / "kernels.json"
    options = ["--device", "cpu", "--memory", "1GiB", "--prompt", "40", "--steps", "2", "--json", str(told)]
    result = CliRunner().invoke(main, [str(SHIPPED), *options])
    assert result.exit_code == 0, result.output
    assert "a prompt of 40 tokens takes" in result.output
    found = json.loads(told.read_text())["results"]
    products = next(kernel for kernel in found["kernels"] if kernel["name"] in ("aten::mm", "aten::addmm"))
    assert 1 < products["launches"] / found["blocks"]["plain"] < 10  # one pass over the blocks a prompt
