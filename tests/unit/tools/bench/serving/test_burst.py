from __future__ import annotations

from tools.bench.peers.vllm import Answer, Ran
from tools.bench.serving.burst import Round, middle, of_vllm, table
from tools.bench.stream.outcome import Status


def test_a_round_of_vllm_has_the_same_figures_as_ours() -> None:
    ran = Ran(whole_s=2.0, first_s=[0.3, 0.1, 0.2], between_s=[0.01, 0.03, 0.02], step_s=0.01)
    assert of_vllm([ran], tokens=100) == [Round(150.0, 2.0, (0.2, 0.3), 0.02)]


def test_the_round_with_the_median_rate_counts() -> None:
    rounds = [Round(rate, 1.0, (0.1, 0.2), 0.01) for rate in (5.0, 1.0, 3.0)]
    assert middle(rounds).tokens_per_s == 3.0


def test_every_engine_has_a_row_with_its_figures_or_the_reason_for_none() -> None:
    found = {"djinnd": [Round(6072.2, 5.4, (1.85, 3.72), 0.0252)]}
    shown = table(found, {"vLLM own process": Answer(status=Status.SKIPPED, note="not installed")}, "NVIDIA H200")
    rows = list(zip(*(column.cells for column in shown.columns), strict=True))
    assert rows == [
        ("djinnd", "6,072", "5.4 s", "1.85 s", "3.72 s", "25.2 ms"),
        ("vLLM own process", "not installed", "", "", "", ""),
    ]
