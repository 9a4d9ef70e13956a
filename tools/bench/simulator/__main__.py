"""The daemon's scheduler in virtual time: a day of sessions in minutes, on a device that is a table of costs.

    python -m tools.bench.simulator [LOAD] [--machine FILE.yaml] [--json FILE]
    python -m tools.bench.simulator --check CHECKPOINT [--device cpu]

LOAD is a name from loads/named.py, or a YAML file with the fields of loads/load.py. A machine's file has the fields of
engine.py's Machine. All times are the machine's, but the time of a decision is this computer's.

--check  a private daemon serves a load in real time, and the simulator serves it on a machine with the daemon's step
         times; the times at which clients get their tokens are compared
"""

from __future__ import annotations

import time
from pathlib import Path

import click
import msgspec
import yaml
from rich.table import Table

from djinn_client.protocol.fields.scheduling import Spread
from tools.bench.harness import command
from tools.bench.harness.command import Result
from tools.bench.loads.course import Outcome, outcome
from tools.bench.loads.load import Load, read
from tools.bench.loads.named import LOADS
from tools.bench.simulator.check import Checked, check
from tools.bench.simulator.engine import Machine, SimulatedEngine
from tools.bench.simulator.load import simulate
from tools.bench.simulator.machines import H200_13B

SMOKE_S = 60.0


class Simulated(msgspec.Struct, kw_only=True):
    outcome: Outcome
    seconds: float  # real time of the simulation
    steps: int
    rows: float  # mean rows of a step
    busy: float  # share of the time in which the device ran steps
    decision_s: float  # real time of a step's decision
    pages_moved: dict[str, int]


def run(machine: Machine, load: Load) -> Simulated:
    engine = SimulatedEngine(machine)
    began = time.perf_counter()
    course = simulate(engine, load)
    seconds = time.perf_counter() - began
    engine.scheduler.check_integrity()
    return Simulated(
        outcome=outcome(course, load.weights),
        seconds=seconds,
        steps=engine.steps,
        rows=engine.rows / max(engine.steps, 1),
        busy=engine.busy_s / load.seconds,
        decision_s=(engine.composed_s + engine.completed_s) / max(engine.steps, 1),
        pages_moved={way.value: pages for way, pages in engine.moved.items()},
    )


# --- what is said of it -----------------------------------------------------------------------------------------------


def table(title: str, found: Outcome) -> Table:
    shown = Table("group", title=f"{title}, ms: p50 / p90 / p99 / worst", title_justify="left")
    for column in ("calls", "failed", "queued", "first token", "between tokens", "wake-up"):
        shown.add_column(column, justify="right")
    for name, group in found.groups.items():
        times = (group.queued, group.first_token, group.between_tokens, group.wake_up)
        shown.add_row(name, f"{group.calls:,}", f"{sum(group.failures.values()):,}", *map(_ms, times))
    return shown


def _ms(found: Spread) -> str:
    if not found.count:
        return ""
    return " / ".join(f"{seconds * 1e3:.1f}" for seconds in (found.p50, found.p90, found.p99, found.worst))


def told(found: Simulated) -> str:
    """One line."""
    result = found.outcome
    moved = ", ".join(f"{pages:,} {way}d" for way, pages in found.pages_moved.items()) or "none"
    fair = "" if result.jain is None else f"; Jain {result.jain.mean:.3f} on average, {result.jain.worst:.3f} at worst"
    return (
        f"{result.seconds:,.0f} s in {found.seconds:.0f} s: {result.tokens:,} tokens, {found.steps:,} steps of "
        f"{found.rows:.1f} rows, device busy {found.busy:.1%}, pages moved: {moved}; a decision takes "
        f"{found.decision_s * 1e3:.2f} ms, {1 / found.decision_s:,.0f} a second{fair}"
    )


def summary(name: str, found: Simulated) -> str:
    groups = (
        f"{group}: first token p50 {one.first_token.p50 * 1e3:.1f} ms, p99 {one.first_token.p99 * 1e3:.1f} ms, between "
        f"tokens p99 {one.between_tokens.p99 * 1e3:.1f} ms"
        for group, one in found.outcome.groups.items()
    )
    return f"{name}: {told(found)}; {'; '.join(groups)}"


# --- the command ------------------------------------------------------------------------------------------------------


def load_of(name: str) -> Load:
    """Raises BadParameter."""
    return LOADS[name] if name in LOADS else read(Path(name))


def machine_of(path: Path | None) -> Machine:
    """Raises BadParameter."""
    if path is None:
        return H200_13B
    try:
        return msgspec.convert(yaml.safe_load(path.read_text()), Machine, strict=False)
    except (OSError, yaml.YAMLError, msgspec.ValidationError) as error:
        raise click.BadParameter(f"{path}: {error}") from error


@command.bench("simulate", __doc__, width=150)
@click.argument("name", metavar="LOAD", default="mix")
@click.option(
    "--machine",
    "machine_file",
    type=click.Path(exists=True, path_type=Path),
    help="YAML file of a machine; by default an H200.",
)
@click.option("--seconds", type=float, help="Length of the run, instead of the load's.")
@click.option("--check", "checkpoint", type=command.FOLDER)
@click.option("--device", default="cpu", show_default=True, help="With --check: the device.")
@click.option(
    "--kv",
    default="32MiB",
    show_default=True,
    help="With --check: device memory for KV pages; 64MiB are enough for all.",
)
@click.option("--smoke", is_flag=True, help="Simulate one minute of the load.")
def main(
    name: str,
    machine_file: Path | None,
    seconds: float | None,
    checkpoint: Path | None,
    device: str,
    kv: str,
    smoke: bool,
) -> Result:
    if checkpoint is not None:
        checked = check(checkpoint, device, seconds or (10.0 if smoke else 30.0), kv)
        parameters = {"model": checkpoint.name, "kv": kv, "load": msgspec.to_builtins(checked.load)}
        results = msgspec.to_builtins(checked)
        return Result(parameters, results, checked.summary, [compared(checked)], "simulate-check")
    load, machine = load_of(name), machine_of(machine_file)
    if seconds or smoke:
        load = msgspec.structs.replace(load, seconds=seconds or SMOKE_S)
    found = run(machine, load)
    parameters = {"load": msgspec.to_builtins(load), "machine": msgspec.to_builtins(machine)}
    shown = table(f"{name} on {machine.name}", found.outcome)
    shown.caption = told(found)
    return Result(parameters, msgspec.to_builtins(found), summary(name, found), [shown])


def compared(checked: Checked) -> Table:
    shown = Table("figure", "daemon", "simulator", "simulator / daemon")
    for row in checked.compared:
        shown.add_row(row.name, f"{row.daemon:.4g}", f"{row.simulator:.4g}", f"{row.ratio:.3f}")
    shown.caption = checked.summary
    return shown


if __name__ == "__main__":
    main()
