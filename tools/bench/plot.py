"""Draws the result of a bench as PNG and SVG. Needs matplotlib, from the extra `bench`.

    python -m tools.bench.plot RESULT.json [--trace TRACE.json] [--out FOLDER]

| figure | what | from |
|---|---|---|
| `bandwidth` | bytes a second over the bus in one session's decode, by contender, below the ceiling | stream |
| `memory` | the device's memory over the time of the bench, and the contenders' turns | stream |
| `timeline` | copies and compute of a step | TRACE, in Chrome's format, as `djinnctl trace -o` writes it |
| `demand` | the sessions' demand over time, and how much of it each tier holds | oversubscribe |
| `resume` | time to the next token of a session that was away, by its length | resume |
| `wake-up`, `between-tokens` | medians and 99th percentiles, by the number of agents | agents |
| `kv`, `paging` | agents' KV, the part on the device, and the traffic, in the last way | agents |

RESULT is the file that `--json` of the bench `stream`, `oversubscribe`, `resume` or `agents` has written.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec

from djinn_client.protocol.fields.scheduling import Spread
from tools.bench.agents import results as agents
from tools.bench.harness.report import Report
from tools.bench.stream.outcome import Results, Status

FORMATS = ("png", "svg")
OURS, THEIRS, NEITHER = "#1f6f8b", "#9aa5ab", "#c44536"
WAYS = {  # ways to continue a session
    "recompute": ("transformers, computed anew", NEITHER),
    "manual": ("transformers, pinned memory by hand", THEIRS),
    "djinnd": ("djinnd", OURS),
    "expected": ("djinnd, expected", "#7ab8cc"),
}
TOLD = {  # signals of the agents
    "none": NEITHER,
    "signals": "#7ab8cc",
    "tool": "#e0a458",
    "expected": OURS,
    agents.REFERENCE: "black",
    agents.PEER: THEIRS,
}
LANES = {"copy": THEIRS, "compute": OURS}


class Bar(NamedTuple):
    name: str
    rate: float  # bytes a second over the bus; 0 without any
    note: str  # the reason
    ours: bool


class Span(NamedTuple):
    lane: str  # "copy" or "compute"
    name: str
    began_ms: float  # since the first span
    lasted_ms: float


# --- what is drawn ----------------------------------------------------------------------------------------------------


def bars(results: Results) -> list[Bar]:
    """Contenders that stream, or were meant to: all without the resident ones."""
    found = []
    for name, outcome in results.contenders.items():
        ours = outcome.found is not None and outcome.found.resident_blocks is not None
        if outcome.found is None:
            if outcome.status is not Status.SKIPPED:
                found.append(Bar(name, 0.0, outcome.status, ours))
        elif outcome.found.streamed_bytes:
            found.append(Bar(name, outcome.found.bandwidth(min(outcome.found.step_s)), "", ours))
    return found


def spans(trace: Any) -> list[Span]:
    """The complete events ("ph": "X") of threads or processes named `copy` or `compute`, by time.

    In Chrome's format times are microseconds. Names of threads and processes are the ids themselves, or come in
    metadata events ("ph": "M").
    """
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    names = {
        (event["name"], event["pid"], event.get("tid") if event["name"] == "thread_name" else None): event["args"][
            "name"
        ]
        for event in events
        if event.get("ph") == "M" and event["name"] in ("thread_name", "process_name")
    }

    def lane(event: Any) -> str | None:
        pid, tid = event["pid"], event.get("tid")
        called = (tid, names.get(("thread_name", pid, tid)), pid, names.get(("process_name", pid, None)))
        return next((name for name in called if name in LANES), None)

    complete = [(event, lane(event)) for event in events if event.get("ph") == "X"]
    drawn = sorted(((event, name) for event, name in complete if name is not None), key=lambda pair: pair[0]["ts"])
    start = drawn[0][0]["ts"] if drawn else 0.0
    return [Span(name, event["name"], (event["ts"] - start) / 1e3, event["dur"] / 1e3) for event, name in drawn]


def curve(points: list[dict[str, float]], name: str) -> tuple[list[float], list[float]]:
    """A figure of a Usage over time: seconds, and 10^9 bytes."""
    return [point["seconds"] for point in points], [point[name] / 1e9 for point in points]


def rates(points: list[dict[str, float]], name: str) -> tuple[list[float], list[float]]:
    """The growth of a Usage's figure: seconds, and 10^9 bytes a second since the point before."""
    steps = [(b["seconds"], (b[name] - a[name]) / (b["seconds"] - a["seconds"])) for a, b in pairwise(points)]
    return [second for second, _ in steps], [rate / 1e9 for _, rate in steps]


