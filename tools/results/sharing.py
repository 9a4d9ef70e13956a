"""Figures of the scheduler in words: shares, classes, the cost of a decision, the simulator."""

from __future__ import annotations

from typing import Any

from tools.results.raw import Report
from tools.results.words import ms, percent, sentences

# The parts of the fairness bench, and how each is called in the table, by the beginning of its finding.
PARTS = {
    "Jain": ("tenants", "users of equal weight"),
    "a share": ("weights", "users of weights 1, 2 and 4"),
    "first token": ("interactive", "interactive sessions beside batch"),
    "batch throughput": ("idle", "batch beside idle sessions"),
    "longest without": ("ageing", "batch under endless interactive load"),
}
FINDINGS = {
    "Jain's index, the worst window": "Jain's index of the shares, in the worst window",
    "a share off its weight by": "a share is off its weight by at most",
    "first token p50, times idle": "first token, p50, in multiples of one alone:",
    "first token p99, times idle": "first token, p99, in multiples of one alone:",
    "between tokens p99, steps": "between tokens, p99, in undisturbed steps:",
    "first token p99, ms": "first token, p99, in ms:",
    "between tokens p99, ms": "between tokens, p99, in ms:",
    "batch throughput lost": "part of batch throughput lost:",
    "longest without a token, s": "longest time without a token, in seconds:",
}


def _parts(result: Report) -> list[tuple[str, str]]:
    names = [one["name"] for one in result.results["findings"]]
    return [part for begins, part in PARTS.items() if any(name.startswith(begins) for name in names)]


def fairness_case(result: Report) -> str:
    parts = _parts(result)
    return "all parts" if len(parts) == len(PARTS) else ", ".join(words for _, words in parts)


def fairness_arguments(result: Report) -> str:
    parts = _parts(result)
    only = [] if len(parts) == len(PARTS) else [f"--only {part}" for part, _ in parts]
    return " ".join(("CHECKPOINT", *only))


def fairness(result: Report) -> str:
    return sentences(
        f"{FINDINGS[one['name']]} {one['figure']:.3f} (bar {one['bar'].replace('<=', '≤').replace('>=', '≥')}"
        f"{'' if one['met'] else ', missed'}; {one['note']})"
        for one in result.results["findings"]
    )


def _session_counts(result: Report) -> list[int]:
    return sorted({one["sessions"] for one in result.results["cases"]})


def decisions_arguments(result: Report) -> str:
    return " ".join(f"--sessions {count}" for count in _session_counts(result))


def decisions_case(result: Report) -> str:
    counts = _session_counts(result)
    return f"{counts[0]:,} sessions" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,} sessions"


def decisions(result: Report) -> str:
    def told(one: dict[str, Any]) -> str:
        pages = ", half of their pages elsewhere" if one["shortage"] else ""
        took = f"{ms(one['decision']['p50'])}, p99 {ms(one['decision']['p99'])}"
        return f"{one['sessions']:,} sessions of {_tenants(one['tenants'])}{pages}: {took}"

    cases = result.results["cases"]
    shown = [one for one in cases if one["sessions"] in (1_000, cases[-1]["sessions"])]
    return sentences(told(one) for one in shown)


def _tenants(count: int) -> str:
    return "1 user" if count == 1 else f"{count} users"


def simulate(result: Report) -> str:
    found = result.results
    outcome = found["outcome"]

    def told(name: str, group: dict[str, Any]) -> str:
        first, gap = group["first_token"], group["between_tokens"]
        return f"{name}: first token {ms(first['p50'])}, p99 {ms(first['p99'])}; between tokens p99 {ms(gap['p99'])}"

    return sentences(
        (
            f"{outcome['seconds']:,.0f} s of load in {found['seconds']:,.0f} s: {outcome['tokens']:,} tokens, "
            f"{found['steps']:,} steps, {found['decision_s'] * 1e6:.0f} µs a decision",
            *(told(name, group) for name, group in outcome["groups"].items()),
        )
    )


def simulate_check(result: Report) -> str:
    ratios = {one["name"]: one["simulator"] / one["daemon"] for one in result.results["compared"]}
    worst = max(ratios, key=lambda name: abs(ratios[name] - 1))
    near = sum(abs(ratio - 1) <= 0.1 for ratio in ratios.values())
    return f"{near} of {len(ratios)} figures within 10 %; the worst is {worst}, {percent(ratios[worst] - 1)} off"
