from __future__ import annotations

from typing import Any

from tools.bench.peers.engines import Decoded
from tools.bench.serving.decode import summary, table
from tools.bench.stream.outcome import Status

OURS: dict[str, Any] = {"first_token_ms": 23.3, "step_ms": {1: 7.42, 16: 9.8}, "device": "NVIDIA H200"}
TRANSFORMERS: dict[str, Any] = {
    "first_token_ms": 32.9,
    "step_ms": {1: 24.2, 16: 25.2},
    "logit_error": 0.01,
    "own_logit_error": 0.02,
}
OTHERS = {
    "vLLM in-process": Decoded(status=Status.MEASURED, first_token_ms=25.0, step_ms={1: 6.9, 16: 7.7}),
    "vLLM own process": Decoded(status=Status.SKIPPED, note="not installed"),
}


def test_every_engine_has_a_row_with_its_figures_or_the_reason_for_none() -> None:
    shown = table(OURS, TRANSFORMERS, OTHERS, 6.11)
    assert [column.header for column in shown.columns[1:4]] == ["first token", "step of 1", "step of 16"]
    rows = list(zip(*(column.cells for column in shown.columns), strict=True))
    assert rows == [
        ("djinnd", "23.3", "7.42", "9.80", "1.00e-02"),
        ("transformers", "32.9", "24.20", "25.20", "2.00e-02"),
        ("vLLM in-process", "25.0", "6.90", "7.70", ""),
        ("vLLM own process", "not installed", "", "", ""),
    ]


def test_the_line_names_the_engines_that_were_measured() -> None:
    told = summary(OURS, TRANSFORMERS, OTHERS, 6.11, 512)
    assert "16 sessions 9.80 ms a step (transformers 25.2, vLLM in-process 7.7)" in told
    assert "own process" not in told
