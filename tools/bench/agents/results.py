"""Results of the bench of agents, and their presentation."""

from __future__ import annotations

import msgspec
from rich.table import Table

from djinn_client.protocol.fields.scheduling import Spread
from tools.bench.agents.figures import Figures
from tools.bench.agents.peer import Batched
from tools.bench.agents.plan import Work
from tools.bench.stream.outcome import Status

PEER = "transformers"
REFERENCE = "with room for all"
WIDTH = 140  # columns of a table


class Tried(msgspec.Struct, kw_only=True):
    """The runs of one piece of work."""

    work: Work
    alone: Figures  # one agent by itself, before the runs
    ways: dict[str, Figures] = {}  # by the way of telling the daemon
    usage: dict[str, list[dict[str, float]]] = {}  # samples of a Usage, by the same way
    reference: Figures | None = None  # in a daemon with room for all of its agents, which may be fewer
    peer: Figures | None = None

    @property
    def name(self) -> str:
        kind = f"arriving, {self.work.rate:g} a second" if self.work.rate else "alive at once"
        return f"{self.work.agents} agents {kind}, {self.work.context:,} tokens"

    @property
    def runs(self) -> dict[str, Figures]:
        """All runs, by name."""
        others = {REFERENCE: self.reference, PEER: self.peer}
        return self.ways | {name: run for name, run in others.items() if run is not None}

    def share(self, run: Figures) -> float | None:
        """Answers a minute and agent, as a share of the same figure with room for all."""
        if self.reference is None:
            return None
        return (run.answers_per_minute / run.agents) / (self.reference.answers_per_minute / self.reference.agents)

    def times_step(self, run: Figures) -> float:
        """The 99th percentile of the time between two tokens, as a multiple of the step of one agent alone."""
        return run.between_tokens.p99 / self.alone.between_tokens.p50


class Results(msgspec.Struct, kw_only=True):
    device: str
    budget_bytes: int
    ceilings: dict[str, float | None]  # the bus's bytes a second: up, down, and each way while both are busy
    page_size: int  # tokens
    page_bytes: int
    pages: dict[str, int]  # capacity of each tier
    dtype: str
    tried: list[Tried]
    findings: list[str]  # of the daemon's integrity check at the end
    peer: Batched | None = None  # None: not measured

    def session_bytes(self, work: Work) -> int:
        """KV bytes of an agent's session at its end, in whole pages."""
        return -(-work.session_tokens // self.page_size) * self.page_bytes

    def demand_bytes(self, work: Work) -> int:
        """KV bytes if all agents were there at once."""
        return work.agents * self.session_bytes(work)


def tables(name: str, found: Results) -> list[Table]:
    return [_table(name, found, tried) for tried in found.tried]


def _table(name: str, found: Results, tried: Tried) -> Table:
    times = ("wake-up, ms", "between tokens, ms", "x step", "answer, s")
    shown = Table("told", "answers", *times, title_justify="left", caption_justify="left")
    for column in ("a minute", "tokens/s", "of room", "GB back", "anew"):
        shown.add_column(column, justify="right")
    shown.title = (
        f"{name} on {found.device}: {tried.name}, {_alive(tried)}; {_gb(found.demand_bytes(tried.work))} of KV, pages "
        f"for {_gb(found.pages['device'] * found.page_bytes)}. p50/p90/p99/worst"
    )
    shown.caption = (
        f"alone: wake-up {_ms(tried.alone.wake_up)} ms, a step {tried.alone.between_tokens.p50 * 1e3:.2f} ms; "
        f"bus up {_rate(found.ceilings['up'])}, both ways {_rate(found.ceilings['both'])}{_told_of_peer(found)}"
    )
    for way, run in tried.runs.items():
        share = tried.share(run)
        points = tried.usage.get(way)
        shown.add_row(
            way if run.agents == tried.work.agents else f"{way}: {run.agents} agents",
            f"{run.answers} of {run.wanted}",
            _ms(run.wake_up),
            _ms(run.between_tokens),
            f"{tried.times_step(run):.2f}",
            f"{run.answer.p50:.2f}/{run.answer.p99:.2f}",
            f"{run.answers_per_minute:.1f}",
            f"{run.tokens_per_s:.0f}",
            "" if share is None else f"{share:.2f}",
            "" if points is None else f"{points[-1]['arrived'] / 1e9:.3g}",
            "" if run.computed_anew is None else str(run.computed_anew),
        )
    return shown


def summary(found: Results) -> str:
    """One line."""
    parts = []
    for tried in found.tried:
        told = []
        for way, run in tried.runs.items():
            share = tried.share(run)
            told.append(
                f"{way}: {run.answers} of {run.wanted} answers, wake-up p99 {run.wake_up.p99 * 1e3:.1f} ms, between "
                f"tokens p99 {run.between_tokens.p99 * 1e3:.1f} ms ({tried.times_step(run):.2f} steps), "
                f"{run.answers_per_minute:.1f} answers a minute" + ("" if share is None else f" ({share:.2f} of room)")
            )
        kv = _gb(found.demand_bytes(tried.work))
        parts.append(f"{tried.name} ({kv} of KV, {_alive(tried)}): {', '.join(told)}")
    return "; ".join(parts) + _told_of_peer(found)


def _alive(tried: Tried) -> str:
    """How many agents were alive at once, in the run with the most."""
    most = max(tried.ways.values(), key=lambda run: run.alive_most)
    return f"at most {most.alive_most} alive, {most.alive_mean:.1f} on average"


def _told_of_peer(found: Results) -> str:
    peer = found.peer
    if peer is None:
        return ""
    if peer.status is not Status.MEASURED:
        return f"; {PEER}: {peer.status}, {peer.note}"
    return f"; {PEER}: {peer.attention} attention, {_gb(peer.offload_bytes)} of host memory for KV"


def _ms(times: Spread) -> str:
    told = (seconds * 1e3 for seconds in (times.p50, times.p90, times.p99, times.worst))
    return "/".join(f"{ms:.1f}" if ms < 100 else f"{ms:.0f}" for ms in told)


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.3g} GB"


def _rate(rate: float | None) -> str:
    return "unknown" if rate is None else f"{rate / 1e9:.1f} GB/s"
