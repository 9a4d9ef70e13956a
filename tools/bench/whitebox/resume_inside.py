"""The time to the next token of a session that stopped inside the model, by the number of blocks that had run.

    python -m tools.bench.whitebox.resume_inside CHECKPOINT [--memory 80GiB] [--tokens 2048] [--blocks 1,10,20,30,40]

All positions of a prompt have stopped after so many blocks.

djinnd      the client says `resume`; a trace of one more session counts the blocks that run then
recompute   a new session with a prompt as long, so that all blocks run
manual      transformers: the KV of the finished blocks and the last one's output are copied by hand to pinned memory
            and back, and the other blocks run
hooks       transformers runs the model over all of the prompt, as with an edit in a hook
nnsight     its trace with an edit, which also runs all of the prompt

One more measurement stops after half of the blocks, and the session's pages leave the device and come back.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.table import Table

import djinn_client as djinn
from djinn_client.protocol import Span
from tools.bench.harness import command
from tools.bench.harness.apart import output_of
from tools.bench.harness.bus import measured_apart
from tools.bench.harness.command import Result, say
from tools.bench.harness.daemon import device_name
from tools.bench.harness.paged_model import MODEL, PagedModel, daemon_of, loaded
from tools.bench.harness.trace import traced

LAYERS = (1, 10, 20, 30, 40)  # depths in a model of 40 blocks
BARS = {0.5: 0.55, 1.0: 0.1}  # the most time, as a share of a recompute, by the share of blocks that had run
PEERS = {"manual": "manual", "hooks": "recompute", "nnsight": "nnsight"}  # a peer's name, and the name of its figures
TRACE_S = 0.5  # of a trace beyond the resume itself
SLACK_S = 0.002  # slack of returning pages beyond bytes / bus


def depths(blocks: int, wanted: Sequence[int]) -> list[int]:
    """Numbers of blocks after which sessions stop; by default LAYERS, scaled to the model."""
    if any(not 0 < depth <= blocks for depth in wanted):
        raise click.BadParameter(f"the model has {blocks} blocks: 1 to {blocks} can have run", param_hint="--blocks")
    return sorted(set(wanted) or {max(1, round(blocks * layer / LAYERS[-1])) for layer in LAYERS})


# --- djinnd ---------------------------------------------------------------------------------------------------------


def stopped(model: PagedModel, depth: int) -> djinn.Session:
    session = djinn.Session(MODEL, address=model.address)
    session.breakpoint(layer=depth - 1, when="prefill")
    hit = session.run(model.prompt(model.tokens), max_tokens=1)
    assert isinstance(hit, djinn.Hit) and hit.info.block == depth and len(hit.positions) == model.tokens, hit
    return session


def resumed(model: PagedModel, depth: int) -> dict[str, float]:
    """Seconds by the client's clock, and since the daemon received the call."""
    with stopped(model, depth) as session:
        began = time.perf_counter()
        out = session.resume(max_tokens=1)
        seconds = time.perf_counter() - began
        assert isinstance(out, djinn.Generated), out
        return {"seconds": seconds, "daemon": out.timings.total}


def recomputed(model: PagedModel) -> dict[str, float]:
    with djinn.Session(MODEL, address=model.address) as session:
        text = model.prompt(model.tokens)
        began = time.perf_counter()
        out = session.generate(text, max_tokens=1)
        seconds = time.perf_counter() - began
        assert out.usage.computed_tokens == model.tokens, out.usage
        return {"seconds": seconds, "daemon": out.timings.total}


def leave(model: PagedModel, session: djinn.Session, tool: str) -> int:
    """Waits until the session's pages are only on the host. Returns their bytes. `tool` must be new each time, so that
    the daemon cannot learn the wait's duration."""
    session.signal("IO_WAIT", tool=tool)
    pages = model.wait_until(session, lambda info: info.pages == 0).host_pages
    model.overwrite()
    return pages * model.info.page_bytes


def from_host(model: PagedModel, depth: int, number: int) -> dict[str, float]:
    """Seconds by the client's clock to resume a session with its pages on the host, and their bytes."""
    with stopped(model, depth) as session:
        nbytes = leave(model, session, f"round {number}")
        began = time.perf_counter()
        out = session.resume(max_tokens=1)
        seconds = time.perf_counter() - began
        assert isinstance(out, djinn.Generated), out
        return {"seconds": seconds, "nbytes": nbytes}


def ran(model: PagedModel, depth: int, expected_s: float, *, away: bool = False) -> list[int]:
    """How often each block runs when a stopped session resumes; `away`: with its pages on the host."""
    with stopped(model, depth) as session:
        if away:
            leave(model, session, "a trace")
        with traced(model.address, TRACE_S + 2 * expected_s) as spans:
            session.resume(max_tokens=1)
            return block_counts(spans(), model.info.blocks)


def block_counts(spans: Sequence[Span], blocks: int) -> list[int]:
    counts = Counter(span.name for span in spans if span.track == "compute")
    return [counts[f"block {index}"] for index in range(blocks)]


def only_behind(counts: Sequence[int], depth: int) -> bool:
    """True if all blocks after `depth` have run equally often, and no block before."""
    behind = set(counts[depth:])
    return not any(counts[:depth]) and len(behind) <= 1 and 0 not in behind


