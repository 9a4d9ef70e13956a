"""The commands against a scripted daemon: their output, their requests, and their exit codes."""

from __future__ import annotations

import json
import math
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result
from msgspec.structs import replace

import djinn_client
from djinn_client.protocol import (
    BudgetReply,
    CloseSession,
    DeviceInfo,
    Done,
    Failure,
    GetStatus,
    ListModels,
    ListPrefixes,
    ListSessions,
    LoadModel,
    ModelInfo,
    ModelReply,
    Models,
    PauseReply,
    PauseSession,
    PlanModel,
    PlanReply,
    Prefixes,
    PrefixInfo,
    PrefixPublished,
    PrefixWithdrawn,
    Progress,
    PublishPrefix,
    ResumeSession,
    Sessions,
    SetBudget,
    StatusReply,
    UnloadModel,
    WithdrawPrefix,
)
from djinn_client.protocol.fields.placing import ModelPlan, Placing
from djinn_client.protocol.fields.scheduling import CLASSES, Latency, Spread
from djinnctl import screen, top
from djinnctl.cli import main
from djinnctl.render import plain
from tests.support.scripted_daemon import Line, ScriptedDaemon, session_info

TINY = ModelInfo(
    name="djinn-tiny",
    path="/models/djinn-tiny",
    family="llama",
    state="ready",
    dtype="float32",
    parameters=4_100_000,
    blocks=8,
    vocab=4096,
    max_context=2048,
    weight_bytes=16 << 20,
    kv_bytes=64 << 20,
    page_size=16,
    page_bytes=1 << 19,
    pages=128,
    pages_used=3,
    host_pages=4096,
    host_pages_used=17,
    sessions=2,
)
BROKEN = ModelInfo(name="broken", path="/models/broken", state="failed", error="config.json is not JSON")
STREAMED = replace(
    TINY,
    name="llama",
    blocks=40,
    blocks_plain=29,
    blocks_streamed=11,
    streamed_bytes=13 << 29,
    notes=["float16 blocks stay plain: their exponents have 5 bits only, which leaves nothing to pack"],
)
PLAN = ModelPlan(
    model="llama",
    family="llama",
    dtype="bfloat16",
    budget_bytes=22 << 30,
    blocks=40,
    blocks_plain=29,
    blocks_packed=0,
    blocks_streamed=11,
    plain_block_bytes=605 << 20,
    packed_block_bytes=0,
    weight_bytes=25 << 30,
    resident_bytes=17 << 30,
    streamed_bytes=13 << 29,
    ring_bytes=9 << 28,
    scratch_bytes=0,
    rest_bytes=5 << 27,
    kv_bytes=1 << 30,
    page_bytes=7 << 19,
    page_tokens=96,
    workspace_bytes=1 << 28,
    reserved_bytes=1 << 29,
    host_bytes=24 << 30,
    slots=3,
    bus_bytes_per_s=55.3e9,
    memory_bytes_per_s=4.229e12,
    reading_bytes_per_s=4.3e12,
    flops_per_s=712e12,
    launch_s=4.1e-6,
    first_token_s=0.1305,
    step_s={1: 0.1249, 16: 0.126},
    notes=["packing is off"],
)
STATUS = StatusReply(
    id=0,
    version="0.1.0",
    pid=4711,
    uptime_s=18_120.0,
    address="/run/djinnd/djinnd.sock",
    state="ready",
    devices=[
        DeviceInfo(
            name="cuda:0",
            description="NVIDIA H200",
            budget_bytes=20 << 30,
            used_bytes=13 << 30,
            state="ready",
            pid=4712,
            steps=12_345,
            generated_tokens=99_000,
        )
    ],
    models=[TINY, BROKEN],
    sessions={"interactive": 4, "agent": 1, "batch": 0},
    requests_running=3,
    requests_queued=1,
    connections=5,
    arena_bytes=3 << 29,
    guessed_tokens=5_000,
    kept_tokens=4_000,
    latency={
        "interactive": Latency(
            queued=Spread(1_234_567, 0.000_123, 0.000_113, 0.000_127, 0.001_1, 0.002),
            between_tokens=Spread(123_456_789, 0.0123, 0.0121, 0.0145, 0.0301, 1.25),
        ),
        "agent": Latency(wake_up=Spread(7, 0.15, 0.12, 0.25, 0.25, 75.0)),
        "batch": Latency(),
    },
)
WAITING = session_info(
    tokens=70,
    user=0,
    user_name="root",
    state="waiting",
    pages=3,
    host_pages=12,
    page_bytes=1 << 22,
    idle_s=7.0,
    priority="agent",
    latency=Latency(wake_up=Spread(1, 0.25, 0.25, 0.25, 0.25, 0.25)),
)
RUNNING = session_info(
    id="s-2",
    user=0,
    user_name="root",
    state="running",
    tokens=5,
    pages=1,
    disk_pages=9,
    page_bytes=1 << 22,
    priority="batch",
)
PREFIX = PrefixInfo(id="p-1", model="llama", tokens=2048, user=0, user_name="root", created=1_750_000_000.0)
FINDINGS = ["page 3 has 2 owners", "session s-1 has 4 pages and needs 5"]


