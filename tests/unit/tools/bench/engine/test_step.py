from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tools.bench.engine.step import main
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