def measure(
    checkpoint: Path, device: str, memory: str, tokens: int, wanted: Sequence[int], rounds: int
) -> dict[str, Any]:
    bus = measured_apart(device)
    with daemon_of(checkpoint, bus.device, memory, {}, None) as address, loaded(address, tokens) as model:
        at = depths(model.info.blocks, wanted)
        anew: list[dict[str, float]] = []
        ours: dict[int, list[dict[str, float]]] = {depth: [] for depth in at}
        for number in range(rounds + 1):  # the first one warms up
            say(f"djinnd, round {number} of {rounds}")
            anew.append(recomputed(model))
            for depth in at:
                ours[depth].append(resumed(model, depth))
            if number == 0:
                time.sleep(model.quiet_s)
        say("djinnd, which blocks are run")
        counts = {depth: ran(model, depth, anew[-1]["seconds"]) for depth in at}
        info, length = model.info, model.tokens
        on = device_name(address)
        kv_bytes, half = model.pool_bytes(model.tokens, model.tokens), at[len(at) // 2]
    with (
        daemon_of(checkpoint, bus.device, memory, {"host_kv": f"{4 * kv_bytes / (1 << 20):.0f}MiB"}, None) as address,
        loaded(address, tokens, kv_bytes, ("host",)) as model,
    ):
        say(f"djinnd, from the host, behind {half}")
        stayed, back = [], []
        for number in range(rounds + 1):
            stayed.append(resumed(model, half))
            back.append(from_host(model, half, number))
        ran_back = ran(model, half, anew[-1]["seconds"], away=True)
    say("transformers")
    options = [f"--device={bus.device}", f"--dtype={info.dtype}", f"--tokens={length}", f"--rounds={rounds}"]
    options.append(f"--blocks={','.join(map(str, at))}")
    theirs = msgspec.json.decode(output_of("peers.resume", str(checkpoint), *options))
    return {
        "device": on,
        "bus": bus.up,
        "tokens": length,
        "blocks": info.blocks,
        "recompute": anew[1:],
        "from_host": {"blocks": half, "stayed": stayed[1:], "back": back[1:], "ran": ran_back},
        "stops": [{**one, "djinnd": ours[one["blocks"]][1:], "ran": counts[one["blocks"]]} for one in theirs],
    }


# --- what was found -------------------------------------------------------------------------------------------------


def middle(measured: Sequence[dict[str, float]], what: str = "seconds") -> float:
    return statistics.median(one[what] for one in measured)


def share(found: dict[str, Any], stop: dict[str, Any]) -> str:
    """The time as a share of a recompute, with the bar if there is one."""
    bar = BARS.get(stop["blocks"] / found["blocks"])
    return f"{middle(stop['djinnd']) / middle(found['recompute']):.2f}" + (f" (of {bar:.2f})" if bar else "")


def run_behind(found: dict[str, Any], stop: dict[str, Any]) -> str:
    """The share of the blocks that ran."""
    if only_behind(stop["ran"], stop["blocks"]):
        return f"{1 - stop['blocks'] / found['blocks']:.2f}"
    return f"not those behind alone: {stop['ran']}"


def came_back(found: dict[str, Any]) -> str:
    """The further time of a session with its pages on the host, beside the bus's time for them."""
    host = found["from_host"]
    longer = middle(host["back"]) - middle(host["stayed"])
    bar = middle(host["back"], "nbytes") / found["bus"] + SLACK_S
    told = f"behind {host['blocks']} from the host {longer * 1e3:.1f} ms more (of {bar * 1e3:.1f} ms)"
    return told if only_behind(host["ran"], host["blocks"]) else f"{told}, computed anew: {host['ran']}"


def table(name: str, found: dict[str, Any]) -> Table:
    title = f"{name} on {found['device']}, {found['tokens']:,} tokens: ms until the next token"
    shown = Table("behind", "blocks run", "djinnd", "of it, daemon", "of a recompute", *PEERS, title=title)
    shown.caption = f"recompute {middle(found['recompute']) * 1e3:.1f} ms; bus {found['bus'] / 1e9:.1f} GB/s"
    shown.caption += f"; {came_back(found)}"
    if note := found["stops"][0]["nnsight_note"]:
        shown.caption += f"; nnsight skipped: {note}"
    for stop in found["stops"]:
        times = [middle(stop["djinnd"]), middle(stop["djinnd"], "daemon")]
        ours = (f"{seconds * 1e3:.1f}" for seconds in times)
        peers = (f"{statistics.median(stop[way]) * 1e3:.1f}" if stop[way] else "" for way in PEERS.values())
        shown.add_row(f"{stop['blocks']}", run_behind(found, stop), *ours, share(found, stop), *peers)
    return shown


def summary(found: dict[str, Any]) -> str:
    stops = (
        f"behind {stop['blocks']} {middle(stop['djinnd']) * 1e3:.1f} ms, {share(found, stop)}, "
        f"blocks run {run_behind(found, stop)}, "
        + ", ".join(f"{way} {statistics.median(stop[of]) * 1e3:.1f} ms" for way, of in PEERS.items() if stop[of])
        for stop in found["stops"]
    )
    return (
        f"{found['tokens']:,} tokens, {found['blocks']} blocks, until the next token: recompute "
        f"{middle(found['recompute']) * 1e3:.1f} ms; {'; '.join(stops)}; {came_back(found)}"
    )


@command.bench("resume_inside", __doc__)
@command.checkpoint
@command.device
@command.memory
@click.option("--tokens", default=2048, show_default=True, help="Tokens of a prompt.")
@click.option("--blocks", default="", help="Blocks that have run at a stop; by default 1, 10, 20, 30, 40 of 40.")
@command.rounds(7)
def main(checkpoint: Path, device: str, memory: str, tokens: int, blocks: str, rounds: int) -> Result:
    wanted = [int(depth) for depth in blocks.split(",") if depth]
    found = measure(checkpoint, device, memory, tokens, wanted, rounds)
    parameters = {"model": checkpoint.name, "memory": memory, "tokens": tokens, "rounds": rounds}
    return Result(parameters, found, summary(found), [table(checkpoint.name, found)])


if __name__ == "__main__":
    main()