def answer(line: Line) -> None:
    """A daemon with one model that is loaded, one that is broken, and sessions s-1 and s-2."""
    line.welcome()
    while (request := line.receive()) is not None:
        match request:
            case GetStatus(id=id, check=check):
                line.send(replace(STATUS, id=id, integrity=FINDINGS if check else []))
            case ListModels(id=id):
                line.send(Models(id=id, models=[TINY, BROKEN]))
            case ListSessions(id=id):
                line.send(Sessions(id=id, sessions=[WAITING, RUNNING]))
            case LoadModel(id=id, model="llama", placing=Placing()):
                line.send(ModelReply(id=id, model=STREAMED))
            case PlanModel(id=id, model="llama"):
                line.send(PlanReply(id=id, plan=PLAN))
            case SetBudget(id=id, memory_bytes=1):
                line.send(Failure(id=id, code="out_of_memory", message="the budget could go down to 7 GiB"))
            case PauseSession(id=id, session="s-1", tier=tier):
                line.send(PauseReply(id=id, tier=tier, pages=15, nbytes=60 << 20, seconds=0.0123))
            case ResumeSession(id=id, session="s-1"):
                line.send(Done(id=id))
            case PublishPrefix(id=id, session="s-1", tokens=tokens):
                line.send(PrefixPublished(id=id, prefix=replace(PREFIX, tokens=tokens or 2048)))
            case PublishPrefix(id=id):
                line.send(Failure(id=id, code="session_not_found", message="no such session"))
            case ListPrefixes(id=id):
                line.send(Prefixes(id=id, prefixes=[PREFIX]))
            case WithdrawPrefix(id=id, prefix=name):
                line.send(PrefixWithdrawn(id=id, in_force=name == "p-1"))
            case SetBudget(id=id, memory_bytes=0):
                line.send(Failure(id=id, code="invalid_request", message="memory_bytes is 0"))
            case SetBudget(id=id, memory_bytes=memory_bytes):
                reply = BudgetReply(id=id, budget_bytes=memory_bytes, used_bytes=1 << 30, seconds=0.42, models=[])
                line.send(replace(reply, models=[TINY, STREAMED]))
            case LoadModel(id=id, model="djinn-tiny", kv_bytes=kv_bytes):
                for done in (0, 8 << 20, 16 << 20):
                    line.send(Progress(id=id, model="djinn-tiny", stage="reading", done=done, total=16 << 20))
                line.send(Progress(id=id, model="djinn-tiny", stage="checking"))
                line.send(ModelReply(id=id, model=replace(TINY, kv_bytes=kv_bytes)))
            case LoadModel(id=id, model=model) | UnloadModel(id=id, model=model, force=False):
                line.send(Failure(id=id, code="model_not_found", message=f"no model {model}"))
            case UnloadModel(id=id) | CloseSession(id=id, session="s-1" | "s-2"):
                line.send(Done(id=id))
            case CloseSession(id=id) | PauseSession(id=id) | ResumeSession(id=id):
                line.send(Failure(id=id, code="session_not_found", message="no such session"))
            case _:
                raise AssertionError(request)


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner(env={"DJINND_ADDRESS": "", "NO_COLOR": "1", "COLUMNS": "", **environment}).invoke(main, arguments)


def until_ctrl_c(ends: tuple[int, int], shown: bytes, *arguments: str) -> tuple[int, bytes]:
    """Interrupts the command when it has `shown` something in its end of a pipe or a pseudo-terminal. Its exit code,
    and all that came out."""
    ours, theirs = ends
    command = [sys.executable, "-m", "djinnctl", *arguments]
    environment = os.environ | {"PYTHONPATH": ":".join(filter(None, sys.path)), "TERM": "xterm", "COLUMNS": "80"}
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        output = b""
        try:
            while shown not in output:
                data = os.read(ours, 1 << 16)
                assert data, output
                output += data
            process.send_signal(signal.SIGINT)
            with suppress(OSError):  # EIO: the other end is closed
                while data := os.read(ours, 1 << 16):
                    output += data
            process.wait()
        finally:
            process.kill()
            os.close(ours)
    return process.returncode, output


@pytest.fixture
def address(daemon: ScriptedDaemon) -> str:
    return daemon.play(answer)


def words(text: str) -> str:
    return " ".join(text.split())


def test_status(address: str) -> None:
    result = run("status", "--address", address)
    assert result.exit_code == 0
    shown = words(result.stdout)
    assert "djinnd 0.1.0 ready pid 4711 up 5h02m /run/djinnd/djinnd.sock" in shown
    assert "requests: 3 running, 1 queued sessions: 4 interactive, 1 agent connections: 5 arena: 1.5 GiB" in shown
    assert "guessed tokens: 5.0 k, 4.0 k of them right" in shown
    assert "cuda:0 ready 13.0 GiB of 20.0 GiB 12 k 99 k 0 NVIDIA H200" in shown
    assert "djinn-tiny ready float32 4.1 M 2048 16.0 MiB 64.0 MiB 3/128 2" in shown
    assert "broken: config.json is not JSON" in shown
    assert "PAGES OF DEVICE HOST DISK EACH djinn-tiny 3/128 17/4096 - 512 KiB" in shown


