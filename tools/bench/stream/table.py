"""Results of a streaming experiment as a table, and as a line for docs/results.md."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from rich.table import Column, Table

from tools.bench.stream.outcome import Equality, Found, Outcome, Results, Status

COLUMNS = (  # after the name
    "plain + packed + streamed",
    "GB a pass",
    "sessions",
    "first token, ms",
    "step, ms",
    "tokens/s",
    "GB/s",
    "of the bus",
    "GiB",
    "max |Δ|",
    "argmax",
    "as resident",
)
WIDTH = 150  # of a terminal that does not tell its width


def table(name: str, results: Results) -> Table:
    caption = (
        "GB/s and %: weights over the bus, of what it can carry; GiB: the most device memory in use; "
        f"max |Δ|, argmax: logits beside transformers'.\n{results.device}: the bus brings "
        f"{results.ceiling / 1e9:.1f} GB/s, the device's memory reads and writes {results.memory_rate / 1e9:,.0f} GB/s"
    )
    shown = Table(Column(no_wrap=True), *COLUMNS, title=name, caption=caption)
    for contender, outcome in results.contenders.items():
        for row in rows(contender, outcome, results.ceiling):
            shown.add_row(*row)
        shown.add_section()
    for piece, outcome in results.pieces.items():
        for row in rows(f"plain, pieces of {piece} MiB", outcome, results.bus[piece]):
            shown.add_row(*row)
    return shown


def rows(name: str, outcome: Outcome, ceiling: float) -> Iterator[list[str]]:
    """A row for each number of sessions. The first row also has the figures that all share."""
    memory = "" if outcome.peak_bytes is None else f"{outcome.peak_bytes / (1 << 30):.1f}"
    if outcome.found is None:
        yield [name, str(outcome.status), *[""] * 7, memory, "", "", ""]
        return
    found = outcome.found
    first = _first_token(found, ceiling)
    left, right = [name, *_places(found)], [memory, *_equality(outcome.equality)]
    for sessions in found.step_s:
        yield [*left, str(sessions), first, *_step(found, sessions, ceiling), *right]
        left, first, right = [""] * len(left), "", [""] * len(right)


def _places(found: Found) -> list[str]:
    """Blocks by place, where they are known, and the bytes of a forward pass."""
    blocks = (found.resident_blocks, found.packed_blocks, found.streamed_blocks)
    shown = "" if found.resident_blocks is None else " + ".join(map(str, blocks))
    return [shown, f"{found.streamed_bytes / 1e9:.3g}"]


def _first_token(found: Found, ceiling: float) -> str:
    """The first token's time, with the share of the bus's rate where weights are streamed."""
    if found.first_token is None:
        return ""
    share = f" ({found.streamed_bytes / found.first_token / ceiling:.1%})" if found.streamed_bytes else ""
    return f"{found.first_token * 1e3:.1f}{share}"


def _step(found: Found, sessions: int, ceiling: float) -> list[str]:
    step = found.step(sessions)
    streamed = [f"{found.bandwidth(sessions) / 1e9:.2f}", f"{found.bandwidth(sessions) / ceiling:.1%}"]
    return [f"{step * 1e3:.2f}", f"{sessions / step:.1f}", *(streamed if found.streamed_bytes else ["", ""])]


def _equality(found: Equality | None) -> list[str]:
    if found is None:
        return ["", "", ""]
    difference = "" if found.max_difference is None else f"{found.max_difference:.2e}"
    argmax = "" if found.argmax_share is None else f"{found.argmax_share:.1%}"
    return [difference, argmax, {None: "", True: "bit for bit", False: "no"}[found.as_resident]]


def summary(results: Results, prompt: int) -> str:
    """One line. The peers' steps are compared with `plain`, which moves the same bytes."""
    own = results.contenders.get("plain")
    yardstick = own.found.step(1) if own and own.found and 1 in own.found.step_s else None
    parts = (_summarised(name, outcome, prompt, yardstick, results) for name, outcome in results.contenders.items())
    return "; ".join(chain([f"bus {results.ceiling / 1e9:.1f} GB/s"], parts))


def _summarised(name: str, outcome: Outcome, prompt: int, yardstick: float | None, results: Results) -> str:
    found = outcome.found
    if found is None:
        return f"{name}: {outcome.note if outcome.status is Status.SKIPPED else outcome.status}"
    first = [] if found.first_token is None else [f"first token of {prompt} {found.first_token * 1e3:.0f} ms"]
    steps = [
        f"{sessions} session{'s' * (sessions > 1)} {found.step(sessions) * 1e3:.1f} ms a step"
        + _of_ceiling(found, sessions, results.ceiling)
        for sessions in found.step_s
    ]
    times = (
        []
        if yardstick is None or found.resident_blocks is not None
        else [f"{found.step(1) / yardstick:.1f} times plain"]
    )
    exact = ["bit for bit"] if outcome.equality and outcome.equality.as_resident and name != "resident" else []
    memory = [] if outcome.peak_bytes is None else [f"{outcome.peak_bytes / (1 << 30):.1f} GiB"]
    return f"{name}: " + ", ".join([*first, *steps, *times, *exact, *memory])


def _of_ceiling(found: Found, sessions: int, ceiling: float) -> str:
    return f" ({found.bandwidth(sessions) / ceiling:.1%} of the bus)" if found.streamed_bytes else ""