def by_agents(results: agents.Results, name: str) -> dict[str, list[tuple[int, Spread]]]:
    """For each way of telling the daemon: numbers of agents alive at once, with the Spread of that name."""
    found: dict[str, list[tuple[int, Spread]]] = {}
    for tried in results.tried:
        if not tried.work.rate:
            for way, run in tried.runs.items():
                found.setdefault(way, []).append((run.agents, getattr(run, name)))
    return {way: sorted(points, key=lambda point: point[0]) for way, points in found.items()}


# --- how --------------------------------------------------------------------------------------------------------------


@contextmanager
def figure(folder: Path, name: str, width: float, height: float) -> Iterator[Any]:
    """Gives axes to draw on, and writes the files when the context ends."""
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    drawn, axes = pyplot.subplots(figsize=(width, height), layout="constrained")
    axes.spines[["top", "right"]].set_visible(False)
    yield axes
    folder.mkdir(parents=True, exist_ok=True)
    for ending in FORMATS:
        drawn.savefig(folder / f"{name}.{ending}", dpi=200)
    pyplot.close(drawn)


def draw_stream(report: Report, folder: Path) -> None:
    results = msgspec.convert(report.results, Results, strict=False)
    title = report.parameters["name"]
    draw_bandwidth(results, title, folder)
    if results.device_memory:
        draw_memory(results, report.parameters["memory_bytes"], title, folder)


def draw_bandwidth(results: Results, title: str, folder: Path) -> None:
    found = bars(results)
    with figure(folder, "bandwidth", 8, 1 + 0.45 * len(found)) as axes:
        colours = [OURS if bar.ours else THEIRS for bar in found]
        drawn = axes.barh([bar.name for bar in found], [bar.rate / 1e9 for bar in found], color=colours)
        axes.bar_label(drawn, [bar.note or f"{bar.rate / 1e9:.1f}" for bar in found], padding=4, zorder=3)
        axes.axvline(
            results.ceiling / 1e9, color=NEITHER, linestyle="--", zorder=0, label=f"bus: {results.ceiling / 1e9:.1f}"
        )
        axes.set(title=title, xlabel="weights over the bus in decode, one session, GB/s")
        axes.set_xlim(0, 1.2 * results.ceiling / 1e9)
        axes.invert_yaxis()
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), frameon=False)


def draw_memory(results: Results, budget: int, title: str, folder: Path) -> None:
    with figure(folder, "memory", 10, 4) as axes:
        seconds = [second for second, _ in results.device_memory]
        axes.step(seconds, [used / (1 << 30) for _, used in results.device_memory], where="post", color=OURS)
        for phase in results.phases:
            axes.axvspan(phase.began, phase.ended, color=THEIRS, alpha=0.15, linewidth=0)
            middle = (phase.began + phase.ended) / 2
            axes.annotate(phase.name, (middle, 1.0), xycoords=("data", "axes fraction"), rotation=30, fontsize=8)
        if budget:
            axes.axhline(budget / (1 << 30), color=NEITHER, linestyle="--", label=f"budget: {budget / (1 << 30):g}")
            axes.legend(loc="upper right", bbox_to_anchor=(1, -0.1), frameon=False)
        axes.set(xlabel=f"seconds of {title}", ylabel="device memory, GiB", ylim=(0, None))


def draw_timeline(drawn: list[Span], title: str, folder: Path) -> None:
    with figure(folder, "timeline", 12, 2.4) as axes:
        for row, (lane, colour) in enumerate(LANES.items()):
            ranges = [(span.began_ms, span.lasted_ms) for span in drawn if span.lane == lane]
            axes.broken_barh(ranges, (row - 0.4, 0.8), facecolors=colour, edgecolor="white", linewidth=0.4)
        axes.set(title=title, xlabel="ms", yticks=range(len(LANES)), yticklabels=list(LANES))
        axes.invert_yaxis()