def test_status_tells_the_latencies_that_were_measured(address: str) -> None:
    shown = run("status", "--address", address).stdout
    lines = [words(line) for line in shown[shown.index("LATENCY") :].splitlines()]
    assert lines == [
        "LATENCY CLASS COUNT MEAN P50 P90 P99 WORST",
        "queued interactive 1.2 M 0.123 ms 0.113 ms 0.127 ms 1.1 ms 2 ms",
        "between tokens interactive 123 M 12.3 ms 12.1 ms 14.5 ms 30.1 ms 1.25 s",
        "wake up agent 7 150 ms 120 ms 250 ms 250 ms 1m15s",
    ]


def test_status_of_a_daemon_that_has_measured_nothing(daemon: ScriptedDaemon) -> None:
    def script(line: Line) -> None:
        line.welcome()
        line.send(replace(STATUS, id=line.expect(GetStatus).id, latency={"agent": Latency()}))

    assert "LATENCY" not in run("status", "--address", daemon.play(script)).stdout


@pytest.mark.parametrize("arguments", [("status",), ("ps",), ("top",), ("models",), ("status", "--check")])
def test_every_table_fits_80_columns_and_has_no_colour_of_its_own(address: str, arguments: tuple[str, ...]) -> None:
    result = run(*arguments, "--address", address, COLUMNS="80")
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize(
    ("no_color", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)], ids=["a terminal", "NO_COLOR"]
)
def test_colours_only_where_they_are_wanted(address: str, no_color: dict[str, str], coloured: bool) -> None:
    result = run("status", "--address", address, FORCE_COLOR="1", TERM="xterm", **{"NO_COLOR": "", **no_color})
    assert ("\x1b[32mready" in result.stdout) is coloured


def test_status_as_json_holds_every_field(address: str) -> None:
    shown = json.loads(run("status", "--json", "--address", address).stdout)
    assert shown.keys() == set(StatusReply.__struct_fields__) - {"id"}
    assert shown["models"][0].keys() == set(ModelInfo.__struct_fields__)
    assert shown["integrity"] == []
    assert shown["sessions"] == {"interactive": 4, "agent": 1, "batch": 0}
    assert shown["latency"].keys() == set(CLASSES)
    assert shown["latency"]["interactive"].keys() == set(Latency.__struct_fields__)
    assert shown["latency"]["agent"]["wake_up"] == {
        "count": 7,
        "mean": 0.15,
        "p50": 0.12,
        "p90": 0.25,
        "p99": 0.25,
        "worst": 75.0,
    }


def test_options_before_and_after_the_command(address: str) -> None:
    before = run("--json", "--address", address, "models")
    after = run("models", "--json", "--address", address)
    assert json.loads(before.stdout) == json.loads(after.stdout)


def test_the_address_comes_from_the_environment(address: str) -> None:
    assert run("models", DJINND_ADDRESS=address).exit_code == 0


def test_check_shows_what_it_found_and_fails(address: str) -> None:
    result = run("status", "--check", "--address", address)
    assert result.exit_code == 1
    assert all(finding in words(result.stdout) for finding in FINDINGS)
    as_json = run("status", "--check", "--json", "--address", address)
    assert as_json.exit_code == 1
    assert json.loads(as_json.stdout)["integrity"] == FINDINGS


def test_check_that_finds_nothing(daemon: ScriptedDaemon) -> None:
    def script(line: Line) -> None:
        line.welcome()
        request = line.expect(GetStatus)
        assert request.check
        line.send(replace(STATUS, id=request.id))

    result = run("status", "--check", "--address", daemon.play(script))
    assert result.exit_code == 0
    assert result.stdout.endswith("check: consistent\n")


def test_ps(address: str) -> None:
    result = run("ps", "--address", address)
    assert result.exit_code == 0
    lines = [words(line) for line in result.stdout.splitlines()]
    assert lines == [
        "SESSION USER MODEL CLASS STATE TOKENS DEVICE HOST DISK BYTES IDLE",
        "s-1 root djinn-tiny agent waiting 70 3 12 - 60.0 MiB 7s",
        "s-2 root djinn-tiny batch running 5 1 - 9 40.0 MiB 0s",
    ]
    shown = json.loads(run("ps", "--json", "--address", address).stdout)
    assert (shown[0]["state"], shown[0]["host_pages"], shown[0]["page_bytes"]) == ("waiting", 12, 1 << 22)
    assert (shown[0]["latency"]["wake_up"]["p99"], shown[1]["latency"]["wake_up"]["count"]) == (0.25, 0)


def test_top_is_one_frame_where_there_is_no_terminal(address: str) -> None:
    for arguments in ((), ("--once",)):
        result = run("top", *arguments, "--address", address)
        assert result.exit_code == 0, result.stderr
        lines = [words(line) for line in result.stdout.splitlines()]
        assert lines[0].startswith("djinnd 0.1.0 ready pid 4711")
        assert any(line.startswith("cuda:0 ready 13.0 GiB of 20.0 GiB") for line in lines)
        assert "djinn-tiny 3/128 17/4096 - 512 KiB" in lines
        assert [line.split()[0] for line in lines[-2:]] == ["s-2", "s-1"], "the busiest first"
    shown = json.loads(run("top", "--json", "--address", address).stdout)
    assert shown.keys() == {"status", "sessions", "tokens_per_s"}
    assert [info["id"] for info in shown["sessions"]] == ["s-2", "s-1"]


