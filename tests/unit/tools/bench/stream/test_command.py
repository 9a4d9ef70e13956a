from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from tools.bench.stream.__main__ import main

CONFIGS = Path(__file__).resolve().parents[5] / "tools" / "bench" / "configs"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([str(CONFIGS / "llama-2-70b-24gib.yaml"), "--only=accelerate"], "not accelerate's"),
        ([str(CONFIGS / "cpu-smoke.yaml"), "--memory=24GB"], "24GB"),
        ([str(CONFIGS / "cpu-smoke.yaml"), "--chunk-size-mb=16,many"], "16,many"),
        ([str(CONFIGS / "cpu-smoke.yaml"), "--only=vllm"], "vllm"),
    ],
)
def test_arguments_that_cannot_work_are_refused_before_anything_runs(arguments: list[str], said: str) -> None:
    ran = CliRunner().invoke(main, arguments)
    assert ran.exit_code != 0
    assert said in ran.output and "Traceback" not in ran.output
