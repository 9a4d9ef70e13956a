"""Figures of sessions that leave the card and come back, in words."""

from __future__ import annotations

from typing import Any

from tools.results.raw import Report
from tools.results.words import gb, gb_a_second, middle, ms, sentences

WAYS = {
    "none": "nothing said about pauses",
    "signals": "pauses announced",
    "tool": "pauses announced by the tool's name",
    "expected": "pauses announced with the expected time",
}


def seconds_of(runs: list[dict[str, Any]]) -> float:
    return middle([run["seconds"] for run in runs])


def restart_sessions(result: Report) -> str:
    found = result.results
    pages = -(-found["session_tokens"] // found["page_size"])
    at = found["seconds"]
    return sentences(
        (
            f"{found['sessions']} sessions, {gb(found['sessions'] * pages * found['page_bytes'])} of KV: "
            f"all attached after {at['all attached']:.1f} s, the first went on after {at['the first went on']:.1f} s, "
            f"the last after {at['all went on']:.1f} s",
            f"{found['kept']} had all their KV, {found['same_tokens']} the tokens of an undisturbed run",
        )
    )


def kv(result: Report) -> str:
    found = result.results
    bus, beside = found["ceilings"], found["beside"]
    undisturbed, disturbed = beside["undisturbed"], beside["disturbed"]
    return sentences(
        (
            f"{gb(found['session_bytes'])} to the host at {gb_a_second(found['demote']['traced_rate'])} and back at "
            f"{gb_a_second(found['promote']['traced_rate'])}, the copies alone (bus {gb_a_second(bus['down'])} and "
            f"{gb_a_second(bus['up'])}); as one leaves while another comes "
            f"{gb_a_second(found['exchange_down']['traced_rate'])} and "
            f"{gb_a_second(found['exchange_up']['traced_rate'])} (bus {gb_a_second(bus['both'])}); "
            f"to disk {gb_a_second(found['to_disk']['rate'])} (alone {gb_a_second(bus['disk']['write'])})",
            f"next token: stayed {ms(seconds_of(found['stayed']))}, "
            f"from the host {ms(seconds_of(found['from_host']))}, "
            f"the same when its return was announced {ms(seconds_of(found['when_expected']))}, "
            f"from disk {ms(seconds_of(found['from_disk']))}, recomputed {ms(seconds_of(found['recomputed']))}",
            f"a step of others while the bus is full {ms(disturbed['median'])}, p99 {ms(disturbed['p99'])} "
            f"(undisturbed {ms(undisturbed['median'])}, p99 {ms(undisturbed['p99'])})",
            f"fork {ms(middle(found['forks']['seconds']))}; {found['forks']['many']:,} forks add "
            f"{found['forks']['pages_of_many']:,} pages",
        )
    )


def resume(result: Report) -> str:
    return sentences(
        f"{one['tokens']:,} tokens ({gb(one['nbytes'])}): {ms(middle(one['djinnd']))} from the host, "
        f"{ms(middle(one['expected']))} when its return was announced"
        for one in result.results["sessions"]
    )


def resume_peers(result: Report) -> str:
    return sentences(
        f"transformers, {one['tokens']:,} tokens: {ms(middle(one['manual']))} with its KV copied by hand "
        f"from pinned memory, {ms(middle(one['recompute']))} recomputed"
        for one in result.results["sessions"]
    )


def turns(result: Report) -> str:
    found = result.results
    ways = (("demote", "down", "leave"), ("promote", "up", "come back"))
    rates = {what: found[what]["traced_rate"] or found[what]["rate"] for what, _, _ in ways}  # of the copies alone
    shares = [f"its copies {told} at {rates[what] / found['bus'][way]:.2f} of the bus" for what, way, told in ways]
    times, again = ([turn[what] for turn in found["turns"]] for what in ("seconds", "again"))
    return sentences(
        [
            f"{found['tokens']:,} tokens ({gb(found['session_bytes'])}): {', '.join(shares)}",
            f"a turn of {result.parameters['new']} tokens: {ms(middle(times))}, at most {max(again)} computed again",
        ]
    )


def oversubscribe(result: Report) -> str:
    demand = result.results["demand"]
    budget = result.results["budget"] / 2**30

    def told(mode: str, found: dict[str, Any]) -> str:
        return (
            f"asked {mode}: {found['served']} of {found['sessions']} served in {found['seconds']:.1f} s, "
            f"{found['ratio']:.2f} times what it takes with room for all; {found['same_tokens']} with the same tokens"
        )

    wanted = f"{gb(demand['kv_bytes'] + demand['weight_bytes'])} wanted, weights included, on {budget:.0f} GiB"
    return sentences((wanted, *(told(mode, found) for mode, found in result.results["modes"].items())))


def agents_case(result: Report) -> str:
    """The last of the loads that the run tried; others before it only warm up."""
    work = result.results["tried"][-1]["work"]
    alive = f"arriving, {work['rate']:g} a second" if work["rate"] else "alive at once"
    return f"{work['agents']} agents of {work['context']:,} tokens, {alive}"


def agents_arguments(result: Report) -> str:
    tried = result.results["tried"][-1]
    work = tried["work"]
    agents = f"--arrivals {work['agents']} --rate {work['rate']:g} --context {work['context']}"
    crowd = f"--crowd {work['agents']}x{work['context']}"
    kept = "" if result.parameters.get("keep_host", True) else " --no-keep-host"
    peer = " --peer" if tried["peer"] else ""
    ways = ",".join(tried["ways"])
    return f"CHECKPOINT {agents if work['rate'] else crowd} --loops {work['loops']} --ways {ways}{peer}{kept}"


def agents(result: Report) -> str:
    tried = result.results["tried"][-1]
    step = tried["alone"]["between_tokens"]["p50"]
    room = tried["reference"]

    def told(found: dict[str, Any]) -> str:
        wake, gap = found["wake_up"], found["between_tokens"]
        return (
            f"{found['answers']} of {found['wanted']} answers, {found['answers_per_minute']:.0f} a minute; "
            f"next token after a tool {ms(wake['p50'])}, p90 {ms(wake['p90'])}, p99 {ms(wake['p99'])}; "
            f"between tokens p99 {gap['p99'] / step:.2f} steps of a session alone"
        )

    return sentences(
        (
            *(f"{WAYS[way]}: {told(found)}" for way, found in tried["ways"].items()),
            f"a daemon with room for its {room['agents']}: {told(room)}" if room else "",
        )
    )


def agents_peers(result: Report) -> str:
    peer = result.results["tried"][-1]["peer"]
    if not peer:
        return ""
    wake = peer["wake_up"]
    return (
        f"transformers' continuous batching: {peer['answers']} of {peer['wanted']} answers, "
        f"{peer['answers_per_minute']:.0f} a minute; next token after a tool {ms(wake['p50'])}, p99 {ms(wake['p99'])}"
        + "".join(f"; {why}" for why in peer["failures"])
    )
