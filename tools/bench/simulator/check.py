"""The simulator beside a daemon: the same load in real and in virtual time."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from djinn_client.protocol import CLASSES
from tools.bench.harness.command import say
from tools.bench.harness.paged_model import MODEL, daemon_of, loaded, without_text
from tools.bench.loads.course import Outcome, outcome, pooled
from tools.bench.loads.live import serve
from tools.bench.loads.load import Group, Load
from tools.bench.simulator.engine import Machine, SimulatedEngine
from tools.bench.simulator.load import simulate
from tools.bench.simulator.machines import Ways, machine_of, typical, ways
from tools.bench.simulator.traced_steps import Step, TracedSteps

LIMITS = {"cpu": (512, 256), "cuda": (2048, 256)}  # tokens and rows of a step, as in djinnd/engine/__main__.py
CONTEXT = 300  # tokens of the sessions that the model is loaded for
SETTINGS = {"host_kv": "128MiB", "disk_kv": "0"}
BUDGET = "1GiB"
# With a shorter target, a tenth of a millisecond would decide which session joins a step: on two cores that is chance.
BETWEEN_TOKENS = 0.1  # seconds
WITHIN = 0.1
ROUNDS = 5  # measuring and serving alternate, because other load of the machine changes
USED_S = 5.0  # of the load before anything is measured, in daemon and simulator
NAMES = {"first_token": "first token", "between_tokens": "between tokens", "wake_up": "wake-up"}


class Compared(msgspec.Struct, frozen=True):
    name: str
    daemon: float
    simulator: float

    @property
    def ratio(self) -> float:
        return self.simulator / self.daemon if self.daemon else 1.0


class Checked(msgspec.Struct, kw_only=True):
    machine: Machine
    load: Load
    daemon: Outcome
    simulator: Outcome
    compared: list[Compared]

    @property
    def summary(self) -> str:
        """One line."""
        worst = max(self.compared, key=lambda one: abs(one.ratio - 1))
        within = sum(abs(one.ratio - 1) <= WITHIN for one in self.compared)
        told = ", ".join(f"{one.name} {one.ratio:.2f}" for one in self.compared)
        count = f"{within} of {len(self.compared)} figures within {WITHIN:.0%}, the worst {worst.name}"
        return f"{count}; simulator / daemon: {told}"


def load_for(seconds: float) -> Load:
    return Load(
        seconds=seconds,
        groups={
            "chat": Group(
                priority="interactive",
                sessions=4,
                context=(20, 60),
                prompt=(20, 60),
                answer=(20, 40),
                calls=12,
                pause_s=(0.2, 0.6),
            ),
            "agents": Group(
                priority="agent",
                sessions=6,
                context=(200, 300),
                prompt=(16, 32),
                answer=(20, 40),
                calls=8,
                pause_s=(0.5, 1.0),
                tells="expected",
            ),
            "batch": Group(priority="batch", sessions=6, context=(100, 300), answer=(60, 120)),
        },
    )


def check(checkpoint: Path, device: str, seconds: float, kv: str) -> Checked:
    """Runs the check. `kv`: device memory for pages; sessions of djinn-tiny come to 56 MiB together at most."""
    load = load_for(seconds)
    before = msgspec.structs.replace(load, seconds=USED_S)
    rounds = [msgspec.structs.replace(load, seed=seed) for seed in range(ROUNDS)]
    scheduling = {name: {"between_tokens": BETWEEN_TOKENS} for name in CLASSES}
    with tempfile.TemporaryDirectory(prefix="djinnd-bench-") as folder:
        bare = without_text(checkpoint, Path(folder))
        with (
            daemon_of(bare, device, BUDGET, {"kv": kv, **SETTINGS}, None, scheduling=scheduling) as address,
            loaded(address, CONTEXT, 0, ["host"]) as model,
        ):
            say(f"{USED_S:.0f} s in a daemon, so that it has been used")
            asyncio.run(serve(address, MODEL, model.info.vocab, before))
            measured: list[Ways] = []
            steps: list[Step] = []
            courses = []
            for number, one in enumerate(rounds):
                say(f"measuring the ways to the device, {number + 1} of {ROUNDS}")
                measured.append(asyncio.run(ways(model)))
                say(f"{seconds:.0f} s in a daemon")
                with TracedSteps(address) as traced:
                    courses.append(asyncio.run(serve(address, MODEL, model.info.vocab, one)))
                steps += traced.steps
            info = model.now()
    machine = machine_of(steps, typical(measured), info, LIMITS[device], on_cpu=device == "cpu")
    engine = SimulatedEngine(machine, BETWEEN_TOKENS)
    simulate(engine, before)
    daemon = outcome(pooled(courses), load.weights)
    simulator = outcome(pooled([simulate(engine, one) for one in rounds]), load.weights)
    return Checked(
        machine=machine, load=load, daemon=daemon, simulator=simulator, compared=list(compared(daemon, simulator))
    )


def compared(daemon: Outcome, simulator: Outcome) -> Iterator[Compared]:
    yield Compared("tokens a second", daemon.tokens_per_s, simulator.tokens_per_s)
    for name, ours in daemon.groups.items():
        theirs = simulator.groups[name]
        for kind, told in NAMES.items():
            real, virtual = getattr(ours, kind), getattr(theirs, kind)
            if real.count and virtual.count:
                for percentile in ("p50", "p90"):
                    yield Compared(
                        f"{name}: {told} {percentile}", getattr(real, percentile), getattr(virtual, percentile)
                    )
