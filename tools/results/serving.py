"""Figures of single models in words: first tokens, steps, streaming, budgets, the daemon's own cost, restarts."""

from __future__ import annotations

from typing import Any

from tools.results.raw import Report
from tools.results.words import gb, gb_a_second, middle, ms, percent, sentences

# How a contender of the streaming bench is called; the others are peers.
OURS = {
    "resident": "all blocks resident",
    "plain": "the other blocks streamed as bf16",
    "packed": "the other blocks in the 12-bit code",
    "synchronous": "streamed without reading ahead",
}
PEERS = {"accelerate": "Accelerate", "diffusers": "diffusers' group offload"}


def first_and_steps(first_s: float, steps_s: dict[str, float]) -> str:
    steps = ", ".join(f"{ms(seconds)} of {count}" for count, seconds in steps_s.items())
    return f"first token {ms(first_s)}; step {steps}"


def decode(result: Report) -> str:
    ours = result.results["djinnd"]
    steps = {count: value / 1e3 for count, value in ours["step_ms"].items()}
    return sentences(
        (
            first_and_steps(ours["first_token_ms"] / 1e3, steps),
            f"reading the weights once takes {ms(result.results['limit_ms'] / 1e3)}",
        )
    )


def decode_peers(result: Report) -> str:
    peers = {"transformers' `generate`": result.results["transformers"]} | result.results.get("engines", {})
    return sentences(f"{name}: {_engine(peer)}" for name, peer in peers.items() if peer["first_token_ms"] is not None)


def _engine(peer: dict[str, Any]) -> str:
    steps = {count: value / 1e3 for count, value in peer["step_ms"].items()}
    return first_and_steps(peer["first_token_ms"] / 1e3, steps)


def cpu(result: Report) -> str:
    times = result.results["ms"]
    each = (
        f"{name} {ms(middle(times[name]['djinnd']) / 1e3)} ({ratio:.2f} times as fast)"
        for name, ratio in result.results["ratios"].items()
    )
    return ", ".join(each)


def cpu_peers(result: Report) -> str:
    found = result.results["ms"]

    def told(side: str) -> str:
        return ", ".join(f"{name} {ms(middle(times[side]) / 1e3)}" for name, times in found.items())

    sides = {
        "transformers": "transformers' `generate`",
        "llama.cpp": f"llama.cpp with {result.parameters.get('gguf')}",
    }
    measured = next(iter(found.values()))
    return sentences(f"{name}: {told(side)}" for side, name in sides.items() if side in measured)


def stored(result: Report) -> str:
    found = result.results
    steps = {count: value / 1e3 for count, value in found["step_ms"].items()}
    places = ", ".join(f"{count} {place}" for place, count in found["blocks"].items() if count)
    return sentences(
        (
            f"blocks: {places}",
            first_and_steps(found["first_token_ms"] / 1e3, steps),
            f"reading the active bytes once ({gb(found['active_bytes'])}) takes {ms(found['limit_ms'] / 1e3)}",
        )
    )


def stream(result: Report) -> str:
    bus = max(result.results["bus"].values())
    told = (_contender(name, found, bus) for name, found in _measured(result).items() if name in OURS)
    return sentences((f"bus {gb_a_second(bus)}", *told))


def stream_peers(result: Report) -> str:
    return sentences(f"{PEERS[name]}: {_found(found)}" for name, found in _measured(result).items() if name in PEERS)


def _measured(result: Report) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = result.results["contenders"]
    return {name: one for name, one in found.items() if one["found"]}


def _contender(name: str, one: dict[str, Any], bus: float) -> str:
    found = one["found"]
    blocks = ", ".join(
        f"{found[kind]} {word}"
        for kind, word in (("resident_blocks", "plain"), ("packed_blocks", "packed"), ("streamed_blocks", "streamed"))
        if found[kind]
    )
    rate = found["streamed_bytes"] / middle(found["step_s"]["1"])
    of_bus = f" ({percent(rate / bus)} of the bus)" if found["streamed_bytes"] else ""
    return f"{OURS[name]} ({blocks}; {one['peak_bytes'] / 2**30:.1f} GiB): {_found(one)}{of_bus}"


def _found(one: dict[str, Any]) -> str:
    found = one["found"]
    steps = {count: middle(values) for count, values in found["step_s"].items()}
    return first_and_steps(middle(found["first_token_s"]), steps)


def forecast_arguments(result: Report) -> str:
    def told(place: dict[str, Any]) -> str:
        kv = f",kv={place['kv_bytes'] / 2**30:.0f}GiB" if "kv_bytes" in place else ""
        resident = f",resident={place['resident']}" if "resident" in place else ""
        return f"--place {place['memory_bytes'] / 2**30:.0f}GiB{kv}{resident}"

    return " ".join(("CHECKPOINT", *(told(place) for place in result.parameters["places"])))


def forecast(result: Report) -> str:
    def told(place: dict[str, Any]) -> str:
        each = place["seconds"].items()
        return "; ".join(f"{what} {ms(one['found'])} (foretold {ms(one['foretold'])})" for what, one in each)

    return sentences(f"{name}: {told(place)}" for name, place in result.results["places"].items())


def budget(result: Report) -> str:
    lowered, raised = result.results["changes"]
    same, sessions = result.results["sessions_with_the_same_tokens"], result.parameters["sessions"]
    low, high = lowered["budget_bytes"] / 2**30, raised["budget_bytes"] / 2**30
    return (
        f"{high:.0f} to {low:.0f} GiB in {lowered['seconds']:.2f} s and back in {raised['seconds']:.2f} s; "
        f"{same} of {sessions} sessions have the tokens of an undisturbed run"
    )


def ipc(result: Report) -> str:
    calls, signals = result.results["empty_call"], result.results["io_wait"]
    calls_told = f"empty call {calls['p50_us']:.0f} µs, p99 {calls['p99_us']:.0f} µs"
    signals_told = f"a pause signal {signals['p50_us']:.0f} µs, p99 {signals['p99_us']:.0f} µs"
    return sentences((calls_told, signals_told, *map(_throughput, result.results["sessions"].items())))


def _throughput(item: tuple[str, dict[str, Any]]) -> str:
    sessions, found = item
    lost, streamed = found["daemon_lost"], found["streamed_lost"]
    shares = [percent(found[name]) for name in ("server_share", "streamed_share") if name in found]
    processor = f"; the server's processor time is {' and '.join(shares)} of the engine's" if shares else ""
    return (
        f"sessions: {sessions}; the engine by itself {found['direct']:,.0f} tokens/s, "
        f"through the daemon {_change(lost)}, streamed {_change(streamed)}{processor}"
    )


def _change(lost: dict[str, float]) -> str:
    return f"{-lost['value']:+.1%} ({-lost['high']:+.1%} to {-lost['low']:+.1%})".replace("%", " %")


def restart(result: Report) -> str:
    uptime = result.results["uptime_s"]
    times = result.results["seconds"].items()
    told = "; ".join(
        f"{name} {seconds:.1f} s after the command, {uptime[name]:.1f} s after the process began"
        for name, seconds in times
    )
    return f"{told}; {gb(result.results['arena_bytes'])} of weights in shared memory, the same token each time"