def test_top_tells_the_rate_between_two_glances(daemon: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = [1000, 1500, 200]  # the last one of an engine that was started anew

    def script(line: Line) -> None:
        line.welcome()
        for tokens in counts:
            request = line.expect(GetStatus)
            devices = [replace(STATUS.devices[0], generated_tokens=tokens)]
            line.send(replace(STATUS, id=request.id, devices=devices))
            line.send(Sessions(id=line.expect(ListSessions).id, sessions=[]))

    times = iter((10.0, 12.0, 13.0))
    with djinn_client.Client(daemon.play(script)) as client:
        read = top.Reader(client)
        with monkeypatch.context() as patch:
            patch.setattr(top.time, "monotonic", lambda: next(times))
            assert [read().tokens_per_s for _ in counts] == [None, 250.0, 0.0]


def test_top_on_a_terminal_goes_on_until_ctrl_c(address: str) -> None:
    """A pseudo-terminal, because a pipe gets one frame."""
    code, shown = until_ctrl_c(pty.openpty(), b"tokens/s:", "top", "--address", address)  # the second frame has a rate
    assert code == 0
    assert b"Traceback" not in shown and shown.endswith(b"\x1b[?25h"), "the cursor is back"


def test_session_ids_are_never_cut(daemon: ScriptedDaemon) -> None:
    long_id = "0123456789abcdef0123456789abcdef"

    def script(line: Line) -> None:
        line.welcome()
        request = line.expect(ListSessions)
        info = session_info(id=long_id, model="meta-llama/Llama-2-13b-hf", tokens=131_072, kv_tokens=131_072)
        line.send(Sessions(id=request.id, sessions=[info]))

    address = daemon.play(script)
    result = run("ps", "--address", address, COLUMNS="80")
    assert long_id in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    whole = run("ps", "--address", address).stdout
    assert "…" in result.stdout and "…" not in whole, "a pipe gets everything"
    assert "meta-llama/Llama-2-13b-hf interactive" in words(whole)


def test_no_sessions_and_no_models(daemon: ScriptedDaemon) -> None:
    def script(line: Line) -> None:
        line.welcome()
        match line.receive():
            case ListSessions(id=id):
                line.send(Sessions(id=id, sessions=[]))
            case ListModels(id=id):
                line.send(Models(id=id, models=[]))

    address = daemon.play(script)
    assert run("ps", "--address", address).stdout == "no sessions\n"
    assert run("models", "--address", address).stdout.startswith("no models")


def test_load(address: str) -> None:
    result = run("load", "djinn-tiny", "--kv", "1.5GiB", "--address", address)
    assert result.exit_code == 0
    assert result.stdout == (
        "djinn-tiny is ready: llama, 4.1 M parameters in 8 blocks, float32; weights 16.0 MiB, KV 1.5 GiB in 128 pages\n"
    )
    assert result.stderr == "", "the line with its progress is for terminals"


def test_load_says_where_the_blocks_are(address: str) -> None:
    result = run("load", "llama", "--resident", "29", "--address", address)
    assert result.exit_code == 0, result.stderr
    assert "in 40 blocks (29 plain, 0 packed, 11 streamed: 6.5 GiB a step), float32;" in words(result.stdout)


def test_load_says_what_is_not_as_it_was_asked(address: str) -> None:
    lines = run("load", "llama", "--resident", "auto", "--address", address).stdout.splitlines()
    assert len(lines) == 2 and lines[0].startswith("llama is ready")
    assert lines[1] == f"note: {STREAMED.notes[0]}"


def test_models_say_where_the_blocks_are_and_why(daemon: ScriptedDaemon) -> None:
    def script(line: Line) -> None:
        line.welcome()
        request = line.expect(ListModels)
        line.send(Models(id=request.id, models=[TINY, STREAMED]))

    result = run("models", "--address", daemon.play(script), COLUMNS="80")
    assert "llama: 29 plain, 0 packed, 11 streamed: 6.5 GiB a step" in result.stdout
    assert "llama: float16 blocks stay plain" in result.stdout
    assert "djinn-tiny:" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.parametrize("command", ["load", "plan"])
@pytest.mark.parametrize(
    ("options", "placing"),
    [
        ((), None),
        (("--resident", "auto"), Placing()),
        (("--resident", "29", "--slots", "4"), Placing(resident=29, slots=4)),
        (("--resident", "0.73", "--ring-gb", "4.5"), Placing(resident=0.73, ring_bytes=4_500_000_000)),
        (("--packing", "off"), Placing(packing=False)),
        (("--packing", "auto"), Placing()),
        (("--speculation", "auto"), Placing(speculation=True)),
        (("--speculation", "draft=small"), Placing(speculation=True, draft="small")),
    ],
    ids=str,
)
def test_where_blocks_are_to_go(
    daemon: ScriptedDaemon, command: str, options: tuple[str, ...], placing: Placing | None
) -> None:
    asked: list[LoadModel | PlanModel] = []

    def script(line: Line) -> None:
        line.welcome()
        request = line.receive()
        assert isinstance(request, LoadModel | PlanModel)
        asked.append(request)
        reply = ModelReply(id=request.id, model=TINY)
        line.send(reply if command == "load" else PlanReply(id=request.id, plan=PLAN))

    assert run(command, "llama", "--kv", "1MiB", *options, "--address", daemon.play(script)).exit_code == 0
    assert (asked[0].model, asked[0].kv_bytes, asked[0].placing) == ("llama", 1 << 20, placing)


@pytest.mark.parametrize(
    ("options", "sizes"),
    [((), (0, None, None)), (("--kv", "1GiB", "--host-kv", "16GiB", "--disk-kv", "0B"), (1 << 30, 16 << 30, 0))],
)
def test_load_with_memory_for_pages_tier_by_tier(
    daemon: ScriptedDaemon, options: tuple[str, ...], sizes: tuple[int, int | None, int | None]
) -> None:
    def script(line: Line) -> None:
        line.welcome()
        request = line.expect(LoadModel)
        assert (request.kv_bytes, request.host_kv_bytes, request.disk_kv_bytes) == sizes
        line.send(ModelReply(id=request.id, model=TINY))

    assert run("load", "llama", *options, "--address", daemon.play(script)).exit_code == 0


@pytest.mark.parametrize(("options", "seconds"), [((), None), (("--keep-alive", "5min"), 300.0)])
def test_load_for_as_long_as_it_is_called(
    daemon: ScriptedDaemon, options: tuple[str, ...], seconds: float | None
) -> None:
    def script(line: Line) -> None:
        line.welcome()
        request = line.expect(LoadModel)
        assert request.keep_alive_s == seconds
        line.send(ModelReply(id=request.id, model=TINY))

    assert run("load", "llama", *options, "--address", daemon.play(script)).exit_code == 0


def test_load_without_a_copy_on_the_host(daemon: ScriptedDaemon) -> None:
    def script(line: Line) -> None:
        line.welcome()
        request = line.expect(LoadModel)
        assert request.placing == Placing(keep_host=False)
        line.send(ModelReply(id=request.id, model=TINY))

    assert run("load", "llama", "--no-keep-host", "--address", daemon.play(script)).exit_code == 0


def test_plan(address: str) -> None:
    result = run("plan", "llama", "--memory", "22GiB", "--address", address)
    assert result.exit_code == 0, result.stderr
    shown = [words(line) for line in result.stdout.splitlines()]
    assert shown[:3] == [
        "llama llama, bfloat16, 40 blocks, 25.0 GiB",
        "blocks: 29 plain, 0 packed, 11 streamed: 6.5 GiB a step",
        "",
    ]
    for line in (
        "resident blocks 17.0 GiB 29 plain, 0 packed",
        "ring 2.2 GiB 3 slots",
        "KV pages 1.0 GiB 1.2 GiB for a session of 32,768 tokens",  # 342 pages of 96 tokens
        "in all 21.6 GiB of 22.0 GiB",
        "host 24.0 GiB shared memory",
        "first token of 512 tokens: 130 ms",
        "step of 1 session: 125 ms, 8.01 tokens/s",
        "step of 16 sessions: 126 ms, 127 tokens/s",
        "note: packing is off",
    ):
        assert line in shown, line
    assert "measured on this device: bus 55.3 GB/s, memory 4.23 TB/s, products 712 TFLOP/s" in words(result.stdout)
    assert not any(line.startswith("scratch") for line in shown), "nothing is packed"
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_plan_as_json_holds_every_field(address: str) -> None:
    shown = json.loads(run("plan", "llama", "--json", "--address", address).stdout)
    assert shown.keys() == set(ModelPlan.__struct_fields__)
    assert shown["step_s"] == {"1": 0.1249, "16": 0.126}


def test_budget_shows_what_there_is(address: str) -> None:
    result = run("budget", "--address", address)
    assert result.exit_code == 0
    assert "cuda:0 ready 13.0 GiB of 20.0 GiB" in words(result.stdout)
    assert json.loads(run("budget", "--json", "--address", address).stdout)[0]["budget_bytes"] == 20 << 30


def test_budget_with_a_size_changes_the_budget(address: str) -> None:
    result = run("budget", "16GiB", "--address", address)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[:2] == [
        "budget 16.0 GiB, 1.0 GiB in use; changed in 420 ms",
        "llama: 29 plain, 0 packed, 11 streamed: 6.5 GiB a step",
    ]
    assert json.loads(run("budget", "16GiB", "--json", "--address", address).stdout)["budget_bytes"] == 16 << 30
    refused = run("budget", "0B", "--address", address)
    assert (refused.exit_code, refused.stderr) == (1, "djinnctl: memory_bytes is 0\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ("load", "m", "--resident", "-1"),
        ("load", "m", "--resident", "1.5"),
        ("load", "m", "--resident", "nan"),
        ("plan", "m", "--slots", "-1"),
        ("plan", "m", "--ring-gb", "much"),
        ("plan", "m", "--packing", "on"),
        ("plan", "m", "--memory", "24gb"),
        ("plan",),
        ("budget", "16"),
        ("budget", "16GiB", "8GiB"),
    ],
    ids=" ".join,
)
def test_wrong_places_are_wrong_usage(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2


@pytest.mark.parametrize(
    ("value", "arguments"),
    [
        ("9" * 400 + "GiB", ("budget",)),
        ("9" * 400 + "GiB", ("plan", "m", "--memory")),
        ("8388608TiB", ("load", "m", "--kv")),
        ("8388608TiB", ("load", "m", "--host-kv")),
        (str(2**63), ("plan", "m", "--slots")),
        (str(2**63), ("load", "m", "--resident")),
        (str(2**63), ("prefix", "publish", "s", "--tokens")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else value[:20],
)
def test_numbers_beyond_the_wire_s_are_wrong_usage(value: str, arguments: tuple[str, ...]) -> None:
    result = run(*arguments, value)
    option = arguments[-1] if len(arguments) > 1 else "[SIZE]"
    assert result.exit_code == 2 and f"Invalid value for '{option}'" in result.stderr


@pytest.mark.parametrize("arguments", [("plan", "m", "--memory"), ("plan", "m", "--kv"), ("load", "m", "--kv")])
def test_nothing_is_not_the_default(arguments: tuple[str, ...]) -> None:
    result = run(*arguments, "0B")
    assert result.exit_code == 2
    assert "'0B' is no memory at all; leave the option out for the default" in words(result.stderr)


def test_free_lowers_the_budget_and_says_how_to_give_it_back(address: str) -> None:
    result = run("free", "4.5GiB", "--address", address)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "budget 15.5 GiB, 1.0 GiB in use; changed in 420 ms"
    assert lines[-1] == "4.5 GiB are yours until `djinnctl budget 20GiB`"
    assert json.loads(run("free", "4GiB", "--json", "--address", address).stdout)["budget_bytes"] == 16 << 30


def test_a_free_of_more_than_the_budget_asks_the_engine_for_its_least(address: str) -> None:
    for size in ("20GiB", "1TiB"):
        result = run("free", size, "--address", address)
        assert (result.exit_code, result.stderr) == (1, "djinnctl: the budget could go down to 7 GiB\n")


def test_a_refused_free_says_what_holds_the_memory(daemon: ScriptedDaemon) -> None:
    def script(line: Line) -> None:
        line.welcome()
        line.send(replace(STATUS, id=line.expect(GetStatus).id))
        refused = {"needed": 7 << 30, "budget": 1}
        id = line.expect(SetBudget).id
        line.send(Failure(id=id, code="out_of_memory", message="a budget of 0.0 MiB is too small", data=refused))
        line.send(Models(id=line.expect(ListModels).id, models=[TINY, BROKEN]))

    result = run("free", "100GiB", "--address", daemon.play(script))
    assert result.exit_code == 1
    assert result.stderr == (
        "djinnctl: nothing was freed: of the budget of 20.0 GiB, the daemon needs 7.0 GiB for "
        "djinn-tiny (2 sessions), and at most 13.0 GiB can be freed\n"
    )


def test_free_before_there_is_an_engine(daemon: ScriptedDaemon) -> None:
    def script(line: Line) -> None:
        line.welcome()
        request = line.expect(GetStatus)
        line.send(replace(STATUS, id=request.id, devices=[replace(STATUS.devices[0], budget_bytes=0)]))

    result = run("free", "1GiB", "--address", daemon.play(script))
    assert result.exit_code == 1 and "try again in a moment" in result.stderr


def test_pause_and_resume(address: str) -> None:
    result = run("pause", "s-1", "--address", address)
    assert result.stdout == "s-1 is paused: 15 pages, 60.0 MiB, went to the host in 12.3 ms\n"
    shown = json.loads(run("pause", "s-1", "--to", "disk", "--json", "--address", address).stdout)
    assert shown == {"tier": "disk", "pages": 15, "nbytes": 60 << 20, "seconds": 0.0123}
    assert run("resume", "s-1", "--address", address).stdout == "resumed s-1\n"
    for command in ("pause", "resume"):
        result = run(command, "s-9", "--address", address)
        assert (result.exit_code, result.stderr) == (1, "djinnctl: no such session\n")


def test_load_as_json_is_only_json(address: str) -> None:
    result = run("load", "djinn-tiny", "--json", "--address", address)
    assert json.loads(result.stdout)["name"] == "djinn-tiny"
    assert result.stderr == ""


def test_a_wrong_size_is_wrong_usage() -> None:
    result = run("load", "djinn-tiny", "--kv", "4gb")
    assert result.exit_code == 2
    assert "'4gb' is not a size" in result.stderr


def test_an_error_of_the_daemon_is_one_line_and_exit_1(address: str) -> None:
    for arguments in (("load", "nonesuch"), ("unload", "nonesuch")):
        result = run(*arguments, "--address", address)
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.splitlines()[-1] == "djinnctl: no model nonesuch"


def test_no_daemon_is_one_line_and_exit_2() -> None:
    for command in (
        ("status",),
        ("ps",),
        ("models",),
        ("load", "m"),
        ("plan", "m"),
        ("budget",),
        ("budget", "1GiB"),
        ("unload", "m"),
        ("close", "s"),
        ("fork", "s"),
        ("pause", "s"),
        ("resume", "s"),
        ("free", "1GiB"),
        ("top",),
    ):
        result = run(*command, "--address", "/nowhere/s")
        assert (result.exit_code, result.stdout) == (2, ""), command
        assert result.stderr == "djinnctl: no daemon at /nowhere/s: start it with `djinnd`\n"


def test_wrong_usage_is_exit_2() -> None:
    for arguments in (("pause", "s", "--to", "device"), ("resume",), ("free",), ("free", "1"), ("top", "x")):
        assert run(*arguments).exit_code == 2, arguments
    for arguments in (("close",), ("fork",), ("nonesuch",), ("status", "--watch", "0"), ("load",)):
        assert run(*arguments).exit_code == 2, arguments


def test_unload(address: str) -> None:
    result = run("unload", "djinn-tiny", "--force", "--address", address)
    assert (result.exit_code, result.stdout) == (0, "unloaded djinn-tiny\n")


def test_close_goes_on_after_a_session_that_does_not_exist(address: str) -> None:
    result = run("close", "s-1", "s-9", "s-2", "--address", address)
    assert (result.exit_code, result.stdout) == (1, "closed s-1\nclosed s-2\nno session s-9\n")
    result = run("close", "s-1", "--json", "--address", address)
    assert (result.exit_code, json.loads(result.stdout)) == (0, {"closed": ["s-1"], "missing": []})


def test_version_with_and_without_a_daemon(address: str) -> None:
    assert run("version", "--address", address).stdout == "djinnctl 0.1.0, protocol 1\ndjinnd 0.1.0\n"
    result = run("version", "--address", "/nowhere/s")
    assert result.exit_code == 0
    assert result.stdout.endswith("djinnd unknown: no daemon at /nowhere/s: start it with `djinnd`\n")
    assert json.loads(run("version", "--json", "--address", address).stdout)["djinnd"] == "0.1.0"


def test_its_own_version_needs_no_daemon() -> None:
    assert run("--version").stdout == f"{djinn_client.__version__}\n"


def three_times(line: Line) -> None:
    """Three readings of the models, and then the daemon is gone."""
    line.welcome()
    for used in (1, 2, 3):
        request = line.expect(ListModels)
        line.send(Models(id=request.id, models=[replace(TINY, pages_used=used)]))
    line.expect(ListModels)


def test_watch_reads_again_until_the_daemon_is_gone(daemon: ScriptedDaemon) -> None:
    result = run("models", "--watch", "0.1", "--json", "--address", daemon.play(three_times))
    assert [json.loads(line)[0]["pages_used"] for line in result.stdout.splitlines()] == [1, 2, 3]
    assert result.exit_code == 2
    assert "closed the connection" in result.stderr


@pytest.mark.parametrize("colour", [{}, {"FORCE_COLOR": "1", "TERM": "xterm"}], ids=["plain", "FORCE_COLOR"])
def test_watch_shows_every_table_where_there_is_no_terminal(
    daemon: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch, colour: dict[str, str]
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    result = run("models", "--watch", "0.1", "--address", daemon.play(three_times), **colour)
    assert result.exit_code == 2
    assert [word for word in result.stdout.split() if word.endswith("/128")] == ["1/128", "2/128", "3/128"]


def test_watch_sleeps_in_pieces_as_a_sleep_that_has_begun_misses_ctrl_c(
    daemon: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        slept.append(seconds)
        if now > 60:
            raise KeyboardInterrupt

    monkeypatch.setattr(screen, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now))
    result = run("models", "--watch", "3600", "--json", "--address", daemon.play(answer))
    assert result.exit_code == 0 and len(result.stdout.splitlines()) == 1
    assert max(slept) <= 0.5


@pytest.mark.parametrize("ends", [os.pipe, pty.openpty], ids=["a pipe", "a terminal"])
def test_watch_shows_at_once_and_ends_with_whole_lines(
    daemon: ScriptedDaemon, ends: Callable[[], tuple[int, int]]
) -> None:
    def script(line: Line) -> None:
        line.welcome()
        line.send(replace(STATUS, id=line.expect(GetStatus).id))
        line.expect_hang_up()

    arguments = ("status", "--check", "--watch", "3600", "--address", daemon.play(script))
    code, shown = until_ctrl_c(ends(), b"1m15s", *arguments)
    assert code == 0
    assert shown.replace(b"\x1b[?25h", b"").splitlines()[-1] == b"check: consistent"


@pytest.mark.parametrize("seconds", ["nan", "inf", "1e12", "86401", "0"])
def test_watch_at_times_that_cannot_be_slept(seconds: str) -> None:
    result = run("ps", "--watch", seconds)
    assert result.exit_code == 2 and "Invalid value for '--watch'" in result.stderr


@pytest.mark.parametrize("arguments", [("ps",), ("ps", "--json"), ("--help",)], ids=" ".join)
def test_output_that_cannot_be_written_is_one_line_and_exit_1(address: str, arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "djinnctl", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": ":".join(filter(None, sys.path)), "DJINND_ADDRESS": address},
        )
    told = "djinnctl: the output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, told)


@pytest.mark.parametrize("arguments", [("ps", "--json"), ("fork", "s-1", "--json")], ids=" ".join)
def test_a_daemon_that_does_not_answer_is_told_of_while_it_is_waited_for(
    daemon: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    timers: list[threading.Timer] = []

    class Elapsed(threading.Timer):
        def start(self) -> None:
            timers.append(self)
            self.function()

    def script(line: Line) -> None:
        line.welcome()
        if isinstance(request := line.receive(), ListSessions):
            line.send(Sessions(id=request.id, sessions=[]))

    monkeypatch.setattr(threading, "Timer", Elapsed)
    result = run(*arguments, "--address", daemon.play(script))
    silence = f"djinnctl: the daemon at {daemon.address} has not answered for 5 s: waiting; Ctrl-C, or see"
    assert result.stderr.splitlines()[0] == f"{silence} `djinnctl doctor`"
    assert result.stdout == ("[]\n" if "ps" in arguments else "")
    (timer,) = timers
    assert timer.interval == 5.0 and timer.finished.is_set(), "it is cancelled when the daemon has answered"


def test_ctrl_c_ends_watching_well(daemon: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    result = run("models", "--watch", "--address", daemon.play(answer))
    assert result.exit_code == 0


@pytest.mark.parametrize(
    "command",
    [
        *("", "status", "ps", "top", "models", "load", "unload", "free"),
        *("close", "fork", "pause", "resume", "doctor", "version"),
    ],
)
def test_help_tells_the_exit_codes(command: str) -> None:
    result = run(*filter(None, (command,)), "--help")
    assert result.exit_code == 0
    assert "1  the daemon answered with an error, or a check failed" in result.stdout
    assert "2  wrong usage, or no daemon to be reached" in result.stdout


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    heavy = {"torch", "transformers", "numpy", "asyncio", "rich", "djinnd"}
    program = "import sys\nfrom djinnctl.cli import main\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(filter(None, sys.path))},
    )
    assert not heavy & set(done.stdout.split())


def test_the_package_runs_as_a_module() -> None:
    done: Any = subprocess.run(
        [sys.executable, "-m", "djinnctl", "status", "--address", "/nowhere/s"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(filter(None, sys.path))},
    )
    assert (done.returncode, done.stderr) == (2, "djinnctl: no daemon at /nowhere/s: start it with `djinnd`\n")


def test_public_prefixes(address: str) -> None:
    def prefix(*arguments: str) -> Result:
        return run("prefix", *arguments, "--address", address)

    assert prefix("publish", "s-1").stdout == "p-1: 2048 tokens of llama are public\n"
    shown = json.loads(prefix("publish", "s-1", "--tokens", "512", "--json").stdout)
    assert shown == {
        "id": "p-1",
        "model": "llama",
        "tokens": 512,
        "user": 0,
        "created": 1_750_000_000.0,
        "user_name": "root",
    }
    assert prefix("publish", "s-1", "--tokens", "0").exit_code == 2
    result = prefix("publish", "s-9")
    assert (result.exit_code, result.stderr) == (1, "djinnctl: no such session\n")
    heading, row = prefix("list").stdout.splitlines()
    assert heading.split() == ["PREFIX", "MODEL", "TOKENS", "MARKED", "BY", "MARKED"]
    marked = datetime.fromtimestamp(1_750_000_000).strftime("%Y-%m-%d %H:%M")
    assert row.split() == ["p-1", "llama", "2048", "root", *marked.split()]
    assert [info["id"] for info in json.loads(prefix("list", "--json").stdout)] == ["p-1"]
    told = "p-1 is withdrawn; its pages stay shared until the model is loaded the next time\n"
    assert prefix("withdraw", "p-1").stdout == told
    assert prefix("withdraw", "p-2").stdout == "p-2 is withdrawn\n"
    assert json.loads(prefix("withdraw", "p-1", "--json").stdout) == {"withdrawn": "p-1", "in_force": True}


def test_json_has_no_infinities() -> None:
    value = {"a": [1.5, math.inf, -math.inf, math.nan], "b": {"c": 2}}
    assert json.loads(json.dumps(plain(value), allow_nan=False)) == {"a": [1.5, None, None, None], "b": {"c": 2}}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_for_the_shell(shell: str) -> None:
    result = run("completion", shell)
    assert result.exit_code == 0
    assert f"_DJINNCTL_COMPLETE={shell}_complete" in result.stdout


def test_models_and_sessions_are_completed(address: str) -> None:
    completing = ShellComplete(main, {}, "djinnctl", "_DJINNCTL_COMPLETE")
    told = ["--address", address]
    assert [each.value for each in completing.get_completions([*told, "load"], "djinn-t")] == ["djinn-tiny"]
    assert [each.value for each in completing.get_completions([*told, "why"], "s-1")] == ["s-1"]
    assert [each.value for each in completing.get_completions([*told, "pause"], "")] == ["s-1", "s-2"]
    assert [each.type for each in completing.get_completions([*told, "load"], "/srv/mod")] == ["dir"]
    assert completing.get_completions(["--address", "/nowhere/s", "why"], "") == []
