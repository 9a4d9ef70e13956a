"""Figures of breakpoints, captures and steering in words."""

from __future__ import annotations

from typing import Any

from tools.results.raw import Report
from tools.results.words import middle, ms, percent, sentences

PEERS = {
    "recompute": "PyTorch hooks in transformers",
    "nnsight": "nnsight",
    "manual": "transformers, the state kept and loaded by hand",
}


def breakpoints(result: Report) -> str:
    stopping, restoring = result.results["stopping"], result.results["restoring"]
    lost = middle(result.results["beside"]["lost"])
    return sentences(
        (
            f"a call that stops {ms(middle(stopping['run']))}, going on {ms(middle(stopping['resume']))}; "
            f"a call for as many tokens without a stop {ms(middle(stopping['plain']))}",
            f"a generated token that had stopped goes on in {ms(middle(restoring['resume']))}; a step takes "
            f"{ms(middle(restoring['step']))}",
            f"{result.results['others']} other sessions lose {percent(lost)} of their rate while one is stopped",
        )
    )


def resume_inside(result: Report) -> str:
    found = result.results

    def seconds(runs: list[dict[str, float]]) -> float:
        return middle([run["seconds"] for run in runs])

    told = (f"behind block {stop['blocks']}: {ms(seconds(stop['djinnd']))}" for stop in found["stops"])
    returned = found.get("from_host")
    more = seconds(returned["back"]) - seconds(returned["stayed"]) if returned else 0.0
    return sentences(
        (
            f"{found['tokens']:,} tokens, {found['blocks']} blocks; "
            f"computed from the beginning {ms(seconds(found['recompute']))}",
            "; ".join(told),
            f"behind block {returned['blocks']} with its pages on the host: {ms(more)} more" if returned else "",
        )
    )


def resume_inside_peers(result: Report) -> str:
    stops = result.results["stops"]
    return sentences(
        f"{name}: " + "; ".join(f"{ms(middle(stop[way]))} behind {stop['blocks']}" for stop in stops)
        for way, name in PEERS.items()
        if all(stop.get(way) for stop in stops)
    )


def white_table(result: Report) -> str:
    return sentences(f"{_of_several(result, name)}{_model(found)}" for name, found in result.results.items())


def _of_several(result: Report, name: str) -> str:
    return f"{name}: " if len(result.results) > 1 else ""


def _model(found: dict[str, Any]) -> str:
    edited = [middle(stop["edited"]["seconds"]) for stop in found["stops"]]
    exact = all(stop["same_logprobs"] for stop in found["stops"])
    equal = "every log probability as without a stop, bit for bit" if exact else "log probabilities differ"
    added = ", ".join(
        f"a {what} adds {ms(_added(found, way))} to two steps of another session"
        for way, what in (("hit", "stop"), ("capture", "capture"))
    )
    return f"{ms(min(edited))} to {ms(max(edited))} from prompt to last token; untouched: {equal}; {added}"


def _added(found: dict[str, Any], way: str) -> float:
    """The median, over all depths, of a call's turn less the median turn of a call that neither stops nor captures."""
    added = []
    for stop in found["stops"]:
        plain = middle([one["turn"] for one in stop["beside"]["plain"]])
        added += [one["turn"] - plain for one in stop["beside"][way]]
    return middle(added)


def white_table_peers(result: Report) -> str:
    def told(edited: dict[str, Any]) -> str:
        medians = [middle(one["seconds"]) for one in edited.values()]
        return f"{ms(min(medians))} to {ms(max(medians))}"

    return sentences(
        f"{_of_several(result, name)}{peer}: {told(outcome['edited'])}"
        for name, found in result.results.items()
        for peer, outcome in found["peers"].items()
        if outcome["edited"]
    )


def whitebox(result: Report) -> str:
    found = result.results
    lost = ", ".join(f"{where} {percent(one['lost'])}" for where, one in found["beside"].items() if where != "plain")
    captured = (
        f"a prompt of {found['prompt']:,} tokens takes {ms(one['plain'])}, and {ms(one['seconds'])} with "
        f"{one['nbytes'] / 1e6:,.0f} MB captured (points: {one['points']})"
        for one in found["captured"]
    )
    return sentences((f"rate that {found['others']} others lose, by where 8 are steered: {lost}", *captured))