def draw_demand(points: list[dict[str, float]], budget: float, title: str, folder: Path) -> None:
    with figure(folder, "demand", 10, 4) as axes:
        seconds, device = curve(points, "device")
        host, disk = (curve(points, name)[1] for name in ("host", "disk"))
        labels = ["device", "host: pages", "disk: pages"]
        axes.stackplot(seconds, device, host, disk, labels=labels, colors=[OURS, "#7ab8cc", "#cfd8dc"], linewidth=0)
        axes.plot(*curve(points, "logical"), color=NEITHER, label="demand: weights, and KV of all sessions")
        axes.axhline(budget / 1e9, color="black", linestyle="--", linewidth=1, label=f"budget: {budget / 1e9:.3g}")
        axes.set(title=title, xlabel="seconds", ylabel="GB", ylim=(0, None))
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def draw_resume(sessions: list[dict[str, Any]], title: str, folder: Path) -> None:
    with figure(folder, "resume", 7, 4.5) as axes:
        tokens = [session["tokens"] for session in sessions]
        for way, (label, colour) in WAYS.items():
            times = [statistics.median(session[way]) * 1e3 for session in sessions]
            axes.plot(tokens, times, color=colour, marker="o", markersize=4, label=label)
        axes.set(title=title, xlabel="tokens of the session", ylabel="ms until the next token", ylim=(0, None))
        axes.legend(loc="upper left", frameon=False)


def draw_agents(results: agents.Results, title: str, folder: Path) -> None:
    for name in ("wake_up", "between_tokens"):
        draw_latency(by_agents(results, name), name.replace("_", "-"), title, folder)
    last = next((tried for tried in reversed(results.tried) if not tried.work.rate), results.tried[-1])
    way, points = list(last.usage.items())[-1]
    title = f"{title}: {last.name}, {way}"
    draw_kv(points, results.pages["device"] * results.page_bytes, title, folder)
    with figure(folder, "paging", 10, 3) as axes:
        for name, colour in (("left", NEITHER), ("arrived", OURS)):
            axes.step(*rates(points, name), where="pre", color=colour, label=f"pages that have {name}")
        axes.set(title=title, xlabel="seconds", ylabel="GB/s", ylim=(0, None))
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def draw_kv(points: list[dict[str, float]], pool_bytes: int, title: str, folder: Path) -> None:
    """Draws agents' KV. It is not split by tier, because host and disk also keep KV that no session has any more."""
    with figure(folder, "kv", 10, 4) as axes:
        seconds, demand = curve(points, "logical")
        weights = min(demand)  # no session had a token at the first point
        axes.stackplot(seconds, curve(points, "pages")[1], labels=["on the device"], colors=[OURS], linewidth=0)
        axes.plot(seconds, [gb - weights for gb in demand], color=NEITHER, label="KV of all agents")
        axes.axhline(pool_bytes / 1e9, color="black", linestyle="--", linewidth=1, label="the device's pages")
        axes.set(title=title, xlabel="seconds", ylabel="GB", ylim=(0, None))
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def draw_latency(ways: dict[str, list[tuple[int, Spread]]], name: str, title: str, folder: Path) -> None:
    with figure(folder, name, 7, 4.5) as axes:
        for way, points in ways.items():
            numbers = [number for number, _ in points]
            for percentile, style in (("p99", "-"), ("p50", ":")):
                times = [getattr(spread, percentile) * 1e3 for _, spread in points]
                label = way if percentile == "p99" else None
                axes.plot(numbers, times, color=TOLD[way], linestyle=style, marker="o", markersize=4, label=label)
        axes.set(
            title=f"{title}: {name}, p99 and (dotted) p50", xlabel="agents alive at once", ylabel="ms", yscale="log"
        )
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


@click.command(help=(__doc__ or "").split("\n\n", 1)[0])
@click.argument("result", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Also draw the timeline of this trace.",
)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("figures"), show_default=True)
def main(result: Path, trace: Path | None, out: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise click.ClickException("matplotlib is not installed: pip install 'djinnd[bench]'")
    report = msgspec.json.decode(result.read_bytes(), type=Report)
    match report.experiment:
        case "oversubscribe":
            points = next(iter(report.results["usage"].values()))
            title = f"{report.parameters['model']}: {report.parameters['sessions']} sessions"
            draw_demand(points, report.results["budget"], title, out)
        case "resume":
            draw_resume(report.results["sessions"], report.parameters["model"], out)
        case "agents":
            draw_agents(msgspec.convert(report.results, agents.Results), report.parameters["model"], out)
        case _:
            draw_stream(report, out)
    if trace is not None:
        title = report.parameters.get("name") or report.parameters["model"]
        draw_timeline(spans(json.loads(trace.read_text())), title, out)
    click.echo(f"figures: {', '.join(sorted(file.name for file in out.iterdir()))} in {out}")


if __name__ == "__main__":
    main()
