"""Shares and delays of tenants, weights and classes that use one daemon.

    python -m tools.bench.serving.fairness CHECKPOINT [--device cuda] [--memory 80GiB] [--only tenants --only weights]

tenants      four equal tenants, one with 50 times the sessions: Jain's index of their tokens, over 10 s windows
weights      three tenants of weights 1, 2 and 4
interactive  sessions that call now and then: alone, and beside a process with batch sessions that call all the time
idle         batch throughput: alone, and beside interactive sessions that are idle
ageing       a batch session, while interactive sessions have all pages and never end: its longest time without a token

Each part has a daemon of its own. Tenants are users, so `tenants` and `weights` need root. In these two, the tokens of
a step are scarce: each session computes the KV of a new prompt and forgets it, again and again.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec

import djinn_client as djinn
from tools.bench.harness import command
from tools.bench.harness.command import Result, say
from tools.bench.harness.daemon import private_daemon
from tools.bench.harness.paged_model import LIMITS, MODEL, PATIENCE_S, QUIET_S, without_text
from tools.bench.harness.turns import in_turns
from tools.bench.loads.course import WINDOW_S, Figures, Outcome, outcome
from tools.bench.loads.live import expect_tenants, open_to_all, serve, user_of
from tools.bench.loads.load import Group, Load
from tools.bench.loads.named import ASKING, BULK
from tools.bench.loads.process import LoadProcess
from tools.bench.serving.fairness_results import Finding, Found, summary, table

READING = Group(
    priority="batch", sessions=1, context=(64, 128), prompt=(64, 128), answer=(1, 1), calls=12, forgets=True
)


FIRST_TOKEN_S, BETWEEN_TOKENS_S = 0.4, 0.04  # the targets of interactive sessions, as djinnd has them by default
BESIDE_S = 2.0  # the process beside begins so much earlier and ends so much later
ENDLESS, ROOM = 16, 12  # interactive sessions, and the number that the pool has room for
ENDLESS_TOKENS = 256  # at a session's end; it begins with so many that the pool never has room for all


class Sizes(NamedTuple):
    seconds: float  # of each run
    warm_s: float  # length of a first run, in which a device compiles kernels and captures graphs
    few: int  # sessions of a tenant
    many: int  # sessions of the large tenant
    batch: int
    asking: int
    idle: int
    ageing_s: float
    rounds: int  # of ways that are measured in turns


FULL = Sizes(seconds=60, warm_s=10, few=16, many=800, batch=32, asking=4, idle=50, ageing_s=5, rounds=4)
SMOKE = Sizes(seconds=3, warm_s=0.5, few=6, many=300, batch=8, asking=2, idle=10, ageing_s=1, rounds=4)


class Bench:
    def __init__(self, checkpoint: Path, device: str, memory: str, sizes: Sizes) -> None:
        self._checkpoint = checkpoint
        self._device = device
        self._memory = memory
        self._sizes = sizes
        self.found = Found()

    # --- the parts --------------------------------------------------------------------------------------------------

    def tenants(self) -> None:
        sizes = self._sizes
        counts = {1: sizes.few, 2: sizes.few, 3: sizes.few, 4: sizes.many}
        load = Load(seconds=max(sizes.seconds, WINDOW_S + 1), groups=_of_tenants(counts))
        got = self._serve("tenants", load)
        jain = got.jain
        assert jain is not None
        shares = ", ".join(f"{share:.3f}" for share in got.shares.values())
        self._note("Jain's index, the worst window", jain.worst, ">= 0.97", jain.worst >= 0.97, f"shares {shares}")

    def weights(self) -> None:
        sizes = self._sizes
        weights = {1: 1.0, 2: 2.0, 3: 4.0}
        load = Load(
            seconds=max(sizes.seconds, WINDOW_S + 1),
            groups=_of_tenants(dict.fromkeys(weights, 4 * sizes.few)),
            weights=weights,
        )
        got = self._serve("weights", load)
        off = farthest_from_weights(got.shares, weights)
        shares = ", ".join(f"{share:.3f}" for share in got.shares.values())
        self._note("a share off its weight by", off, "<= 0.05", off <= 0.05, f"shares {shares}")

    def interactive(self) -> None:
        sizes = self._sizes
        asking = msgspec.structs.replace(ASKING, sessions=sizes.asking)
        batch = msgspec.structs.replace(BULK, sessions=sizes.batch)
        load = Load(seconds=sizes.seconds, groups={"asking": asking})
        alone = self._serve("asking alone", load)
        others = Load(seconds=sizes.seconds + 2 * BESIDE_S, groups={"batch": batch})
        beside = self._serve("asking beside", load, others)
        idle, busy = alone.groups["asking"], beside.groups["asking"]
        for name, before, after, most in (
            ("first token p99, ms", idle.first_token.p99, busy.first_token.p99, FIRST_TOKEN_S),
            ("between tokens p99, ms", idle.between_tokens.p99, busy.between_tokens.p99, BETWEEN_TOKENS_S),
        ):
            note = f"{before * 1e3:.1f} ms alone, {after * 1e3:.1f} ms beside {sizes.batch} batch sessions"
            self._note(name, after * 1e3, f"<= {most * 1e3:.0f}", after <= most, note)

    def idle(self) -> None:
        sizes = self._sizes
        batch = msgspec.structs.replace(BULK, sessions=sizes.batch)
        silent = Group(  # its prompts are one token long, because reading them would be work
            priority="interactive",
            sessions=sizes.idle,
            context=(1, 1),
            answer=(1, 1),
            calls=2,
            pause_s=(1e6, 1e6),
        )
        runs = {"batch": Load(seconds=sizes.seconds, groups={"batch": batch})}
        runs["batch beside idle"] = Load(seconds=sizes.seconds, groups={"batch": batch, "idle": silent})
        with self._daemon({}) as address:
            self._warm_up(address, runs["batch"])
            got = in_turns({name: partial(self._run, address, name, load) for name, load in runs.items()}, sizes.rounds)
        counts = ([one.groups["batch"].between_tokens.count for one in each] for each in got.values())
        losses = [1 - beside / alone for alone, beside in zip(*counts, strict=True)]
        lost = statistics.median(losses)
        note = f"beside {sizes.idle} idle sessions, of {len(losses)} rounds {min(losses):.3f} to {max(losses):.3f}"
        self._note("batch throughput lost", lost, "<= 0.02", lost <= 0.02, note)

    def ageing(self) -> None:
        sizes = self._sizes
        groups = {
            "endless": Group(priority="interactive", sessions=ENDLESS, context=(196, 200), answer=(48, 56)),
            "batch": Group(priority="batch", sessions=1, context=(32, 64), answer=(150, 180)),
        }
        settings = {"scheduling": {"ageing": sizes.ageing_s}}
        bound = (ENDLESS - ROOM + 1) * sizes.ageing_s  # other sessions without pages age, too: see ageing.py
        load = Load(seconds=max(sizes.seconds, 2 * bound), groups=groups)
        with self._daemon(settings, sessions=ROOM) as address:
            batch = self._run(address, "ageing", load).groups.get("batch")
        longest = _longest_wait(batch, load.seconds)
        note = f"of ageing {sizes.ageing_s:g} s, {batch.between_tokens.count if batch else 0} tokens"
        self._note("longest without a token, s", longest, f"<= {bound:g}", longest <= bound, note)

    # --- a daemon ---------------------------------------------------------------------------------------------------

    def _serve(self, name: str, load: Load, beside: Load | None = None) -> Outcome:
        """Runs a load in a daemon of its own. `beside`: the load of another process at the same time."""
        expect_tenants(load)
        with self._daemon({"quotas": quotas(load.weights)}) as address:
            both = load.groups | ({} if beside is None else beside.groups)
            self._warm_up(address, msgspec.structs.replace(load, groups=both))
            if beside is None:
                return self._run(address, name, load)
            with LoadProcess(address, MODEL, _vocab(address), beside) as process:
                time.sleep(BESIDE_S)  # all its sessions have begun to read their prompts
                got = self._run(address, name, load)
                self.found.outcomes[f"{name}, the others"] = outcome(process.course(), beside.weights)
            return got

    def _warm_up(self, address: str, load: Load) -> None:
        """Runs a short load, so that kernels are compiled, graphs captured and host pages pinned."""
        asyncio.run(serve(address, MODEL, _vocab(address), msgspec.structs.replace(load, seconds=self._sizes.warm_s)))
        with djinn.Client(address) as client:
            deadline = time.monotonic() + PATIENCE_S
            while any(model.host_pages_pinned < model.host_pages for model in client.models()):
                if time.monotonic() > deadline:
                    raise click.ClickException(f"the host's pages were not pinned after {PATIENCE_S:.0f} s")
                time.sleep(0.05)
            if client.status().devices[0].name != "cpu":
                time.sleep(QUIET_S)

    def _run(self, address: str, name: str, load: Load) -> Outcome:
        say(name)
        first = 0 if load.seconds < 3 * WINDOW_S else 1  # in the first window some sessions have not begun
        got = outcome(asyncio.run(serve(address, MODEL, _vocab(address), load)), load.weights, first)
        self.found.outcomes[name] = got
        return got

    @contextmanager
    def _daemon(self, settings: Mapping[str, Any], sessions: int = 0) -> Iterator[str]:
        """A daemon with the model loaded. `sessions`: sessions of ENDLESS_TOKENS that the pool has room for; 0: the
        daemon's choice."""
        with tempfile.TemporaryDirectory(prefix="djinnd-bench-") as folder:
            bare = without_text(self._checkpoint, Path(folder))
            known = {"device": self._device, "memory": self._memory, "limits": LIMITS}
            config = {**known, **settings, "models": {MODEL: {"path": str(bare)}}}
            with private_daemon(config, Path(folder)) as address:
                Path(folder).chmod(0o755)
                open_to_all(address)
                info = djinn.load(MODEL, address=address)
                if sessions:
                    pages = sessions * -(-ENDLESS_TOKENS // info.page_size)
                    djinn.unload(MODEL, address=address)
                    djinn.load(MODEL, kv_bytes=pages * info.page_bytes, address=address)
                yield address

    def _note(self, name: str, figure: float, bar: str, met: bool, note: str) -> None:
        self.found.findings.append(Finding(name=name, figure=figure, bar=bar, met=met, note=note))


def _vocab(address: str) -> int:
    with djinn.Client(address) as client:
        return next(model.vocab for model in client.models() if model.name == MODEL)


def _longest_wait(of: Figures | None, seconds: float) -> float:
    """The longest time without a token, of sessions that follow each other. Time that no ended wait explains counts as
    one wait that has not ended."""
    if of is None:
        return seconds
    ended = of.first_token.mean * of.first_token.count + of.between_tokens.mean * of.between_tokens.count
    return max(of.first_token.worst, of.between_tokens.worst, seconds - ended)


def _of_tenants(sessions: Mapping[int, int]) -> dict[str, Group]:
    return {
        f"tenant {tenant}": msgspec.structs.replace(READING, sessions=count, tenants=(tenant,))
        for tenant, count in sessions.items()
    }


def quotas(weights: Mapping[int, float]) -> dict[str, Any]:
    """A quota rule for each tenant with a weight."""
    return {f"tenant-{tenant}": {"users": [user_of(tenant)], "weight": weight} for tenant, weight in weights.items()}


def farthest_from_weights(shares: Mapping[int, float], weights: Mapping[int, float]) -> float:
    """The largest deviation of a tenant's share from its weight, relative to the weight."""
    total = sum(weights.values())
    return max(abs(shares.get(tenant, 0.0) / (weight / total) - 1) for tenant, weight in weights.items())


PARTS: dict[str, Callable[[Bench], None]] = {
    "tenants": Bench.tenants,
    "weights": Bench.weights,
    "interactive": Bench.interactive,
    "idle": Bench.idle,
    "ageing": Bench.ageing,
}


@command.bench("fairness", __doc__, width=150)
@command.checkpoint
@command.device
@command.memory
@click.option(
    "--only", multiple=True, type=click.Choice(list(PARTS)), help="This part; may be repeated. By default all."
)
@click.option("--seconds", type=float, help="Length of each run.")
@click.option("--smoke", is_flag=True, help="A small run for two cores.")
def main(
    checkpoint: Path, device: str, memory: str, only: tuple[str, ...], seconds: float | None, smoke: bool
) -> Result:
    sizes = SMOKE if smoke else FULL
    if seconds:
        sizes = sizes._replace(seconds=seconds)
    bench = Bench(checkpoint, device, memory, sizes)
    for name in only or PARTS:
        PARTS[name](bench)
    parameters = {"model": checkpoint.name, "device": device, "memory": memory, **sizes._asdict()}
    shown = table(f"{checkpoint.name}, {sizes.seconds:g} s a run", bench.found)
    return Result(parameters, msgspec.to_builtins(bench.found), summary(bench.found), [shown])


if __name__ == "__main__":
    main()
