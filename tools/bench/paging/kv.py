"""KV between device, host and disk: how fast sessions leave and come back, and how much others are delayed.

    python -m tools.bench.paging.kv CHECKPOINT [--memory 80GiB] [--host-kv 60GiB] [--disk-kv 20GiB] [--tokens 2048]

The rates of bus and disk are measured in the same run. The model is loaded four times: with a pool of the daemon's
choice, for forks; with a pool for two sessions and tiers below it; with room for decoding sessions beside; and with the
pool for two without tiers, where KV is recomputed.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.table import Table

from tools.bench.harness import command
from tools.bench.harness.bus import Rates, measured_apart
from tools.bench.harness.command import Result, given, say
from tools.bench.harness.daemon import device_name
from tools.bench.harness.paged_model import PagedModel, daemon_of, loaded
from tools.bench.paging import beside
from tools.bench.paging import kv_measures as measures
from tools.bench.paging.disk import disk_rates
from tools.bench.paging.kv_measures import Copied

SLACK_S = 0.002  # slack of a wake-up beyond bytes / ceiling and a step
FORKS = 21


class Line(NamedTuple):
    """A row of the table: a figure and its bar."""

    measure: str
    found: str
    bar: str
    ratio: str


def measure(
    checkpoint: Path, device: str, memory: str, tiers: dict[str, str], folder: Path | None, work: dict[str, int]
) -> dict[str, Any]:
    """`tiers`: host_kv and disk_kv of the model's configuration; `work`: tokens, rounds, forks, steps."""
    bus = measured_apart(device, "--both-ways")
    rounds = work["rounds"]
    with daemon_of(checkpoint, bus.device, memory, tiers, folder) as address:
        with loaded(address, work["tokens"]) as model:
            say("forks")
            forks = measures.forks(model, FORKS, work["forks"])
            kv_bytes = model.pool_bytes(model.tokens, model.tokens)
            beside_bytes = beside.pool_bytes(model, work["steps"])
        with loaded(address, work["tokens"], kv_bytes, ("host", "disk")) as model:
            found = with_tiers(model, bus, rounds)
            pages = {name: getattr(model.info, name) for name in ("page_size", "page_bytes", "pages")}
            tokens = model.tokens
        with loaded(address, work["tokens"], beside_bytes, ("host",)) as model:
            say("beside others")
            copying = found["session_bytes"] / bus.up
            found["beside"] = beside.beside(model, copying, work["steps"], min(rounds, 3))
        with loaded(address, work["tokens"], kv_bytes) as model:
            say("computed anew")
            computed = measures.recomputed(model, rounds)
        say("the disk")
        pieces = max(64, found["session_bytes"] // pages["page_bytes"])
        disk = disk_rates(Path(address).parent, pages["page_bytes"], pieces)
        on = device_name(address)
    return {
        "device": on,
        "tokens": tokens,
        **pages,
        "ceilings": {"up": bus.up, "down": bus.down, "both": bus.both, "disk": disk._asdict()},
        **found,
        "recomputed": [woken._asdict() for woken in computed],
        "forks": forks,
    }


def with_tiers(model: PagedModel, bus: Rates, rounds: int) -> dict[str, Any]:
    nbytes = model.session_pages * model.info.page_bytes
    copying = nbytes / bus.up
    say("demote and promote")
    demoted = [measures.demote(model, copying) for _ in range(rounds)]
    promoted = [measures.promote(model, copying) for _ in range(rounds)]
    say("both ways")
    exchanged = [measures.exchange(model, copying) for _ in range(rounds)]
    say("waking up")
    found: dict[str, Any] = {
        "session_bytes": promoted[0].nbytes,
        "demote": _copies(demoted),
        "promote": _copies(promoted),
        "exchange_down": _copies([down for down, _ in exchanged]),
        "exchange_up": _copies([up for _, up in exchanged]),
        "step_s": measures.step_s(model),
    }
    for name, wake in {
        "stayed": measures.stayed,
        "from_host": measures.from_host,
        "when_expected": measures.when_expected,
    }.items():
        found[name] = [woken._asdict() for woken in wake(model, rounds)]
    say("from disk")
    down, up = measures.from_disk(model, rounds)
    found["to_disk"], found["from_disk"] = _copies(down), [woken._asdict() for woken in up]
    return found


def _copies(copies: Sequence[Copied]) -> dict[str, Any]:
    traced = [copy.traced_rate for copy in copies if copy.traced_rate]
    return {
        "runs": [copy._asdict() for copy in copies],
        "rate": statistics.median(copy.rate for copy in copies),
        "traced_rate": statistics.median(traced) if traced else None,
    }


# --- what is said of it -----------------------------------------------------------------------------------------------


def seconds(woken: Sequence[dict[str, Any]]) -> float:
    return float(statistics.median(one["seconds"] for one in woken))


def chosen(woken: Sequence[dict[str, Any]]) -> str:
    """Tells whether the daemon copied or recomputed."""
    copies = sum(one["computed"] <= 1 for one in woken)
    return "copied" if copies == len(woken) else "computed" if not copies else f"{copies} of {len(woken)} copied"


def lines(found: dict[str, Any]) -> list[Line]:
    """The table's rows, from results."""
    ceilings, step = found["ceilings"], found["step_s"]
    nbytes = statistics.median(one["nbytes"] for one in found["from_host"])  # generated tokens may fill one page more
    drawn = []
    for name, label, ceiling in (
        ("demote", "demote", ceilings["down"]),
        ("promote", "promote", ceilings["up"]),
        ("exchange_down", "demote as another comes", ceilings["both"]),
        ("exchange_up", "promote as another leaves", ceilings["both"]),
    ):
        copies = found[name]
        for kind, rate in (("", copies["rate"]), (", the copies alone", copies["traced_rate"])):
            if rate:
                drawn.append(Line(label + kind, _rate(rate), _rate(ceiling), f"{rate / ceiling:.2f}"))
    anew = seconds(found["recomputed"])
    bar = nbytes / ceilings["up"] + step + SLACK_S
    disk = ceilings["disk"]
    from_disk = min(nbytes / (0.8 * disk["read"]) + step + SLACK_S, anew)
    for name, label, limit in (
        ("stayed", "token of a session that stayed", step + SLACK_S),
        ("from_host", "token of one on the host", bar),
        ("when_expected", "the same, expected", step + SLACK_S),
        ("from_disk", "token of one on disk", from_disk),
        ("recomputed", "token of one computed anew", anew),
    ):
        took = seconds(found[name])
        drawn.append(Line(f"{label} ({chosen(found[name])})", _ms(took), _ms(limit), f"{took / limit:.2f}"))
    written = found["to_disk"]["rate"]
    cached = "" if disk["direct"] else ", through the page cache"
    drawn.append(Line(f"pause to disk{cached}", _rate(written), _rate(disk["write"]), f"{written / disk['write']:.2f}"))
    drawn += _others(found["beside"], ceilings["both"])
    forks = found["forks"]
    drawn.append(Line("fork", _ms(statistics.median(forks["seconds"])), _ms(0.001), ""))
    drawn.append(Line(f"pages of {forks['many']:,} forks", f"{forks['pages_of_many']:,}", f"{forks['many']:,}", ""))
    return drawn


def _others(phases: dict[str, dict[str, Any]], bus: float) -> list[Line]:
    """Rows on the delay of decoding sessions: beside one departure a second, and beside as many as the bus takes."""
    drawn = []
    for phase, label in (("each_second", "a session a second"), ("disturbed", "as many as the bus takes")):
        noticed = phases[phase]
        for kind, bar in (("median", "1.05 x "), ("p99", "1.15 x ")):
            one, other = noticed[kind], phases["undisturbed"][kind]
            drawn.append(Line(f"others' step, {label}, {kind}", _ms(one), bar + _ms(other), f"{one / other:.3f}"))
        one, other = noticed["step_median"], phases["undisturbed"]["step_median"]
        drawn.append(Line(f"of that the device's, {label}, median", _ms(one), _ms(other), f"{one / other:.3f}"))
        one, other = noticed["idle_p99"], phases["undisturbed"]["idle_p99"]
        drawn.append(Line(f"of that outside of blocks, {label}, p99", _ms(one), _ms(other), ""))
        for way in ("up", "down"):
            rate = noticed[f"bytes_{way}"] / noticed["seconds"]
            drawn.append(Line(f"{way} meanwhile, {label}", _rate(rate), _rate(bus), f"{rate / bus:.2f}"))
    return drawn


def _rate(rate: float) -> str:
    return f"{rate / 1e9:.1f} GB/s"


def _ms(took: float) -> str:
    return f"{took * 1e3:.2f} ms"


def summary(found: dict[str, Any]) -> str:
    told = "; ".join(f"{line.measure} {line.found} (of {line.bar})" for line in lines(found))
    return f"{found['tokens']:,} tokens, {found['session_bytes'] / 1e9:.2f} GB: {told}"


def table(name: str, found: dict[str, Any]) -> Table:
    nbytes = f"{found['tokens']:,} tokens, {found['session_bytes'] / 1e6:,.0f} MB on {found['device']}"
    shown = Table("measure", "found", "ceiling or bar", "ratio", title=f"{name}, a session of {nbytes}")
    for line in lines(found):
        shown.add_row(*line)
    return shown


@command.bench("kv", __doc__)
@command.checkpoint
@command.device
@command.memory
@command.host_kv
@command.disk_kv
@click.option("--tokens", default=2048, show_default=True, help="Tokens of a session; at most the model's context.")
@click.option("--forks", default=1000, show_default=True)
@click.option("--steps", default=512, show_default=True, help="Steps of the decoding sessions in each round.")
@command.rounds(7)
@command.folder
def main(
    checkpoint: Path,
    device: str,
    memory: str,
    host_kv: str | None,
    disk_kv: str | None,
    folder: Path | None,
    **work: int,
) -> Result:
    tiers = given(host_kv=host_kv, disk_kv=disk_kv)
    found = measure(checkpoint, device, memory, tiers, folder, work)
    parameters = {"model": checkpoint.name, "memory": memory, **tiers, **work}
    return Result(parameters, found, summary(found), [table(checkpoint.name, found)])


if __name__ == "__main__":
    main()
